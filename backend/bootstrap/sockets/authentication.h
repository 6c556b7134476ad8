// How two processes prove to each other that they know the group's secret, without saying it. `key` is derived from
// that secret (Note [Guessing secrets]).
//
//   leader  -> member   leader_nonce
//   member  -> leader   member_nonce, prove(kMember)
//   leader  -> member   prove(kLeader)
//
// A proof covers both nonces, the role and the connection's context, so it fails when it is replayed on another
// connection, reflected to its maker, or carried to another group that uses the same secret.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/cryptography/hmac_sha256.h"

namespace zeropg {

using Nonce = std::array<char, 32>;

enum class Role : char { kLeader = 'L', kMember = 'M' };

struct ProofContext {
  std::string name;  // of the meeting place, unique to the group
  Nonce leader_nonce{};
  Nonce member_nonce{};
};

Nonce random_nonce();  // from the kernel's generator
std::string random_hex(size_t random_bytes);
std::string to_hex(std::span<const uint8_t> bytes);

Digest prove(std::string_view key, Role prover, const ProofContext& context);
// The key for what follows on this connection.
Digest session_key(std::string_view key, const ProofContext& context);

}  // namespace zeropg
