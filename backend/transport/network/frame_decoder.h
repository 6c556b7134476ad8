// Cuts the bytes that come over a connection into frames. It knows no socket, so tests can feed it whatever they like.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "backend/transport/network/frame.h"
#include "backend/transport/network/frame_tags.h"
#include "backend/transport/network/wire.h"

namespace zeropg {

// Of one connection. The calls hand `peer` and what they make of the bytes to the sink, whose check_frame() sees every
// header before memory for its payload is found; what it throws leaves the decoder unusable. So does a tag that does
// not match, which is a DistNetworkError. Memory is found when there are bytes for it, and only where the sink has no
// place for them.
class FrameDecoder {
 public:
  FrameDecoder() = default;
  // The frames carry these tags: Note [Authentic frames].
  explicit FrameDecoder(FrameTags tags) : tags_(std::move(tags)) {}

  // Where the next bytes belong while a payload is incomplete, so that they need not be copied; otherwise empty.
  std::span<std::byte> payload_room(int32_t peer, FrameSink& sink);
  // `bytes` of the last payload_room() have been filled.
  void take_payload(int32_t peer, size_t bytes, FrameSink& sink);
  // Bytes that lie elsewhere; payload_room() counts as untouched.
  void take(int32_t peer, std::span<const std::byte> bytes, FrameSink& sink);

 private:
  // A header, and its tag where there are tags.
  std::span<std::byte> head() { return std::span(head_).first(sizeof(FrameHeader) + (tags_ ? sizeof(Tag) : 0)); }
  bool has_header() { return head_filled_ == head().size(); }
  void take_header(int32_t peer, FrameSink& sink);
  void move_to(std::span<std::byte> place, int32_t peer, FrameSink& sink);
  void check_tag(std::span<const std::byte> tag);
  void hand_over(int32_t peer, FrameSink& sink);

  std::optional<FrameTags> tags_;
  std::array<std::byte, sizeof(FrameHeader) + sizeof(Tag)> head_{};
  size_t head_filled_ = 0;
  FrameHeader header_;
  size_t unplaced_bytes_ = 0;  // of the payload: all but what lies in the sink's places
  bool is_placing_ = false;    // the last room was a place of the sink's
  Payload payload_;            // without data, or with room for the unplaced bytes
  size_t payload_filled_ = 0;
  std::array<std::byte, sizeof(Tag)> payload_tag_{};
  size_t payload_tag_filled_ = 0;
};

}  // namespace zeropg
