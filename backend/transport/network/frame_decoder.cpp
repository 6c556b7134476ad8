#include "backend/transport/network/frame_decoder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeropg {
namespace {

// Moves what fits from the front of `bytes` to what is free of `space`. True when that is full.
bool fill(std::span<std::byte> space, size_t* filled, std::span<const std::byte>* bytes) {
  const size_t part = std::min(bytes->size(), space.size() - *filled);
  std::copy_n(bytes->begin(), part, space.begin() + static_cast<ptrdiff_t>(*filled));
  *filled += part;
  *bytes = bytes->subspan(part);
  return *filled == space.size();
}

}  // namespace

std::span<std::byte> FrameDecoder::payload_room(int32_t peer, FrameSink& sink) {
  if (!has_header()) return {};
  // Bytes with a tag are nobody's before the tag has matched.
  const std::span<std::byte> place = tags_ ? std::span<std::byte>() : sink.place_for(peer, header_);
  is_placing_ = place.size() > payload_filled_;
  if (is_placing_) {
    const size_t earlier = payload_filled_;
    move_to(place, peer, sink);
    return place.subspan(earlier, std::min(place.size() - earlier, unplaced_bytes_));
  }
  if (!payload_.data) payload_ = {std::make_unique_for_overwrite<std::byte[]>(unplaced_bytes_), unplaced_bytes_};
  return {payload_.data.get() + payload_filled_, unplaced_bytes_ - payload_filled_};
}

// The frame's first bytes may have come before there was a place.
void FrameDecoder::move_to(std::span<std::byte> place, int32_t peer, FrameSink& sink) {
  if (payload_filled_ > 0) {
    std::memcpy(place.data(), payload_.data.get(), payload_filled_);
    sink.note_placed(peer, header_, payload_filled_);
    unplaced_bytes_ -= std::exchange(payload_filled_, 0);
  }
  payload_ = {};
}

void FrameDecoder::take_payload(int32_t peer, size_t bytes, FrameSink& sink) {
  if (is_placing_) {
    sink.note_placed(peer, header_, bytes);
    unplaced_bytes_ -= bytes;
  } else {
    // While the processor's caches have them.
    if (tags_) tags_->update({payload_.data.get() + payload_filled_, bytes});
    payload_filled_ += bytes;
  }
  if (payload_filled_ == unplaced_bytes_ && !tags_) hand_over(peer, sink);
}

void FrameDecoder::take(int32_t peer, std::span<const std::byte> bytes, FrameSink& sink) {
  while (!bytes.empty()) {
    if (!has_header()) {
      if (fill(head(), &head_filled_, &bytes)) take_header(peer, sink);
    } else if (const std::span<std::byte> room = payload_room(peer, sink); !room.empty()) {
      const size_t part = std::min(bytes.size(), room.size());
      std::memcpy(room.data(), bytes.data(), part);
      bytes = bytes.subspan(part);
      take_payload(peer, part, sink);
    } else if (fill(payload_tag_, &payload_tag_filled_, &bytes)) {
      check_tag(payload_tag_);
      hand_over(peer, sink);
    }
  }
}

void FrameDecoder::take_header(int32_t peer, FrameSink& sink) {
  const std::span<const std::byte> bytes = head().first(sizeof(FrameHeader));
  if (tags_) {
    tags_->update(bytes);
    check_tag(head().subspan(sizeof(FrameHeader)));
  }
  std::memcpy(&header_, bytes.data(), sizeof(FrameHeader));
  sink.check_frame(peer, header_);
  unplaced_bytes_ = header_.payload_bytes;
  payload_filled_ = 0;
  payload_tag_filled_ = 0;
  if (header_.payload_bytes == 0) hand_over(peer, sink);
}

void FrameDecoder::check_tag(std::span<const std::byte> tag) {
  const Tag expected = tags_->next();
  if (is_same_mac(std::as_bytes(std::span(expected)), tag)) return;
  C10_THROW_ERROR(DistNetworkError,
                  "a frame's tag did not match: its bytes were changed, repeated or made by somebody else on the way "
                  "between the nodes; look at what stands between them");
}

void FrameDecoder::hand_over(int32_t peer, FrameSink& sink) {
  head_filled_ = 0;
  sink.take_frame(peer, header_, std::exchange(payload_, {}));
}

}  // namespace zeropg
