// Keys from secrets that people choose: scrypt (RFC 7914) and PBKDF2 (RFC 8018), over HMAC-SHA256.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zeropg {

struct ScryptCost {
  uint64_t n = 0;  // a power of two; a call takes 128·n·r bytes of memory
  uint32_t r = 0;
  uint32_t p = 0;
};

// Both return `bytes` bytes.
std::string scrypt(std::string_view secret, std::string_view salt, const ScryptCost& cost, size_t bytes);
std::string pbkdf2_hmac_sha256(std::string_view secret, std::string_view salt, uint32_t iterations, size_t bytes);

}  // namespace zeropg
