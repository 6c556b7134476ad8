// Pages of shared memory: their sizes, and how they come into being.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeropg {

inline constexpr int64_t kSmallPageBytes = 4096;
inline constexpr int64_t kBigPageBytes = int64_t{2} << 20;

// Brings [data, data + bytes) of a shared mapping into memory, near the CPU that calls, without changing what is there.
// Without this, memory that is not to be had shows as a SIGBUS where it is first used. DistBackendError: there is none;
// `what` names what it is for, and what to do about it.
void populate(std::byte* data, int64_t bytes, const char* what);

}  // namespace zeropg
