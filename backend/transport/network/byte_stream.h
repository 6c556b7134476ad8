// The two ends of a byte stream from one rank to another: what was sent, what was taken, and what lies between.
//
// Note [Stream windows]
// A rank may send `window_bytes` of a stream before its peer takes any. The receiver tells now and then how much it has
// taken so far. Since it does so only after half a window, a sender's limit is a window and a half and some room for
// the headers that operations put in front of their bytes; what comes beyond that is not stored but loses the peer.
// All windows of a group share a budget of memory: of many ranks each has a smaller one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>

#include "backend/transport/network/frame.h"
#include "backend/transport/transport.h"

namespace zeropg {

// Most bytes that a sender may be ahead of its receiver.
constexpr uint64_t stream_limit_bytes(int64_t window_bytes) {
  constexpr uint64_t kHeaderRoom = 64 << 10;
  return static_cast<uint64_t>(window_bytes) * 3 / 2 + kHeaderRoom;
}

// The window of each stream in a group of so many ranks; at most `window_bytes`. The same on every rank.
constexpr int64_t shared_window_bytes(int64_t window_bytes, int32_t world_size) {
  constexpr int64_t kBudgetBytes = int64_t{512} << 20;  // of all that may wait in one process for one group
  constexpr int64_t kLeastBytes = 64 << 10;
  constexpr int64_t kUnit = 4096;  // pieces of messages begin aligned
  // Two lanes, of a window and a half each. (What is put into windows is taken at once.)
  const int64_t share = kBudgetBytes / (3 * static_cast<int64_t>(world_size)) / kUnit * kUnit;
  return std::min(window_bytes, std::max(share, kLeastBytes));
}

class OutgoingStream {
 public:
  uint64_t in_flight_bytes() const { return sent_ - taken_; }
  void note_sent(size_t bytes) { sent_ += bytes; }
  // `taken`: how much the peer says that it has taken so far. False: that cannot be.
  bool take_credit(uint64_t taken);

 private:
  uint64_t sent_ = 0;
  uint64_t taken_ = 0;  // by the peer, as it told
};

class IncomingStream {
 public:
  uint64_t queued_bytes() const { return received_ - taken_; }
  void put(Payload payload);
  // The next bytes were received where they were wanted: nothing may be queued.
  void note_placed(size_t bytes);
  // Moves the oldest bytes to `data`; returns how many there were.
  size_t take(std::span<std::byte> data);
  // Copies the oldest bytes, which stay; queued_bytes() must be as many.
  void peek(std::span<std::byte> data) const;
  // How much has been taken so far, when the sender should be told again: then it counts as told.
  std::optional<uint64_t> credit_to_tell(int64_t window_bytes);

 private:
  std::list<Payload> queue_;  // an empty one owns no memory, and most streams of a large group stay empty
  size_t offset_ = 0;         // in queue_.front()
  uint64_t received_ = 0;
  uint64_t taken_ = 0;
  uint64_t told_ = 0;
};

// Those with one peer.
struct PeerStreams {
  bool is_member = false;  // of the peers that are reached over streams
  OutgoingStream outgoing[kStreamCount];
  IncomingStream incoming[kStreamCount];
};

}  // namespace zeropg
