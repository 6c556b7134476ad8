#include "backend/platform/cpu/copy.h"

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropg {

#if defined(__x86_64__)
namespace {

constexpr int64_t kLineBytes = 64;

// Whole cache lines, so that the write-combining buffers never have to read memory. `destination` is line-aligned.
void stream_lines(std::byte* destination, const std::byte* source, int64_t lines) {
  for (int64_t line = 0; line < lines; ++line) {
    auto* to = reinterpret_cast<__m128i*>(destination + line * kLineBytes);
    const auto* from = reinterpret_cast<const __m128i*>(source + line * kLineBytes);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
  }
  _mm_sfence();  // a release store does not order non-temporal stores
}

}  // namespace

void copy_bytes(void* destination, const void* source, int64_t bytes, bool is_streaming) {
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  if (is_streaming && bytes >= 2 * kLineBytes) {
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
    const int64_t head = (kLineBytes - misaligned) % kLineBytes;
    std::memcpy(to, from, head);
    const int64_t lines = (bytes - head) / kLineBytes;
    stream_lines(to + head, from + head, lines);
    const int64_t done = head + lines * kLineBytes;
    to += done;
    from += done;
    bytes -= done;
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}
#else
void copy_bytes(void* destination, const void* source, int64_t bytes, bool) {
  if (bytes > 0) std::memcpy(destination, source, bytes);
}
#endif

}  // namespace zeropg
