// CRC-32C (Castagnoli, RFC 3720): finds every error of one or two bits in up to 256 MiB and every burst up to 32 bits;
// it is no signature.
//
// A CRC is a remainder modulo a polynomial, so that those of parts can be joined: by multiplication with x^(8 n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

// The checksum of what `crc` covers followed by `bytes`; 0 is the checksum of nothing.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// The checksum of A followed by B, from those of A and of B and B's length.
uint32_t join_crc32c(uint32_t first, uint32_t second, uint64_t second_bytes);

// What this processor can run, the fastest last. All give the same result.
struct Crc32cKernel {
  const char* name;
  uint32_t (*extend)(std::span<const std::byte> bytes, uint32_t crc);
};
std::span<const Crc32cKernel> usable_crc32c();

}  // namespace zeropg
