#include "backend/bootstrap/sockets/authentication.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace zeropg {
namespace {

void fill_random(void* memory, size_t bytes) {
  auto* data = static_cast<char*>(memory);
  while (bytes > 0) {
    const ssize_t filled = ::getrandom(data, bytes, 0);
    if (filled < 0 && errno == EINTR) continue;
    if (filled < 0) C10_THROW_ERROR(DistBackendError, c10::str("getrandom: ", std::strerror(errno)));
    data += filled;
    bytes -= static_cast<size_t>(filled);
  }
}

// Fixed-size fields first, so that no two contexts give the same bytes.
std::string transcript(std::string_view label, const ProofContext& context) {
  std::string bytes(label);
  bytes.append(context.leader_nonce.data(), context.leader_nonce.size());
  bytes.append(context.member_nonce.data(), context.member_nonce.size());
  return bytes.append(context.name);
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  fill_random(nonce.data(), nonce.size());
  return nonce;
}

std::string random_hex(size_t random_bytes) {
  std::vector<uint8_t> bytes(random_bytes);
  fill_random(bytes.data(), bytes.size());
  return to_hex(bytes);
}

std::string to_hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[byte >> shift & 15];
  }
  return text;
}

Digest prove(std::string_view key, Role prover, const ProofContext& context) {
  return hmac_sha256(key, transcript(prover == Role::kLeader ? "zeropg proof L1" : "zeropg proof M1", context));
}

Digest session_key(std::string_view key, const ProofContext& context) {
  return hmac_sha256(key, transcript("zeropg session1", context));
}

}  // namespace zeropg
