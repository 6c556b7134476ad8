// Proof that the bytes of a connection are the peer's, unaltered, once and in order.
//
// Note [Authentic frames]
// With BackendOptions(authenticate_frames=True) a tag of 16 bytes stands behind every header, and another one behind
// every payload. A header is believed only when its tag matches, so nobody on the way can make a rank wait for a
// payload that does not come, or find memory for it. A tag is the beginning of an HMAC-SHA256 over the number of the
// tag and the bytes before it, under a key of this connection and this direction. So bytes that were changed, left out,
// repeated, reordered, reflected, or recorded on another connection do not match, and the peer is lost. What travels
// can still be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/cryptography/hmac_sha256.h"

namespace zeropg {

using Tag = std::array<uint8_t, 16>;

// Of a connection between two ranks; the one's `sent` is the other's `received`.
struct FrameKeys {
  std::string sent;
  std::string received;
};
// `key`: known to the two ranks only, another one for every connection.
FrameKeys frame_keys(std::string_view key, int32_t rank, int32_t peer);

// Makes the tags of one direction of a connection; its two ends make the same.
class FrameTags {
 public:
  explicit FrameTags(std::string_view key);
  void update(std::span<const std::byte> part) { mac_.update(part); }
  // Of the parts since the last call.
  Tag next();

 private:
  void begin();

  HmacSha256 mac_;
  uint64_t number_ = 0;
};

}  // namespace zeropg
