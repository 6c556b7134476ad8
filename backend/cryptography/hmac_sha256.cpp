#include "backend/cryptography/hmac_sha256.h"

#include <algorithm>

namespace zeropg {

HmacSha256::HmacSha256(std::string_view key) {
  std::array<std::byte, kSha256BlockBytes> block{};
  const Digest shortened = sha256(key);
  const std::span<const std::byte> used =
      key.size() > block.size() ? std::as_bytes(std::span(shortened)) : std::as_bytes(std::span(key));
  std::copy(used.begin(), used.end(), block.begin());
  for (std::byte& b : block) b ^= std::byte{0x36};
  inner_start_.update(block);
  for (std::byte& b : block) b ^= std::byte{0x36 ^ 0x5c};
  outer_start_.update(block);
  inner_ = inner_start_;
}

Digest HmacSha256::finish() {
  const Digest inner = inner_.finish();
  inner_ = inner_start_;
  Sha256 outer = outer_start_;
  outer.update(std::as_bytes(std::span(inner)));
  return outer.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view message) {
  HmacSha256 mac(key);
  mac.update(std::as_bytes(std::span(message)));
  return mac.finish();
}

bool is_same_mac(std::span<const std::byte> a, std::span<const std::byte> b) {
  volatile uint8_t difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference = difference | static_cast<uint8_t>(a[i] ^ b[i]);
  }
  return difference == 0;
}

}  // namespace zeropg
