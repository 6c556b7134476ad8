// A connection inside the node whose two ends have proven the group's secret; every message proves it again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "backend/bootstrap/sockets/authentication.h"
#include "backend/bootstrap/sockets/unix_socket.h"

namespace zeropg {

enum class MessageKind : char {
  kHello = 'h',        // member: its rank, with its doorbell
  kDescriptors = 'd',  // leader: descriptors
  kReady = 'r',        // member: has mapped the arena
  kLinks = 'l',        // leader: what the links between nodes carry, a part of it
  kGo = 'g',           // leader: everybody has
  kError = 'e',        // leader: what went wrong, in words
};

// A message is HMAC(key, sender, sequence, kind, body) and then kind and body; the sequence is not sent but counted, so
// a message that is replayed, reordered, reflected or left out fails. One thread at a time.
class AuthenticatedSocket {
 public:
  static constexpr size_t kMaxBodyBytes = 2048;
  static constexpr size_t kMaxMessageBytes = sizeof(Digest) + 1 + kMaxBodyBytes;

  AuthenticatedSocket() = default;
  AuthenticatedSocket(Descriptor socket, Role own, const Digest& key);

  const Descriptor& socket() const { return socket_; }

  void send(MessageKind kind, std::string_view body, std::span<const int> descriptors, Clock::time_point deadline);
  // Returns body and descriptors of the next message. DistNetworkError when it is not authentic or not of `kind`;
  // DistBackendError with the peer's own words when it is a kError.
  Packet receive(MessageKind kind, size_t max_descriptors, Clock::time_point deadline,
                 const std::function<void()>& tick);
  // The same for a packet that was received from socket() by other means.
  Packet verify(Packet packet, MessageKind kind);

 private:
  Digest mac(Role sender, uint64_t sequence, std::string_view kind_and_body) const;

  Descriptor socket_;
  Role own_ = Role::kMember;
  Digest key_{};
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace zeropg
