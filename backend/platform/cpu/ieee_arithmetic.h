// The rules that numbers are reduced and encoded under: those of IEEE 754, rounding to nearest even.
//
// Whether subnormal numbers become zeros (torch.set_flush_denormal) and which way results are rounded (fesetround) is
// set thread by thread, and what thread runs an operation is chance. Under the thread's own rules the bits of a result
// would depend on that.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zeropg {

// Of the calling thread, while this lives. Some nanoseconds where the thread has them anyway.
class IeeeArithmetic {
 public:
  IeeeArithmetic() : before_(control()) {
    if (is_other()) set_control(kControl);
  }
  ~IeeeArithmetic() {
    if (is_other()) set_control(before_);
  }
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kControl = 0x1f80;  // MXCSR: all exceptions masked
  static constexpr uint64_t kRaised = 0x3f;     // which exceptions there were: no rules
  static uint64_t control() { return _mm_getcsr(); }
  static void set_control(uint64_t value) { _mm_setcsr(static_cast<uint32_t>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kControl = 0;
  static constexpr uint64_t kRaised = 0;
  static uint64_t control() {
    uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set_control(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
#error "say where this CPU keeps the direction of rounding and what becomes of subnormal numbers"
#endif
  bool is_other() const { return (before_ & ~kRaised) != kControl; }

  const uint64_t before_;
};

}  // namespace zeropg
