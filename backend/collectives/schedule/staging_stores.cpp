#include "backend/collectives/schedule/staging_stores.h"

namespace zeropg {

namespace {

constexpr int64_t kLeastBytes = 8 << 10;

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

const bool is_worth_it = is_amd();  // found at load, as in reduce.cpp

}  // namespace

bool should_stream_to_staging(int64_t bytes) { return is_worth_it && bytes >= kLeastBytes; }

}  // namespace zeropg
