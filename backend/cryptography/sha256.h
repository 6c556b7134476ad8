// SHA-256 (FIPS 180-4), by the processor's own instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "backend/cryptography/sha256_blocks.h"

namespace zeropg {

using Digest = std::array<uint8_t, 32>;

// The digest of a message that comes in parts.
class Sha256 {
 public:
  void update(std::span<const std::byte> part);
  // Of all parts so far. The object must not be used afterwards.
  Digest finish();

 private:
  Sha256State state_ = kSha256Start;
  std::array<std::byte, kSha256BlockBytes> block_{};  // the last bytes, which are no whole block yet
  size_t block_filled_ = 0;
  uint64_t bytes_ = 0;
};

Digest sha256(std::string_view message);

}  // namespace zeropg
