#include "sharding/comm/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace zeropg {
namespace {

constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ULL;  // 2^64 / golden ratio, odd

uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ (state >> 29);
}

}  // namespace

uint64_t digest(std::span<const std::byte> bytes, uint64_t seed) {
  // Four chains, since a multiplication takes several cycles.
  std::array<uint64_t, 4> lanes = {seed, seed + 1, seed + 2, seed + 3};
  size_t at = 0;
  for (; at + sizeof(lanes) <= bytes.size(); at += sizeof(lanes)) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), bytes.data() + at, sizeof(words));
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] = mix(lanes[lane], words[lane]);
    }
  }
  uint64_t result = mix(seed, bytes.size());
  for (const uint64_t lane : lanes) {
    result = mix(std::rotl(result, 23), lane);
  }
  for (; at < bytes.size(); ++at) {
    result = mix(result, static_cast<uint64_t>(bytes[at]) + 1);
  }
  return result;
}

uint64_t digest_of(const at::Tensor& values, uint64_t seed) {
  const at::Tensor here = values.cpu().contiguous();
  return digest({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()}, seed);
}

}  // namespace zeropg
