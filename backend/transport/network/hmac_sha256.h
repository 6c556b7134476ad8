// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): for proofs of a shared secret, not for bulk data.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace zeropg {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

}  // namespace zeropg
