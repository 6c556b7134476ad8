// Bytes between two ranks of a group. A transport knows no tensor, no dtype and no collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace zeropg {

// Independent byte streams per ordered pair of ranks, so that a user's send never waits behind a collective.
enum class Lane : uint8_t {
  kCollective = 0,
  kPointToPoint = 1,
  kOneSided = 2,  // between nodes only: inside one, who puts writes to the memory itself
};
constexpr size_t kLaneCount = 2;    // inside a node
constexpr size_t kStreamCount = 3;  // between nodes

// Both calls return at once with the number of bytes moved now, 0 when the peer is not ready. Bytes of one (pair, lane)
// arrive in the order in which they were sent. One thread at a time per (pair, lane, direction).
// Throws c10::DistNetworkError when the peer is gone.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual bool can_reach(int32_t peer) const = 0;
  virtual size_t try_send(int32_t peer, Lane lane, std::span<const std::byte> data) = 0;
  virtual size_t try_receive(int32_t peer, Lane lane, std::span<std::byte> data) = 0;
};

}  // namespace zeropg
