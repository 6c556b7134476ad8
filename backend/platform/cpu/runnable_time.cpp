#include "backend/platform/cpu/runnable_time.h"

#include <cstdint>
#include <ctime>
#include <fstream>

namespace zeropg {

std::chrono::nanoseconds runnable_time() {
  int64_t ran = 0;
  int64_t waited = 0;
  if (std::ifstream("/proc/thread-self/schedstat") >> ran >> waited) return std::chrono::nanoseconds(ran + waited);
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace zeropg
