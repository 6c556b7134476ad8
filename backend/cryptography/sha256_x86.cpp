// For processors with x86's SHA extensions (Intel, "Intel SHA Extensions", 2013).
#include "backend/cryptography/sha256_blocks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#pragma GCC optimize("O3")

namespace zeropg {
namespace {

// The instructions want the state's words as a b e f and c d g h, each from the highest lane down.
[[gnu::target("sha,ssse3,sse4.1")]] void absorb_x86(Sha256State& state, const std::byte* blocks, size_t count) {
  auto* const words = reinterpret_cast<__m128i*>(state.data());
  const auto* const constants = reinterpret_cast<const __m128i*>(kSha256Rounds);
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

  for (size_t block = 0; block < count; ++block) {
    const auto* const message = reinterpret_cast<const __m128i*>(blocks + block * kSha256BlockBytes);
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128(message + i), big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each
      const __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128(constants + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
      if (i >= 12) continue;
      const __m128i last = w[(i + 3) % 4];
      const __m128i seventh = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
      w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seventh), last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Sha256Blocks sha_extension_blocks() {
  constexpr unsigned kSha = 1U << 29;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  const bool has_sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kSha) != 0;
  __builtin_cpu_init();
  return has_sha && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") ? absorb_x86 : nullptr;
}

}  // namespace zeropg

#else

namespace zeropg {
Sha256Blocks sha_extension_blocks() { return nullptr; }
}  // namespace zeropg

#endif
