// A digest of memory, to see whether ranks have the same bytes. Not against anybody who wants them to collide.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

// 64 bits of all `bytes` and their order, the same on every processor. Memory-bound for large inputs.
uint64_t digest(std::span<const std::byte> bytes, uint64_t seed = 0);
// The same of a tensor's elements, in the order of its dimensions, wherever they are.
uint64_t digest_of(const at::Tensor& values, uint64_t seed);

}  // namespace zeropg
