// What the kernels of a codec owe each other, whatever the instruction set.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "compression/compressor.h"

namespace zeropg {

// Both encode `values` to, decode them from, and leave in `residual` the same bits.
inline void expect_same_bits(const Compressor& one, const Compressor& other, const std::vector<float>& values,
                             const std::vector<float>& residual) {
  const size_t size = values.size();
  std::vector<float> residuals[2] = {residual, residual};
  std::vector<std::byte> encoded[2];
  std::vector<float> decoded[2];
  std::vector<float> sums[2];
  for (const int which : {0, 1}) {
    const Compressor& codec = which == 0 ? one : other;
    encoded[which].resize(codec.capacity_bytes(static_cast<int64_t>(size)));
    decoded[which].resize(size);
    sums[which].assign(size, 0.3f);
    codec.encode(values, residuals[which], encoded[which]);
    codec.decode(encoded[which], decoded[which]);
    codec.decode_add(encoded[which], sums[which]);
  }
  EXPECT_TRUE(encoded[0] == encoded[1]);
  EXPECT_EQ(std::memcmp(residuals[0].data(), residuals[1].data(), 4 * size), 0);
  EXPECT_EQ(std::memcmp(decoded[0].data(), decoded[1].data(), 4 * size), 0);
  EXPECT_EQ(std::memcmp(sums[0].data(), sums[1].data(), 4 * size), 0);
}

}  // namespace zeropg
