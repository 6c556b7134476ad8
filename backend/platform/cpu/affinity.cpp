#include "backend/platform/cpu/affinity.h"

#include <sched.h>

#include <cerrno>

namespace zeropg {
namespace {

constexpr int32_t kMostCpus = 1 << 18;

// A set of as many CPUs as the kernel may know of, which a cpu_set_t does not always hold.
class CpuSet {
 public:
  explicit CpuSet(int32_t capacity) : words_(CPU_ALLOC_SIZE(capacity) / sizeof(unsigned long)) {}

  size_t bytes() const { return words_.size() * sizeof(unsigned long); }
  int32_t capacity() const { return static_cast<int32_t>(8 * bytes()); }
  bool has(int32_t cpu) const { return CPU_ISSET_S(cpu, bytes(), reinterpret_cast<const cpu_set_t*>(words_.data())); }
  void add(int32_t cpu) { CPU_SET_S(cpu, bytes(), reinterpret_cast<cpu_set_t*>(words_.data())); }
  // Of the calling thread.
  bool read() { return ::sched_getaffinity(0, bytes(), reinterpret_cast<cpu_set_t*>(words_.data())) == 0; }
  bool write() const { return ::sched_setaffinity(0, bytes(), reinterpret_cast<const cpu_set_t*>(words_.data())) == 0; }

  // Empty where the kernel does not say.
  static CpuSet allowed() {
    for (int32_t capacity = CPU_SETSIZE; capacity <= kMostCpus; capacity *= 4) {
      CpuSet set(capacity);
      if (set.read()) return set;
      if (errno != EINVAL) break;
    }
    return CpuSet(0);
  }

 private:
  std::vector<unsigned long> words_;
};

}  // namespace

std::vector<int32_t> allowed_cpus() {
  const CpuSet set = CpuSet::allowed();
  std::vector<int32_t> cpus;
  for (int32_t cpu = 0; cpu < set.capacity(); ++cpu) {
    if (set.has(cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

bool move_to_cpu(int32_t cpu) {
  const CpuSet allowed = CpuSet::allowed();
  if (cpu < 0 || cpu >= allowed.capacity() || !allowed.has(cpu)) return false;
  CpuSet there(allowed.capacity());
  there.add(cpu);
  return there.write() && allowed.write();
}

}  // namespace zeropg
