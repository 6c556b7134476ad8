#include "sharding/optim/state_format.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "sharding/optim/elementwise.h"
#include "sharding/optim/stochastic_rounding.h"

namespace zeropg {
namespace {

constexpr int64_t kBlockBytes = kStateBlock + 1;  // codes, and the exponent
constexpr int kMantissaBits = 3;
constexpr int kCut = 23 - kMantissaBits;  // bits of a float32 that a code cuts off

// Random bits for each element of a range: the upper half of a word, or with a shift of 16 the lower one.
struct Stochastic {
  const uint32_t* random;
  int shift;

  [[gnu::always_inline]] inline uint32_t bits(int64_t i) const { return random[i] << shift; }
  Stochastic from(int64_t start) const { return {random + start, shift}; }
};

struct Nearest {
  [[gnu::always_inline]] inline uint32_t bits(int64_t) const { return 0x80000000u; }
  Nearest from(int64_t) const { return {}; }
};

struct HashLoop {
  [[gnu::always_inline]] static inline void run(RoundingKey key, const float* __restrict__ values,
                                                const float* __restrict__ parameters, uint32_t* __restrict__ random,
                                                int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      random[i] = random_bits(key, values[i], parameters[i]);
    }
  }
};

struct WidenBFloat16Loop {
  [[gnu::always_inline]] static inline void run(const uint16_t* __restrict__ from, float* __restrict__ to,
                                                int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
    }
  }
};

template <class Rounding>
struct RoundBFloat16Loop {
  [[gnu::always_inline]] static inline void run(const Rounding rounding, const float* __restrict__ values,
                                                uint16_t* __restrict__ to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      to[i] = rounded_to_bfloat16(values[i], rounding.bits(i));
    }
  }
};

// What code 0 would be in units of the last bit of mantissa, counted from +0 through all floats, in a block whose
// largest element has this exponent: its last unit is the largest code.
template <bool kIsSigned>
[[gnu::always_inline]] inline int32_t base_of(uint8_t exponent) {
  return (static_cast<int32_t>(exponent) << kMantissaBits) + ((1 << kMantissaBits) - 1) - (kIsSigned ? 127 : 255);
}

template <bool kIsSigned>
struct WidenBlocksLoop {
  [[gnu::always_inline]] static inline void run(const uint8_t* __restrict__ entries, float* __restrict__ values,
                                                int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block, entries += kBlockBytes, values += kStateBlock) {
      const int32_t base = base_of<kIsSigned>(entries[kStateBlock]);
      for (int i = 0; i < kStateBlock; ++i) {
        const uint32_t code = entries[i];
        const uint32_t level = kIsSigned ? code & 0x7fu : code;
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(level) + base) << kCut;
        const uint32_t sign = kIsSigned ? (code & 0x80u) << 24 : 0;
        values[i] = float_of((level == 0 ? 0 : bits) | sign);
      }
    }
  }
};

template <bool kIsSigned, class Rounding>
struct RoundBlocksLoop {
  [[gnu::always_inline]] static inline void run(const Rounding rounding, const float* __restrict__ values,
                                                uint8_t* __restrict__ entries, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) {
      alignas(64) uint32_t units[kStateBlock];  // of the last bit of mantissa
      uint32_t largest = 0;
      for (int i = 0; i < kStateBlock; ++i) {
        units[i] = dithered(bits_of(values[i]) & 0x7fffffffu, rounding.bits(block * kStateBlock + i), kCut) >> kCut;
        largest = units[i] > largest ? units[i] : largest;
      }
      const uint8_t exponent = static_cast<uint8_t>(largest >> kMantissaBits);
      const int32_t base = base_of<kIsSigned>(exponent);
      const uint32_t least = base < 0 ? 0 : static_cast<uint32_t>(base + 1) << kCut;  // bits of the smallest code
      for (int i = 0; i < kStateBlock; ++i) {
        const uint32_t bits = bits_of(values[i]);
        const uint32_t magnitude = bits & 0x7fffffffu;
        int32_t level = static_cast<int32_t>(units[i]) - base;
        if constexpr (kIsSigned) {
          const float chance =
              static_cast<float>(static_cast<int32_t>(rounding.bits(block * kStateBlock + i) >> 8)) * 0x1p-24f;
          const int32_t below = chance * float_of(least) < float_of(magnitude) ? 1 : 0;
          level = magnitude < least ? below : level;
        } else {
          level = level < 1 ? 1 : level;
        }
        level = units[i] == 0 ? 0 : level;
        entries[i] = static_cast<uint8_t>(level | (kIsSigned ? static_cast<int32_t>((bits >> 31) << 7) : 0));
      }
      entries[kStateBlock] = exponent;
      values += kStateBlock;
      entries += kBlockBytes;
    }
  }
};

// Calls whole(0, blocks) for whole blocks and then part(first element of the rest, elements) if there is a rest.
template <class Whole, class Part>
void by_blocks(int64_t numel, const Whole& whole, const Part& part) {
  const int64_t blocks = numel / kStateBlock;
  if (blocks > 0) whole(blocks);
  if (const int64_t rest = numel % kStateBlock; rest > 0) part(blocks, rest);
}

template <bool kIsSigned>
void widen_blocks(Isa isa, const uint8_t* entries, float* values, int64_t numel) {
  by_blocks(
      numel, [&](int64_t blocks) { run_on<WidenBlocksLoop<kIsSigned>>(isa, entries, values, blocks); },
      [&](int64_t block, int64_t rest) {
        float last[kStateBlock];
        run_on<WidenBlocksLoop<kIsSigned>>(isa, entries + block * kBlockBytes, &last[0], int64_t{1});
        std::copy_n(last, rest, values + block * kStateBlock);
      });
}

template <bool kIsSigned, class Rounding>
void round_blocks(Isa isa, Rounding rounding, const float* values, uint8_t* entries, int64_t numel) {
  using Loop = RoundBlocksLoop<kIsSigned, Rounding>;
  by_blocks(
      numel, [&](int64_t blocks) { run_on<Loop>(isa, rounding, values, entries, blocks); },
      [&](int64_t block, int64_t rest) {
        float last[kStateBlock] = {};
        std::copy_n(values + block * kStateBlock, rest, last);
        const float* const padded = last;
        run_on<Loop>(isa, rounding.from(block * kStateBlock), padded, entries + block * kBlockBytes, int64_t{1});
      });
}

template <class Rounding>
void round_any(Isa isa, Rounding rounding, StateFormat format, const float* values, void* entries, int64_t numel) {
  switch (format) {
    case StateFormat::kBFloat16:
      return run_on<RoundBFloat16Loop<Rounding>>(isa, rounding, values, static_cast<uint16_t*>(entries), numel);
    case StateFormat::kSigned8:
      return round_blocks<true>(isa, rounding, values, static_cast<uint8_t*>(entries), numel);
    case StateFormat::kUnsigned8:
      return round_blocks<false>(isa, rounding, values, static_cast<uint8_t*>(entries), numel);
    case StateFormat::kMaster:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "state in the master's dtype is not rounded");
}

}  // namespace

bool is_blocked(StateFormat format) { return format == StateFormat::kSigned8 || format == StateFormat::kUnsigned8; }

int64_t entries_of(StateFormat format, int64_t numel) {
  return is_blocked(format) ? (numel + kStateBlock - 1) / kStateBlock * kBlockBytes : numel;
}

c10::ScalarType entry_dtype(StateFormat format, c10::ScalarType master) {
  if (is_blocked(format)) return c10::kByte;
  return format == StateFormat::kBFloat16 ? c10::kBFloat16 : master;
}

void widen_state(Isa isa, StateFormat format, const void* entries, float* values, int64_t numel) {
  switch (format) {
    case StateFormat::kBFloat16:
      return run_on<WidenBFloat16Loop>(isa, static_cast<const uint16_t*>(entries), values, numel);
    case StateFormat::kSigned8:
      return widen_blocks<true>(isa, static_cast<const uint8_t*>(entries), values, numel);
    case StateFormat::kUnsigned8:
      return widen_blocks<false>(isa, static_cast<const uint8_t*>(entries), values, numel);
    case StateFormat::kMaster:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "state in the master's dtype is not widened");
}

void hash_values(Isa isa, RoundingKey key, const float* values, const float* parameters, uint32_t* random,
                 int64_t numel) {
  run_on<HashLoop>(isa, key, values, parameters, random, numel);
}

void round_state(Isa isa, StateFormat format, const float* values, const uint32_t* random, size_t slot, void* entries,
                 int64_t numel) {
  TORCH_INTERNAL_ASSERT(slot < 2, "a word of random bits serves two slots");
  round_any(isa, Stochastic{random, slot == 0 ? 0 : 16}, format, values, entries, numel);
}

void store_state(StateFormat format, const float* values, void* entries, int64_t numel) {
  round_any(best_isa(), Nearest(), format, values, entries, numel);
}

// SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014).
RoundingKey rounding_key(int64_t step) {
  uint64_t key = (static_cast<uint64_t>(step) + 1) * 0x9e3779b97f4a7c15u;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  key ^= key >> 31;
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

}  // namespace zeropg
