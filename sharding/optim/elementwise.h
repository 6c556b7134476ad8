// Runs an elementwise update rule over flat ranges: instruction sets, threads, blocks, 16-bit gradients and parameters.
// For the sources of optimizers; users include optimizer.h.
//
// Note [Same bits]
// The update of an element is a fixed sequence of IEEE additions, multiplications, divisions and square roots, each
// correctly rounded on every x86-64 and AArch64. The compiler must not change that sequence: no -ffast-math, and
// -ffp-contract=off (CMakeLists.txt), since a fused multiply-add in the AVX code alone would round differently from the
// scalar code. Then vector body, scalar tail, AVX-512, AVX2 and plain code give the same bits by construction, and a
// flat range may be cut anywhere. A rule therefore never calls a transcendental function per element.
//
// Note [One pass]
// A block of kBlock elements stays in the L1 cache while three loops run over it: widen a 16-bit gradient, update,
// round into parameter_out. So memory is read and written once, and conversions are not multiplied with rules, dtypes
// and instruction sets into hundreds of kernels. State in fewer bits is widened before, and rounded after the update.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <type_traits>
#include <utility>

#include "sharding/optim/optimizer.h"
#include "sharding/optim/stochastic_rounding.h"

namespace zeropg {

enum class Isa : uint8_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// Those that this CPU can run, worst first; best_isa() is the last.
std::vector<Isa> supported_isas();
Isa best_isa();

// A float32 denormal costs up to 7.6x (measured: second moments of gradients around 1e-21, Sapphire Rapids), so while
// one of these lives its thread takes and makes zeros for them: what is below 1.2e-38 becomes 0. Restores the thread's
// mode.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool enabled);
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const bool enabled_;
  uint64_t saved_ = 0;
};

// Calls body(begin, end) on ranges that cover [0, numel) once, on up to at::get_num_threads() threads; returns when all
// are done. body must not throw.
void parallel_over_ranges(int64_t numel, const std::function<void(int64_t, int64_t)>& body);

// Converts `numel` elements, starting at element `start` of a 16-bit gradient or of parameter_out.
void widen(Isa isa, at::ScalarType from, const void* gradient, int64_t start, float* widened, int64_t numel);
void narrow(Isa isa, const float* master, at::ScalarType to, void* parameter_out, int64_t start, int64_t numel);
void narrow(Isa isa, const double* master, at::ScalarType to, void* parameter_out, int64_t start, int64_t numel);

// Throws unless `view` is what FlatView demands, with these state tensors.
void check_view(std::string_view optimizer, const FlatView& view, const std::vector<StateSlot>& slots);

// What multiplies each gradient: negative where the hyperparameter `maximize` says so.
double signed_gradient_factor(const StepArguments& arguments);
// The hyperparameter; ValueError unless 0 <= beta < 1.
double checked_beta(std::string_view optimizer, const Hyperparameters& hyperparameters, const char* name);

[[gnu::always_inline]] inline float square_root(float value) { return __builtin_sqrtf(value); }
[[gnu::always_inline]] inline double square_root(double value) { return __builtin_sqrt(value); }

// Loop::run(arguments...) compiled for one instruction set. Loop::run and all that it calls must be always_inline: only
// then is it compiled again here, with this function's instructions.
template <class Loop, class... Arguments>
void run_plain(Arguments... arguments) {
  Loop::run(arguments...);
}
#if defined(__x86_64__)
template <class Loop, class... Arguments>
__attribute__((target("avx2"))) void run_avx2(Arguments... arguments) {
  Loop::run(arguments...);
}
template <class Loop, class... Arguments>
__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    Arguments... arguments) {
  Loop::run(arguments...);
}
#endif

template <class Loop, class... Arguments>
void run_on(Isa isa, Arguments... arguments) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512:
      return run_avx512<Loop, Arguments...>(arguments...);
    case Isa::kAvx2:
      return run_avx2<Loop, Arguments...>(arguments...);
    case Isa::kPlain:
      break;
  }
#else
  static_cast<void>(isa);
#endif
  run_plain<Loop, Arguments...>(arguments...);
}

inline constexpr int64_t kBlock = 1024;

// How a loop over a block meets its state: in place in the master's dtype, in place as bfloat16, or widened from blocks
// of codes, to be rounded after the loop.
enum class StateAccess : uint8_t { kMaster, kBFloat16, kWidened };

// A Rule has: `Scalar` (float or double), `kSlots`, and an always_inline
// `void update(Scalar& parameter, Scalar gradient, Scalar* state) const`.
template <class Rule, StateAccess kAccess>
struct UpdateLoop {
  using T = typename Rule::Scalar;
  using Entry = std::conditional_t<kAccess == StateAccess::kBFloat16, uint16_t, T>;
  using State = std::array<Entry*, 3>;
  static constexpr int64_t kStep = 256 / sizeof(T);
  static constexpr int64_t kAhead = 2048;  // bytes: 10 to 12 % faster than the hardware's prefetch alone (measured)

  template <class Element>
  [[gnu::always_inline]] static inline void prefetch(const Element* stream) {
    const char* const ahead = reinterpret_cast<const char*>(stream) + kAhead;
    for (size_t line = 0; line < kStep * sizeof(Element); line += 64) {
      __builtin_prefetch(ahead + line);
    }
  }

  [[gnu::always_inline]] static inline void update_few(const Rule& rule, T* __restrict__ master,
                                                       const T* __restrict__ gradient, T* __restrict__ first,
                                                       T* __restrict__ second, T* __restrict__ third, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      T state[3] = {};
      if constexpr (Rule::kSlots > 0) state[0] = first[i];
      if constexpr (Rule::kSlots > 1) state[1] = second[i];
      if constexpr (Rule::kSlots > 2) state[2] = third[i];
      T parameter = master[i];
      rule.update(parameter, gradient[i], state);
      master[i] = parameter;
      if constexpr (Rule::kSlots > 0) first[i] = state[0];
      if constexpr (Rule::kSlots > 1) second[i] = state[1];
      if constexpr (Rule::kSlots > 2) third[i] = state[2];
    }
  }

  [[gnu::always_inline]] static inline void widen_few(const uint16_t* __restrict__ from, float* __restrict__ to,
                                                      int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
    }
  }

  // In a loop of its own: together with the update GCC 12 does not vectorise it.
  [[gnu::always_inline]] static inline void round_few(RoundingKey key, const float* __restrict__ master,
                                                      const float* __restrict__ first, const float* __restrict__ second,
                                                      uint16_t* __restrict__ to_first, uint16_t* __restrict__ to_second,
                                                      int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      const uint32_t word = random_bits(key, first[i], master[i]);
      to_first[i] = rounded_to_bfloat16(first[i], word);
      if constexpr (Rule::kSlots > 1) to_second[i] = rounded_to_bfloat16(second[i], word << 16);
    }
  }

  [[gnu::always_inline]] static inline void step_few(const Rule& rule, T* master, const T* gradient, Entry* first,
                                                     Entry* second, Entry* third, RoundingKey key, int64_t numel) {
    if constexpr (kAccess == StateAccess::kBFloat16) {
      static_assert(Rule::kSlots <= 2, "a word of random bits serves two slots");
      alignas(64) float values[2][kStep];
      widen_few(first, values[0], numel);
      if constexpr (Rule::kSlots > 1) widen_few(second, values[1], numel);
      update_few(rule, master, gradient, values[0], values[1], values[1], numel);
      round_few(key, master, values[0], values[1], first, second, numel);
    } else {
      update_few(rule, master, gradient, first, second, third, numel);
    }
  }

  [[gnu::always_inline]] static inline void run(const Rule rule, T* master, const T* gradient, State state,
                                                RoundingKey key, int64_t numel) {
    int64_t i = 0;
    for (; i + kStep <= numel; i += kStep) {
      prefetch(master + i);
      prefetch(gradient + i);
      if constexpr (kAccess != StateAccess::kWidened) {
        for (int slot = 0; slot < Rule::kSlots; ++slot) {
          prefetch(state[slot] + i);
        }
      }
      step_few(rule, master + i, gradient + i, state[0] + i, state[1] + i, state[2] + i, key, kStep);
    }
    step_few(rule, master + i, gradient + i, state[0] + i, state[1] + i, state[2] + i, key, numel - i);
  }
};

// How a step meets state that is kept in fewer bits; by default none is.
struct KeptState {
  KeptState() = default;
  KeptState(const std::vector<StateSlot>& slots, int64_t step);

  StateAccess access = StateAccess::kMaster;
  std::array<StateFormat, 3> formats{};
  RoundingKey key;
};

// Where a range of a view lies.
template <class T>
struct FlatRange {
  T* master;
  const T* gradient;
  std::array<std::byte*, 3> state;  // entries of the range's first block; of unused slots: any valid address
  int64_t numel;
};

template <class Rule, StateAccess kAccess>
void update_in_place(const Rule& rule, const FlatRange<typename Rule::Scalar>& range, RoundingKey key, Isa isa) {
  using Loop = UpdateLoop<Rule, kAccess>;
  typename Loop::State state;
  for (size_t slot = 0; slot < state.size(); ++slot) {
    state[slot] = reinterpret_cast<typename Loop::Entry*>(range.state[slot]);
  }
  run_on<Loop>(isa, rule, range.master, range.gradient, state, key, range.numel);
}

template <class Rule>
void update_widened(const Rule& rule, const FlatRange<float>& range, const KeptState& kept, Isa isa) {
  using Loop = UpdateLoop<Rule, StateAccess::kWidened>;
  alignas(64) float widened[3][kBlock];
  alignas(64) uint32_t random[kBlock];
  for (size_t slot = 0; slot < Rule::kSlots; ++slot) {
    widen_state(isa, kept.formats[slot], range.state[slot], widened[slot], range.numel);
    const std::byte* const next = range.state[slot] + entries_of(kept.formats[slot], kBlock);
    for (int64_t byte = 0; byte < kBlock; byte += 64) {
      __builtin_prefetch(next + byte);
    }
  }
  const typename Loop::State state{widened[0], widened[1], widened[2]};
  run_on<Loop>(isa, rule, range.master, range.gradient, state, kept.key, range.numel);
  hash_values(isa, kept.key, widened[0], range.master, random, range.numel);
  for (size_t slot = 0; slot < Rule::kSlots; ++slot) {
    round_state(isa, kept.formats[slot], widened[slot], random, slot, range.state[slot], range.numel);
  }
}

// Applies `rule` to every element of `view`, which check_view has passed.
template <class Rule>
void update_flat(const Rule& rule, const FlatView& view, const KeptState& kept, Isa isa) {
  using T = typename Rule::Scalar;
  T* const master = view.master.data_ptr<T>();
  const void* const gradient = view.gradient.const_data_ptr();
  const at::ScalarType gradient_dtype = view.gradient.scalar_type();
  void* const parameter_out = view.parameter_out.defined() ? view.parameter_out.data_ptr() : nullptr;
  const at::ScalarType parameter_dtype =
      view.parameter_out.defined() ? view.parameter_out.scalar_type() : gradient_dtype;
  parallel_over_ranges(view.master.numel(), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush(std::is_same_v<T, float>);
    alignas(64) T widened[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t numel = std::min(kBlock, end - start);
      FlatRange<T> range{master + start, static_cast<const T*>(gradient) + start, {}, numel};
      if constexpr (std::is_same_v<T, float>) {
        if (gradient_dtype != at::kFloat) {
          widen(isa, gradient_dtype, gradient, start, widened, numel);
          range.gradient = widened;
        }
      }
      for (size_t slot = 0; slot < range.state.size(); ++slot) {
        const StateFormat format = kept.formats[slot];
        const int64_t entry_bytes =
            static_cast<int64_t>(c10::elementSize(entry_dtype(format, c10::CppTypeToScalarType<T>::value)));
        range.state[slot] =
            slot < static_cast<size_t>(Rule::kSlots)
                ? static_cast<std::byte*>(view.state[slot].data_ptr()) + entries_of(format, start) * entry_bytes
                : reinterpret_cast<std::byte*>(range.master);
      }
      if constexpr (std::is_same_v<T, float> && Rule::kSlots > 0 && Rule::kSlots <= 2) {
        if (kept.access == StateAccess::kBFloat16) {
          update_in_place<Rule, StateAccess::kBFloat16>(rule, range, kept.key, isa);
        } else if (kept.access == StateAccess::kWidened) {
          update_widened(rule, range, kept, isa);
        } else {
          update_in_place<Rule, StateAccess::kMaster>(rule, range, kept.key, isa);
        }
      } else {
        update_in_place<Rule, StateAccess::kMaster>(rule, range, kept.key, isa);
      }
      if (parameter_out != nullptr) {
        narrow(isa, range.master, parameter_dtype, parameter_out, start, numel);
      }
    }
  });
}

// The same with the rule of the master's dtype, made of coefficients that are computed in double.
template <template <class> class Rule, class Coefficients>
void update_in_dtype(const Coefficients& coefficients, const FlatView& view, Isa isa, const KeptState& kept = {}) {
  if (view.master.scalar_type() == at::kDouble) {
    update_flat(Rule<double>(coefficients), view, kept, isa);
  } else {
    update_flat(Rule<float>(coefficients), view, kept, isa);
  }
}

}  // namespace zeropg
