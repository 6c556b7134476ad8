#include "backend/cryptography/scrypt.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <vector>

#include "backend/cryptography/hmac_sha256.h"

namespace zeropg {
namespace {

// Little-endian, as is every machine that this is built for.
using Words = std::span<uint32_t>;
constexpr size_t kSalsaWords = 16;

void exclusive_or(uint32_t* words, const uint32_t* others, size_t count) {
  for (size_t i = 0; i < count; ++i) words[i] ^= others[i];
}

// RFC 7914, 3: the core of Salsa20 with 8 rounds.
void salsa20_8(uint32_t* words) {
  uint32_t x[kSalsaWords];
  std::copy_n(words, kSalsaWords, x);
  const auto quarter = [&x](int a, int b, int c, int d) {
    x[b] ^= std::rotl(x[a] + x[d], 7);
    x[c] ^= std::rotl(x[b] + x[a], 9);
    x[d] ^= std::rotl(x[c] + x[b], 13);
    x[a] ^= std::rotl(x[d] + x[c], 18);
  };
  for (int round = 0; round < 8; round += 2) {
    quarter(0, 4, 8, 12), quarter(5, 9, 13, 1), quarter(10, 14, 2, 6), quarter(15, 3, 7, 11);
    quarter(0, 1, 2, 3), quarter(5, 6, 7, 4), quarter(10, 11, 8, 9), quarter(15, 12, 13, 14);
  }
  for (size_t i = 0; i < kSalsaWords; ++i) words[i] += x[i];
}

// RFC 7914, 4: scryptBlockMix.
void mix_block(Words block, Words mixed) {
  const size_t parts = block.size() / kSalsaWords;
  uint32_t x[kSalsaWords];
  std::copy_n(block.end() - kSalsaWords, kSalsaWords, x);
  for (size_t i = 0; i < parts; ++i) {
    exclusive_or(x, block.data() + i * kSalsaWords, kSalsaWords);
    salsa20_8(x);
    const size_t place = i / 2 + (i % 2) * (parts / 2);
    std::copy_n(x, kSalsaWords, mixed.data() + place * kSalsaWords);
  }
  std::copy(mixed.begin(), mixed.end(), block.begin());
}

// RFC 7914, 5: scryptROMix.
void mix_through_memory(Words block, uint64_t n) {
  std::vector<uint32_t> memory(n * block.size());
  std::vector<uint32_t> mixed(block.size());
  for (uint64_t i = 0; i < n; ++i) {
    std::copy(block.begin(), block.end(), memory.data() + i * block.size());
    mix_block(block, mixed);
  }
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t* last = block.data() + block.size() - kSalsaWords;
    const uint64_t j = (last[0] | static_cast<uint64_t>(last[1]) << 32) & (n - 1);
    exclusive_or(block.data(), memory.data() + j * block.size(), block.size());
    mix_block(block, mixed);
  }
}

}  // namespace

// RFC 7914, 6.
std::string scrypt(std::string_view secret, std::string_view salt, const ScryptCost& cost, size_t bytes) {
  const size_t block_words = size_t{32} * cost.r;
  std::vector<uint32_t> blocks(cost.p * block_words);
  const size_t blocks_bytes = blocks.size() * sizeof(uint32_t);
  std::memcpy(blocks.data(), pbkdf2_hmac_sha256(secret, salt, 1, blocks_bytes).data(), blocks_bytes);
  for (uint32_t i = 0; i < cost.p; ++i) mix_through_memory(Words(blocks).subspan(i * block_words, block_words), cost.n);
  return pbkdf2_hmac_sha256(secret, {reinterpret_cast<const char*>(blocks.data()), blocks_bytes}, 1, bytes);
}

// RFC 8018, 5.2.
std::string pbkdf2_hmac_sha256(std::string_view secret, std::string_view salt, uint32_t iterations, size_t bytes) {
  HmacSha256 mac(secret);
  std::string key;
  for (uint32_t index = 1; key.size() < bytes; ++index) {
    const std::array<std::byte, 4> number{static_cast<std::byte>(index >> 24), static_cast<std::byte>(index >> 16),
                                          static_cast<std::byte>(index >> 8), static_cast<std::byte>(index)};
    mac.update(std::as_bytes(std::span(salt)));
    mac.update(number);
    Digest step = mac.finish();
    Digest sum = step;
    for (uint32_t i = 1; i < iterations; ++i) {
      mac.update(std::as_bytes(std::span(step)));
      step = mac.finish();
      for (size_t at = 0; at < sum.size(); ++at) sum[at] ^= step[at];
    }
    key.append(sum.begin(), sum.end());
  }
  key.resize(bytes);
  return key;
}

}  // namespace zeropg
