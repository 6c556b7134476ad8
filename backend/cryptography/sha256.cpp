#include "backend/cryptography/sha256.h"

#include <algorithm>
#include <cstring>

namespace zeropg {
namespace {

Sha256Blocks fastest_blocks() {
  const Sha256Blocks by_instructions = sha_extension_blocks();
  return by_instructions != nullptr ? by_instructions : absorb_portable;
}

void absorb(Sha256State& state, const std::byte* blocks, size_t count) {
  static const Sha256Blocks fastest = fastest_blocks();
  fastest(state, blocks, count);
}

}  // namespace

void Sha256::update(std::span<const std::byte> part) {
  bytes_ += part.size();
  if (block_filled_ > 0) {
    const size_t taken = std::min(part.size(), block_.size() - block_filled_);
    std::copy_n(part.begin(), taken, block_.begin() + static_cast<ptrdiff_t>(block_filled_));
    block_filled_ += taken;
    part = part.subspan(taken);
    if (block_filled_ < block_.size()) return;
    absorb(state_, block_.data(), 1);
  }
  const size_t whole = part.size() / block_.size();
  if (whole > 0) absorb(state_, part.data(), whole);
  part = part.subspan(whole * block_.size());
  std::copy(part.begin(), part.end(), block_.begin());
  block_filled_ = part.size();
}

// Padding: a one bit, zeros, the length in bits.
Digest Sha256::finish() {
  std::array<std::byte, 2 * kSha256BlockBytes> tail{};
  std::copy_n(block_.begin(), block_filled_, tail.begin());
  tail[block_filled_] = std::byte{0x80};
  const size_t blocks = block_filled_ + 1 + sizeof bytes_ <= kSha256BlockBytes ? 1 : 2;
  for (size_t i = 0; i < sizeof bytes_; ++i) {
    tail[blocks * kSha256BlockBytes - 1 - i] = static_cast<std::byte>(bytes_ * 8 >> 8 * i);
  }
  absorb(state_, tail.data(), blocks);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest sha256(std::string_view message) {
  Sha256 hash;
  hash.update(std::as_bytes(std::span(message)));
  return hash.finish();
}

}  // namespace zeropg
