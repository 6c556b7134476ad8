#include "sharding/optim/elementwise.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "backend/platform/cpu/instruction_sets.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropg {
namespace {

constexpr int64_t kRange = int64_t{1} << 15;  // elements that are worth waking a thread for: about 30 us of AdamW

// Bit arithmetic of c10::BFloat16, written out so that it is inlined into each instruction set's loop.
[[gnu::always_inline]] inline float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

template <typename To>
[[gnu::always_inline]] inline To rounded(float value) {
  if constexpr (std::is_same_v<To, c10::BFloat16>) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return To(static_cast<uint16_t>(is_nan ? 0x7fc0u : nearest_even), To::from_bits());
  } else {
    return static_cast<To>(value);
  }
}

template <typename From>
struct WidenLoop {
  [[gnu::always_inline]] static inline void run(const From* __restrict__ from, float* __restrict__ to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      if constexpr (std::is_same_v<From, c10::BFloat16>) {
        to[i] = bits_to_float(static_cast<uint32_t>(from[i].x) << 16);
      } else {
        to[i] = static_cast<float>(from[i]);
      }
    }
  }
};

template <typename From, typename To>
struct NarrowLoop {
  [[gnu::always_inline]] static inline void run(const From* __restrict__ from, To* __restrict__ to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      if constexpr (sizeof(To) >= sizeof(float)) {
        to[i] = static_cast<To>(from[i]);
      } else {
        to[i] = rounded<To>(static_cast<float>(from[i]));
      }
    }
  }
};

template <typename From, typename To>
void narrow_to(Isa isa, const From* master, void* parameter_out, int64_t start, int64_t numel) {
  run_on<NarrowLoop<From, To>>(isa, master, static_cast<To*>(parameter_out) + start, numel);
}

template <typename From>
void narrow_any(Isa isa, const From* master, at::ScalarType to, void* parameter_out, int64_t start, int64_t numel) {
  switch (to) {
    case at::kBFloat16:
      return narrow_to<From, c10::BFloat16>(isa, master, parameter_out, start, numel);
    case at::kHalf:
      return narrow_to<From, c10::Half>(isa, master, parameter_out, start, numel);
    case at::kFloat:
      return narrow_to<From, float>(isa, master, parameter_out, start, numel);
    case at::kDouble:
      return narrow_to<From, double>(isa, master, parameter_out, start, numel);
    default:
      TORCH_INTERNAL_ASSERT(false, "check_view let parameter_out of ", to, " pass");
  }
}

void check_tensor(std::string_view optimizer, const char* what, const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK_VALUE(tensor.defined(), "[zeropg] ", optimizer, ": ", what, " is missing");
  TORCH_CHECK_TYPE(tensor.device().is_cpu(), "[zeropg] ", optimizer, ": ", what, " is on ", tensor.device(),
                   ", expected a CPU tensor");
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous() && tensor.numel() == numel, "[zeropg] ", optimizer,
                    ": ", what, " has shape ", tensor.sizes(), " and strides ", tensor.strides(),
                    ", expected contiguous [", numel, "]");
}

}  // namespace

FlatView cut(const FlatView& view, const std::vector<StateSlot>& slots, int64_t start, int64_t stop) {
  TORCH_CHECK_VALUE(view.state.size() == slots.size(), "[zeropg] optimizer step: got ", view.state.size(),
                    " state tensors, expected ", slots.size());
  FlatView part{.master = view.master.narrow(0, start, stop - start),
                .gradient = view.gradient.narrow(0, start, stop - start),
                .state = {},
                .parameter_out = {}};
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const StateFormat format = slots[slot].format;
    TORCH_CHECK_VALUE(!is_blocked(format) || start % kStateBlock == 0, "[zeropg] optimizer step: the range begins at ",
                      start, ", expected a multiple of ", kStateBlock, " for state in 8 bits");
    part.state.push_back(view.state[slot].narrow(0, entries_of(format, start), entries_of(format, stop - start)));
  }
  if (view.parameter_out.defined()) part.parameter_out = view.parameter_out.narrow(0, start, stop - start);
  return part;
}

double hyperparameter(const Hyperparameters& hyperparameters, const std::string& name) {
  const auto found = hyperparameters.find(name);
  TORCH_CHECK_VALUE(found != hyperparameters.end(), "[zeropg] optimizer step: hyperparameter '", name, "' is missing");
  TORCH_CHECK_VALUE(!std::isnan(found->second), "[zeropg] optimizer step: hyperparameter '", name, "' is NaN");
  return found->second;
}

double signed_gradient_factor(const StepArguments& arguments) {
  const bool maximizes = hyperparameter(arguments.hyperparameters, "maximize") != 0.0;
  return maximizes ? -arguments.gradient_factor : arguments.gradient_factor;
}

double checked_beta(std::string_view optimizer, const Hyperparameters& hyperparameters, const char* name) {
  const double beta = hyperparameter(hyperparameters, name);
  TORCH_CHECK_VALUE(beta >= 0.0 && beta < 1.0, "[zeropg] ", optimizer, ": ", name, " is ", beta,
                    ", expected 0 <= ", name, " < 1");
  return beta;
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas{Isa::kPlain};
  if (has(Instructions::kAvx2)) {
    isas.push_back(Isa::kAvx2);
  }
  if (has(Instructions::kAvx512)) {
    isas.push_back(Isa::kAvx512);
  }
  return isas;
}

Isa best_isa() { return supported_isas().back(); }

FlushDenormals::FlushDenormals(bool enabled) : enabled_(enabled) {
#if defined(__x86_64__)
  if (enabled_) {
    saved_ = _mm_getcsr();
    _mm_setcsr(static_cast<unsigned>(saved_) | 0x8040u);  // FTZ and DAZ
  }
#elif defined(__aarch64__)
  if (enabled_) {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));  // FZ
  }
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
  if (enabled_) {
    _mm_setcsr(static_cast<unsigned>(saved_));
  }
#elif defined(__aarch64__)
  if (enabled_) {
    asm volatile("msr fpcr, %0" ::"r"(saved_));
  }
#endif
}

// Note [Helpers that come late]
// at::parallel_for would need OpenMP in this library, hence a second libgomp beside the one that torch bundles.
// Instead, torch's inter-op pool helps: ranges are handed out by a counter and the caller takes them like any helper,
// so it never waits for a helper that has not begun. A pool that is busy, or that did not survive a fork(), costs speed
// alone. A helper that comes after the last range finds nothing to do; `job` is shared so that it can find that out.
void parallel_over_ranges(int64_t numel, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t ranges = (numel + kRange - 1) / kRange;
  const int64_t threads = at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), ranges);
  if (threads <= 1) {
    body(0, numel);
    return;
  }
  struct Job {
    std::function<void(int64_t, int64_t)> body;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const auto job = std::make_shared<Job>();
  job->body = body;
  const auto help = [job, ranges, numel] {
    for (int64_t range = job->next.fetch_add(1); range < ranges; range = job->next.fetch_add(1)) {
      job->body(range * kRange, std::min(numel, (range + 1) * kRange));
      if (job->done.fetch_add(1) + 1 == ranges) {
        job->done.notify_all();
      }
    }
  };
  for (int64_t helper = 1; helper < threads; ++helper) {
    at::launch(help);
  }
  help();
  for (int64_t done = job->done.load(); done < ranges; done = job->done.load()) {
    job->done.wait(done);
  }
}

void widen(Isa isa, at::ScalarType from, const void* gradient, int64_t start, float* widened, int64_t numel) {
  if (from == at::kBFloat16) {
    run_on<WidenLoop<c10::BFloat16>>(isa, static_cast<const c10::BFloat16*>(gradient) + start, widened, numel);
  } else {
    run_on<WidenLoop<c10::Half>>(isa, static_cast<const c10::Half*>(gradient) + start, widened, numel);
  }
}

void narrow(Isa isa, const float* master, at::ScalarType to, void* parameter_out, int64_t start, int64_t numel) {
  narrow_any(isa, master, to, parameter_out, start, numel);
}

void narrow(Isa isa, const double* master, at::ScalarType to, void* parameter_out, int64_t start, int64_t numel) {
  narrow_any(isa, master, to, parameter_out, start, numel);
}

KeptState::KeptState(const std::vector<StateSlot>& slots, int64_t step) : key(rounding_key(step)) {
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const StateFormat format = slots[slot].format;
    formats.at(slot) = format;
    const StateAccess narrow = format == StateFormat::kBFloat16 ? StateAccess::kBFloat16 : StateAccess::kWidened;
    const StateAccess own = format == StateFormat::kMaster ? StateAccess::kMaster : narrow;
    TORCH_INTERNAL_ASSERT(slot == 0 || own == access, "slots of one optimizer that are kept in different ways");
    access = own;
  }
}

void check_view(std::string_view optimizer, const FlatView& view, const std::vector<StateSlot>& slots) {
  TORCH_CHECK_VALUE(view.master.defined(), "[zeropg] ", optimizer, ": master is missing");
  const int64_t numel = view.master.numel();
  const at::ScalarType dtype = view.master.scalar_type();
  check_tensor(optimizer, "master", view.master, numel);
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, "[zeropg] ", optimizer, ": master is ", dtype,
                   ", expected float32 or float64");
  check_tensor(optimizer, "gradient", view.gradient, numel);
  const at::ScalarType gradient_dtype = view.gradient.scalar_type();
  const bool is_narrow_gradient = gradient_dtype == at::kBFloat16 || gradient_dtype == at::kHalf;
  TORCH_CHECK_TYPE(gradient_dtype == dtype || (dtype == at::kFloat && is_narrow_gradient), "[zeropg] ", optimizer,
                   ": gradient is ", gradient_dtype, " beside a master of ", dtype,
                   ", expected the master's dtype, or bfloat16 or float16 beside float32");
  TORCH_CHECK_VALUE(view.state.size() == slots.size(), "[zeropg] ", optimizer, ": got ", view.state.size(),
                    " state tensors, expected ", slots.size());
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const StateFormat format = slots[slot].format;
    TORCH_CHECK_TYPE(format == StateFormat::kMaster || dtype == at::kFloat, "[zeropg] ", optimizer,
                     ": state in fewer bits beside a master of ", dtype, ", expected float32");
    const at::Tensor& state = view.state[slot];
    check_tensor(optimizer, "state", state, entries_of(format, numel));
    TORCH_CHECK_TYPE(state.scalar_type() == entry_dtype(format, dtype), "[zeropg] ", optimizer, ": state is ",
                     state.scalar_type(), ", expected ", entry_dtype(format, dtype), " beside a master of ", dtype);
  }
  if (view.parameter_out.defined()) {
    check_tensor(optimizer, "parameter_out", view.parameter_out, numel);
    const at::ScalarType to = view.parameter_out.scalar_type();
    TORCH_CHECK_TYPE(to == at::kBFloat16 || to == at::kHalf || to == at::kFloat || to == at::kDouble, "[zeropg] ",
                     optimizer, ": parameter_out is ", to, ", expected bfloat16, float16, float32 or float64");
  }
}

}  // namespace zeropg
