// How the two ends of a TCP connection between nodes prove the group's secret to each other.
//
//   listener -> caller     its nonce
//   caller   -> listener   its rank, its nonce, prove(kMember)
//   listener -> caller     prove(kLeader); or zeros: it is calling the caller itself
//   caller   -> listener   one byte: it has seen that proof
//
// All of fixed sizes: nothing is parsed before the proof, the rank only enters it. The proofs cover both ranks, both
// nonces and the group, so a recorded one is worth nothing on another connection, for another rank or group. Who sends
// the zeros proves nothing, and gets nothing but another call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "backend/bootstrap/sockets/authentication.h"
#include "backend/platform/process/descriptor.h"

namespace zeropg {

struct RankIdentity {
  int32_t rank = 0;
  std::string group;  // a name that no other group has
  std::string key;    // proves membership
};

// The caller's end. `own` outlives it. The socket is connected and non-blocking, and the same in every call.
class CallerHandshake {
 public:
  CallerHandshake(const RankIdentity& own, int32_t peer) : own_(&own), peer_(peer) {}

  enum class Step { kContinues, kProven, kPeerCalls };
  // Does what can be done without waiting. DistNetworkError where the connection broke or the other end proved nothing.
  Step advance(const Descriptor& socket);
  bool has_proved() const { return context_.has_value(); }  // to the other end
  // Whether that one did not take the proof, or had none of its own.
  bool is_refused() const { return is_refused_; }
  std::string session_key() const;  // of a proven connection

 private:
  void answer_nonce(const Descriptor& socket);
  Step judge_answer(const Descriptor& socket);

  const RankIdentity* own_;
  int32_t peer_;
  std::optional<ProofContext> context_;
  std::string received_;
  bool is_refused_ = false;
};

// The listener's end, likewise.
class ListenerHandshake {
 public:
  explicit ListenerHandshake(const RankIdentity& own) : own_(&own), nonce_(random_nonce()) {}

  void begin(const Descriptor& socket);
  // kProven: accept() or decline() comes next. kSeen: the connection is made.
  enum class Step { kContinues, kProven, kSeen };
  Step advance(const Descriptor& socket);
  void accept(const Descriptor& socket);
  void decline(const Descriptor& socket);

  int32_t rank() const { return rank_; }  // of the caller, once proven; -1 before
  std::string session_key() const;        // likewise

 private:
  const RankIdentity* own_;
  Nonce nonce_;
  ProofContext context_;
  int32_t rank_ = -1;
  std::string received_;
};

}  // namespace zeropg
