// What is known of the ranks on other nodes beside their bytes: what they said of themselves, when they gave a sign of
// life, and for whom they wait. It moves nothing: its owner, a RemoteTransport, hands it the frames that come and sends
// those that it asks for.
//
// Note [Waits]
// Who waits for a rank that itself waits for a third one should name the third. So a rank says with each sign of life
// for whom it waits just now; what it said long ago is not believed, since it may have been stopped meanwhile. It
// also says in which call: ranks that wait for each other, and would all receive, learn only thereby that they
// differ.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/transport/network/frame.h"
#include "backend/transport/rank_state.h"
#include "backend/transport/transport.h"

namespace zeropg {

// What is known of a rank on another node.
struct RemoteState {
  RankState state = RankState::kAlive;
  std::string failure;   // kFailed: what it says
  bool is_lost = false;  // the connection broke before it departed or failed
  std::string loss;      // why
};

// A frame that says that this rank lives, and for whom it waits.
struct SignOfLife {
  FrameHeader header;
  std::vector<std::byte> payload;
};

// Any thread.
class PeerLiveness {
 public:
  PeerLiveness(int32_t world_size, std::vector<int32_t> peers);

  RemoteState state_of(int32_t peer) const;
  // Changes whenever any peer's state does.
  uint64_t state_changes() const { return state_changes_.load(std::memory_order_acquire); }
  // Nothing more is to be expected of `peer`: it failed, left the group or is lost.
  bool is_gone(int32_t peer) const;
  std::string why_gone(int32_t peer) const;  // "rank 3 left the group"; empty: it is not gone
  // Peers that have left a question for a sign of life without an answer for `limit`.
  std::vector<int32_t> silent_for(std::chrono::milliseconds limit) const;
  // Whom `peer` waits for; empty: nobody, as far as is known.
  std::vector<int32_t> waits_of(int32_t peer, Lane lane) const;
  // In which call `peer` waits in the lane of collectives, as far as is known, or waited: what it called does not
  // change. Whatever bytes it sent.
  std::optional<WaitingCall> waiting_call_of(int32_t peer) const;

  // This rank waits for `awaited` in `lane`, and, in that of collectives, in `call`. To be said again while it does.
  void note_wait(Lane lane, const std::vector<int32_t>& awaited, const std::optional<WaitingCall>& call = {});
  void forget_waits();
  // What this rank has become, to be told to every peer; kAlive until it is said.
  struct OwnState {
    RankState state = RankState::kAlive;
    std::string text;
  };
  void note_own_state(RankState state, std::string text);
  OwnState own_state() const;
  std::vector<int32_t> own_waits(Lane lane) const;  // whom this rank waits for just now

  // What came. fault_in: what makes no sense in a frame of kind kState, kPing or kPong; null: nothing. Only frames
  // without a fault may be taken.
  static const char* fault_in(const FrameHeader& header);
  void take_frame(int32_t peer, const FrameHeader& header, const Payload& payload);
  void note_sign_of_life(int32_t peer);
  void lose(int32_t peer, const std::string& reason);

  // What is to be sent. Each of the peers of note_asked, and of those that ask_due returns, has to get a kPing now;
  // each that askers returns is owed this rank's sign of life until note_answered.
  void note_asked(const std::vector<int32_t>& peers);
  std::vector<int32_t> ask_due(const std::vector<int32_t>& peers);  // of these, those not asked for a while
  std::vector<int32_t> askers();
  SignOfLife sign_of_life() const;
  void note_answered(int32_t peer);

 private:
  using Clock = std::chrono::steady_clock;

  struct Wait {
    std::vector<int32_t> awaited;
    std::optional<WaitingCall> call;
    Clock::time_point noted{};
  };
  struct Peer {
    RemoteState remote;
    bool is_asker = false;
    Clock::time_point asked{};  // zero: no question is open
    Clock::time_point last_asked{};
    Wait waits[kLaneCount];  // as it said itself
  };

  static bool is_gone(const RemoteState& remote);
  void take_state(RemoteState& remote, uint64_t state, const Payload& payload);
  void take_pong(Peer& peer, const FrameHeader& header, const Payload& payload);
  Wait own_wait(Lane lane) const;

  const int32_t world_size_;
  const std::vector<int32_t> peers_;  // those on other nodes
  std::atomic<uint64_t> state_changes_{0};
  mutable std::mutex mutex_;   // guards all below
  std::vector<Peer> by_rank_;  // those that are no peers stay as they are
  Wait waits_[kLaneCount];     // this rank's
  OwnState own_state_;
  bool has_askers_ = false;  // some Peer::is_asker
};

}  // namespace zeropg
