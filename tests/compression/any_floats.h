// Values that no codec may stumble over, for tests.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace zeropg {

// Everything that a float can be, finite or not, many in a block. The same for the same arguments.
inline std::vector<float> any_floats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = random();
    if (i / 64 % 3 != 0) bits = (bits & 0x807fffff) | ((100 + bits % 40) << 23);  // mostly of one size
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

}  // namespace zeropg
