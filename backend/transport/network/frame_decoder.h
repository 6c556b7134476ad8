// Cuts the bytes that come over a connection into frames. It knows no socket, so tests can feed it whatever they like.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/transport/network/frame.h"
#include "backend/transport/network/wire.h"

namespace zeropg {

// Of one connection. The calls hand `peer` and what they make of the bytes to the sink, whose check_frame() sees every
// header before memory for its payload is found; what it throws leaves the decoder unusable.
class FrameDecoder {
 public:
  // Where the next bytes belong while a payload is incomplete, so that they need not be copied; otherwise empty.
  std::span<std::byte> payload_room();
  // `bytes` of payload_room() have been filled.
  void take_payload(int32_t peer, size_t bytes, FrameSink& sink);
  // Bytes that lie elsewhere; payload_room() counts as untouched.
  void take(int32_t peer, std::span<const std::byte> bytes, FrameSink& sink);

 private:
  bool has_header() const { return header_filled_ == sizeof(FrameHeader); }

  std::array<std::byte, sizeof(FrameHeader)> header_bytes_;
  size_t header_filled_ = 0;
  FrameHeader header_;
  Payload payload_;
  size_t payload_filled_ = 0;
};

}  // namespace zeropg
