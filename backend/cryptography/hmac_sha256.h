// HMAC-SHA256 (RFC 2104): proofs of a shared key.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "backend/cryptography/sha256.h"

namespace zeropg {

// Of messages that come in parts, one after the other, under one key.
class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  void update(std::span<const std::byte> part) { inner_.update(part); }
  // Of all parts since the last call.
  Digest finish();

 private:
  Sha256 inner_start_;  // with the key in it
  Sha256 outer_start_;
  Sha256 inner_;
};

Digest hmac_sha256(std::string_view key, std::string_view message);

// Whether two of the same size are equal. Takes the same time wherever the first difference is.
bool is_same_mac(std::span<const std::byte> a, std::span<const std::byte> b);
inline bool is_same_mac(const Digest& a, const Digest& b) {
  return is_same_mac(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

}  // namespace zeropg
