// A digest of memory, to see whether ranks have the same bytes. Not against anybody who wants them to collide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

// 64 bits of all `bytes` and their order, the same on every processor. Memory-bound for large inputs.
uint64_t digest(std::span<const std::byte> bytes, uint64_t seed = 0);

}  // namespace zeropg
