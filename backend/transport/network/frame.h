// What travels between two processes of different nodes: a header of fixed size and up to kMaxPayloadBytes behind it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace zeropg {

enum class FrameKind : uint8_t {
  kData = 1,  // bytes of a stream; index: lane
  kCredit,    // value: how many bytes of the stream the receiver has taken so far; index: lane
  kState,     // value: RankState; payload: its text
  kPing,      // asks for a kPong
  kPong,      // a sign of life; payload: the call that its sender waits in (index: 1, or 0 for none) and the ranks
              // that it waits for (value: how many of them in lane 0)
};

constexpr size_t kMaxNamedWaits = 64;  // ranks of a lane in a kPong
// Of the call in a kPong, which only its users can read.
constexpr size_t kWaitingCallBytes = 88;
using WaitingCall = std::array<std::byte, kWaitingCallBytes>;

constexpr size_t kMaxPayloadBytes = size_t{256} << 10;

// Little-endian, as is every machine that this is built for.
struct FrameHeader {
  FrameKind kind = FrameKind::kPing;
  uint8_t index = 0;
  uint16_t unused = 0;
  uint32_t payload_bytes = 0;
  uint64_t value = 0;
};
static_assert(sizeof(FrameHeader) == 16);

// The payload of a frame that has come, with its owner.
struct Payload {
  std::unique_ptr<std::byte[]> data;
  size_t bytes = 0;

  std::span<const std::byte> span() const { return {data.get(), bytes}; }
};

}  // namespace zeropg
