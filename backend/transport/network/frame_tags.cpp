#include "backend/transport/network/frame_tags.h"

#include <algorithm>
#include <array>

namespace zeropg {
namespace {

std::string direction_key(std::string_view key, int32_t from, int32_t to) {
  const Digest digest = hmac_sha256(key, "zeropg frames1 " + std::to_string(from) + ">" + std::to_string(to));
  return {digest.begin(), digest.end()};
}

}  // namespace

FrameKeys frame_keys(std::string_view key, int32_t rank, int32_t peer) {
  return {.sent = direction_key(key, rank, peer), .received = direction_key(key, peer, rank)};
}

FrameTags::FrameTags(std::string_view key) : mac_(key) { begin(); }

void FrameTags::begin() {
  mac_.update(std::as_bytes(std::span(&number_, 1)));  // little-endian, as the frames
  ++number_;
}

Tag FrameTags::next() {
  const Digest digest = mac_.finish();
  begin();
  Tag tag;
  std::copy_n(digest.begin(), tag.size(), tag.begin());
  return tag;
}

}  // namespace zeropg
