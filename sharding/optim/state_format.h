// How a state slot of an optimizer lies in memory: in the master's dtype, or in 16 or 8 bits per element beside a
// float32 master.
//
// kBFloat16: the upper half of a float32.
// kSigned8, kUnsigned8: blocks of kStateBlock elements in kStateBlock codes of a byte and one byte for the block, which
// is the exponent of its largest element. A code is a small float: an exponent relative to that one, and 3 bits of
// mantissa. Signed: sign, 4 bits of exponent (16 octaves), for momenta. Unsigned: 5 bits of exponent (32 octaves), for
// their squares; a positive value never becomes 0, since a step divides by its root. Blocks with a scale of their own:
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; scales that are powers of 2: the OCP
// Microscaling formats (MX) v1.0; zeros in second moments: Li et al., "Memory Efficient Optimizers with 4-bit States",
// 2023, section 3.
//
// So each value of these formats is a bfloat16, too: it travels in that dtype and comes back the same.
//
// Note [Stochastic rounding]
// With beta2 = 0.999 a second moment moves by a thousandth of itself in a step. A bfloat16 is spaced by 1/128 to 1/256
// of itself, so rounding to the nearest would hold it where it is for good. Rounded up with the probability of what is
// cut off, it is right on average (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The random
// bits are a hash of the first moment, of the parameter beside it, and of the count of steps: an element's result
// depends on its own inputs (in 8 bits: on its block's) alone, as without rounding (Note [Same bits] in elementwise.h),
// and there is no seed to save.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zeropg {

enum class Isa : uint8_t;

enum class StateFormat : uint8_t { kMaster, kBFloat16, kSigned8, kUnsigned8 };

// Elements of a block: a flat range with such state begins at a multiple of it, as parameters and shards do (kAlignment
// of sharding/flat_layout.h), and may end anywhere.
inline constexpr int64_t kStateBlock = 32;

struct StateSlot {
  // A literal names a slot in the master's dtype.
  StateSlot(const char* slot_name, StateFormat slot_format = StateFormat::kMaster)  // NOLINT: implicit on purpose
      : name(slot_name), format(slot_format) {}

  std::string_view name;
  StateFormat format;
};

// Of the tensor that holds `numel` elements: entries and their dtype. Blocks lie one after the other, the last one
// whole, so that a range of whole blocks is a range of entries.
int64_t entries_of(StateFormat format, int64_t numel);
c10::ScalarType entry_dtype(StateFormat format, c10::ScalarType master);
// Whether an entry is an element.
bool is_blocked(StateFormat format);

// Of `numel` elements from the beginning of a block on, in a format that is not kMaster.
void widen_state(Isa isa, StateFormat format, const void* entries, float* values, int64_t numel);
// Rounds slot 0 or 1 stochastically: each takes its own half of the words `random`, [numel]. A finite value stays
// finite, an infinite one infinite, a NaN a NaN.
void round_state(Isa isa, StateFormat format, const float* values, const uint32_t* random, size_t slot, void* entries,
                 int64_t numel);
// Rounds to the nearest: what came out of widen_state comes out again.
void store_state(StateFormat format, const float* values, void* entries, int64_t numel);

}  // namespace zeropg
