#include "backend/transport/network/frame_decoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeropg {

std::span<std::byte> FrameDecoder::payload_room() {
  if (!has_header()) return {};
  return {payload_.data.get() + payload_filled_, payload_.bytes - payload_filled_};
}

void FrameDecoder::take_payload(int32_t peer, size_t bytes, FrameSink& sink) {
  payload_filled_ += bytes;
  if (!has_header() || payload_filled_ < payload_.bytes) return;
  header_filled_ = 0;
  sink.take_frame(peer, header_, std::move(payload_));
}

void FrameDecoder::take(int32_t peer, std::span<const std::byte> bytes, FrameSink& sink) {
  while (!bytes.empty()) {
    if (!has_header()) {
      const size_t part = std::min(bytes.size(), sizeof(FrameHeader) - header_filled_);
      std::memcpy(header_bytes_.data() + header_filled_, bytes.data(), part);
      header_filled_ += part;
      bytes = bytes.subspan(part);
      if (!has_header()) return;
      std::memcpy(&header_, header_bytes_.data(), sizeof(FrameHeader));
      sink.check_frame(peer, header_);
      payload_ = {std::make_unique_for_overwrite<std::byte[]>(header_.payload_bytes), header_.payload_bytes};
      payload_filled_ = 0;
    }
    const std::span<std::byte> room = payload_room();
    const size_t part = std::min(bytes.size(), room.size());
    if (part > 0) std::memcpy(room.data(), bytes.data(), part);
    bytes = bytes.subspan(part);
    take_payload(peer, part, sink);
  }
}

}  // namespace zeropg
