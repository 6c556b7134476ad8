// What stands in front of each message over UCX, and how it is sealed: Note [UCX and strangers] in ucx_wire.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "backend/cryptography/hmac_sha256.h"
#include "backend/transport/network/frame.h"

namespace zeropg {

using Seal = std::array<uint8_t, 16>;

struct Envelope {
  Seal seal{};
  int32_t from = -1;
  int32_t to = -1;
  uint64_t number = 0;  // counts the messages of the pair
  FrameHeader frame;
  Seal payload_digest{};  // zeros where payloads are not authenticated

  std::span<const std::byte> sealed() const { return std::as_bytes(std::span(this, 1)).subspan(sizeof(Seal)); }
};
static_assert(sizeof(Envelope) == 64);

inline Seal beginning_of(const Digest& digest) {
  Seal seal;
  std::copy_n(digest.begin(), seal.size(), seal.begin());
  return seal;
}

inline Seal seal_with(std::string_view key, std::span<const std::byte> message) {
  return beginning_of(hmac_sha256(key, {reinterpret_cast<const char*>(message.data()), message.size()}));
}

// The envelope's seal covers it, so it needs no key.
inline Seal digest_of(std::span<const std::byte> payload) {
  return beginning_of(sha256({reinterpret_cast<const char*>(payload.data()), payload.size()}));
}

inline bool is_same(const Seal& a, const Seal& b) {
  return is_same_mac(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

}  // namespace zeropg
