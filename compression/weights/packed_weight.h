// A frozen weight in 4 or 8 bits per value, with the scale of each block beside its codes: one run of bytes that says
// itself what it holds. The bytes, and every edge case: ../README.md.
//
// Sources: NF4 and its code book: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (section 3, appendix
// E). int4 and int8: the blocks of BlockQuant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "compression/weights/packed_weight_kernels.h"

namespace zeropg {

enum class WeightFormat : uint8_t { kNf4 = 1, kInt4 = 2, kInt8 = 3 };

struct PackedWeightShape {
  WeightFormat format = WeightFormat::kNf4;
  int64_t block = 64;  // values per scale
  int64_t rows = 0;    // a matrix, row after row
  int64_t columns = 0;

  int64_t numel() const { return rows * columns; }
};

inline constexpr int64_t kPackedWeightHeaderBytes = 16;

// "nf4", "int4", "int8". std::invalid_argument for others.
WeightFormat weight_format_of(const std::string& name);
const char* name_of(WeightFormat format);

// Bytes of the whole, header included. std::invalid_argument for a shape that cannot be packed: blocks are multiples of
// 32 up to kLargestQuantBlock, rows and columns below 2^32.
int64_t packed_weight_bytes(const PackedWeightShape& shape);

// `values`: shape.numel() floats. `packed`: packed_weight_bytes(shape) bytes. `set` is for tests: it changes the speed,
// never the bits.
void pack_weight(const PackedWeightShape& shape, std::span<const float> values, std::span<std::byte> packed,
                 const PackedWeightSet& set = usable_packed_weight_sets().back());

// What the header says. std::invalid_argument where it is none, or the bytes are more or fewer than it says.
PackedWeightShape shape_of_packed(std::span<const std::byte> packed);

// Values [start, stop) into `out`, which has room for them in `type`; `start` is a multiple of the block. `packed` is
// the whole, of this shape.
void unpack_weight(const PackedWeightShape& shape, std::span<const std::byte> packed, int64_t start, int64_t stop,
                   WeightType type, void* out, const PackedWeightSet& set = usable_packed_weight_sets().back());

}  // namespace zeropg
