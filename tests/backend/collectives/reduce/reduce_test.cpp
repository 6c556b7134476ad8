// Every (dtype, operation) on every instruction set of this machine against a slow reference, bit for bit.
//
// The reference works on one element at a time and shares no code with the kernels: 16-bit floats are converted through
// double arithmetic, so that it is right by construction.
#include "backend/collectives/reduce/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backend/collectives/reduce/reduce_kernels.h"

namespace zeropg {
namespace {

using Bytes = std::vector<std::byte>;

constexpr double kFactor = 0.3;
constexpr int kRanks = 300;  // that an average of integers is over: more than one byte counts
constexpr double kImaginaryFactor = -1.7;

const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = [] {
    std::vector<DType> list;
    for (int i = 0; i < kDTypeCount; ++i) list.push_back(static_cast<DType>(i));
    return list;
  }();
  return dtypes;
}

// --- 16-bit floats by definition: sign, exponent bits, mantissa bits.

struct Half {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Half kFloat16Format{5, 10};
constexpr Half kBFloat16Format{8, 7};

double half_to_double(uint16_t bits, Half format) {
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int largest = (1 << format.exponent_bits) - 1;
  const int bias = largest / 2;
  double value = 0;
  if (exponent == largest) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - bias - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

// To nearest, ties to even, by looking the neighbours up: `value` is exact in double.
uint16_t double_to_half(double value, Half format) {
  const uint16_t infinity = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(value)) return infinity | 1 << (format.mantissa_bits - 1);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  uint16_t low = 0;  // the largest number that is not above the magnitude, by bisection
  for (uint16_t step = 0x4000; step != 0; step >>= 1) {
    if ((low | step) < infinity && half_to_double(low | step, format) <= magnitude) low |= step;
  }
  const double below = half_to_double(low, format);
  const int exponent = std::max(1, low >> format.mantissa_bits) - ((1 << (format.exponent_bits - 1)) - 1);
  const double spacing = std::ldexp(1, exponent - format.mantissa_bits);
  const double half_way = below + spacing / 2;
  const bool is_up = magnitude > half_way || (magnitude == half_way && (low & 1) != 0);
  return sign | (low + (is_up ? 1 : 0));
}

// --- The reference: load an element, reduce it, store it.

template <class T>
T element(const Bytes& tensor, int64_t index) {
  T value{};
  std::memcpy(&value, tensor.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void append(Bytes& tensor, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  tensor.insert(tensor.end(), bytes, bytes + sizeof(T));
}

template <class T>
T combine_float(T a, T b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : b < a ? b : a;
    case ReduceOp::kMax:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : b > a ? b : a;
    default:
      return a + b;
  }
}

template <class T>
T reduce_floats(const std::vector<T>& values, ReduceOp op) {
  std::vector<T> prepared = values;
  for (T& value : prepared) {
    const volatile T product = value * T(kFactor);  // volatile: no fused multiply-add in the reference either
    if (op == ReduceOp::kPremulSum) value = product;
  }
  T result = prepared[0];
  for (size_t i = 1; i < values.size(); ++i) result = combine_float<T>(result, prepared[i], op);
  return op == ReduceOp::kAverage ? result / T(kFactor) : result;
}

template <class T>
T reduce_integers(const std::vector<T>& values, ReduceOp op) {
  __int128 result = values[0];
  for (size_t i = 1; i < values.size(); ++i) {
    const __int128 value = values[i];
    switch (op) {
      case ReduceOp::kProduct:
        result = static_cast<T>(static_cast<unsigned __int128>(result) * static_cast<unsigned __int128>(value));
        break;
      case ReduceOp::kMin:
        result = std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = std::max(result, value);
        break;
      case ReduceOp::kBitAnd:
        result &= value;
        break;
      case ReduceOp::kBitOr:
        result |= value;
        break;
      case ReduceOp::kBitXor:
        result ^= value;
        break;
      default:
        result = static_cast<T>(result + value);
    }
  }
  return static_cast<T>(op == ReduceOp::kAverage ? result / kRanks : result);
}

bool reduce_bools(const std::vector<uint8_t>& values, ReduceOp op) {
  const auto count = std::count_if(values.begin(), values.end(), [](uint8_t value) { return value != 0; });
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return count == static_cast<int64_t>(values.size());
    case ReduceOp::kBitXor:
      return count % 2 == 1;
    default:
      return count > 0;
  }
}

template <class T>
std::complex<T> reduce_complex(const std::vector<std::complex<T>>& values, ReduceOp op) {
  const auto multiply = [](std::complex<T> a, std::complex<T> b) -> std::complex<T> {
    volatile T products[] = {a.real() * b.real(), a.imag() * b.imag(), a.real() * b.imag(), a.imag() * b.real()};
    return {products[0] - products[1], products[2] + products[3]};
  };
  const std::complex<T> factor(static_cast<T>(kFactor), static_cast<T>(kImaginaryFactor));
  const auto prepare = [&](std::complex<T> value) {
    return op == ReduceOp::kPremulSum ? multiply(value, factor) : value;
  };
  std::complex<T> result = prepare(values[0]);
  for (size_t i = 1; i < values.size(); ++i) {
    result = op == ReduceOp::kProduct ? multiply(result, values[i]) : result + prepare(values[i]);
  }
  if (op == ReduceOp::kAverage) return {result.real() / T(kFactor), result.imag() / T(kFactor)};
  return result;
}

template <class T>
std::vector<T> elements(const std::vector<Bytes>& sources, int64_t index) {
  std::vector<T> values;
  for (const Bytes& source : sources) values.push_back(element<T>(source, index));
  return values;
}

void append_half(Bytes& result, const std::vector<Bytes>& sources, int64_t index, ReduceOp op, Half format) {
  std::vector<float> values;
  for (const Bytes& source : sources) {
    values.push_back(static_cast<float>(half_to_double(element<uint16_t>(source, index), format)));
  }
  append(result, double_to_half(reduce_floats(values, op), format));
}

Bytes reference(const std::vector<Bytes>& sources, DType dtype, ReduceOp op) {
  Bytes result;
  const int64_t numel = sources[0].size() / element_bytes(dtype);
  for (int64_t i = 0; i < numel; ++i) {
    switch (dtype) {
      case DType::kUInt8:
        append(result, reduce_integers(elements<uint8_t>(sources, i), op));
        break;
      case DType::kInt8:
        append(result, reduce_integers(elements<int8_t>(sources, i), op));
        break;
      case DType::kInt16:
        append(result, reduce_integers(elements<int16_t>(sources, i), op));
        break;
      case DType::kInt32:
        append(result, reduce_integers(elements<int32_t>(sources, i), op));
        break;
      case DType::kInt64:
        append(result, reduce_integers(elements<int64_t>(sources, i), op));
        break;
      case DType::kFloat16:
        append_half(result, sources, i, op, kFloat16Format);
        break;
      case DType::kBFloat16:
        append_half(result, sources, i, op, kBFloat16Format);
        break;
      case DType::kFloat32:
        append(result, reduce_floats(elements<float>(sources, i), op));
        break;
      case DType::kFloat64:
        append(result, reduce_floats(elements<double>(sources, i), op));
        break;
      case DType::kBool:
        append<uint8_t>(result, reduce_bools(elements<uint8_t>(sources, i), op));
        break;
      case DType::kComplex64:
        append(result, reduce_complex(elements<std::complex<float>>(sources, i), op));
        break;
      case DType::kComplex128:
        append(result, reduce_complex(elements<std::complex<double>>(sources, i), op));
        break;
    }
  }
  return result;
}

// --- Inputs: ordinary numbers, or any bit pattern (NaN, infinities and subnormal numbers among them).

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }
Half format_of(DType dtype) { return dtype == DType::kFloat16 ? kFloat16Format : kBFloat16Format; }
bool is_single(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kComplex64; }
bool is_double(DType dtype) { return dtype == DType::kFloat64 || dtype == DType::kComplex128; }

Bytes ordinary(std::mt19937_64& random, DType dtype, int64_t numel) {
  std::normal_distribution<double> normal(0, 3);
  Bytes tensor;
  const auto bytes = static_cast<size_t>(numel * element_bytes(dtype));
  while (tensor.size() < bytes) {
    if (is_half(dtype)) {
      append(tensor, double_to_half(normal(random), format_of(dtype)));
    } else if (is_single(dtype)) {
      append(tensor, static_cast<float>(normal(random)));
    } else if (is_double(dtype)) {
      append(tensor, normal(random));
    } else {
      append(tensor, static_cast<uint8_t>(dtype == DType::kBool ? random() % 3 : random()));
    }
  }
  return tensor;
}

Bytes any_bits(std::mt19937_64& random, DType dtype, int64_t numel) {
  Bytes tensor;
  for (int64_t i = 0; i < numel * element_bytes(dtype); ++i) append(tensor, static_cast<uint8_t>(random() >> 13));
  return tensor;
}

// NaN is one value here: which of its bit patterns comes out is not promised.
bool same_number(const Bytes& a, const Bytes& b, DType dtype, int64_t offset) {
  const auto equal = [&](auto zero, auto is_nan) {
    decltype(zero) x{};
    decltype(zero) y{};
    std::memcpy(&x, a.data() + offset, sizeof x);
    std::memcpy(&y, b.data() + offset, sizeof y);
    return std::memcmp(&x, &y, sizeof x) == 0 || (is_nan(x) && is_nan(y));
  };
  if (is_half(dtype)) {
    return equal(uint16_t{}, [&](uint16_t bits) { return std::isnan(half_to_double(bits, format_of(dtype))); });
  }
  if (is_single(dtype)) return equal(float{}, [](float value) { return std::isnan(value); });
  if (is_double(dtype)) return equal(double{}, [](double value) { return std::isnan(value); });
  return equal(uint8_t{}, [](uint8_t) { return false; });
}

void expect_same(const Bytes& actual, const Bytes& wanted, DType dtype, const std::string& what) {
  ASSERT_EQ(actual.size(), wanted.size());
  const int64_t step = is_half(dtype) ? 2 : is_single(dtype) ? 4 : is_double(dtype) ? 8 : 1;
  for (int64_t offset = 0; offset < static_cast<int64_t>(actual.size()); offset += step) {
    ASSERT_TRUE(same_number(actual, wanted, dtype, offset)) << what << ", byte " << offset;
  }
}

std::complex<double> factor_of(DType dtype, ReduceOp op) {
  const bool is_integer = !is_half(dtype) && !is_single(dtype) && !is_double(dtype);
  return is_integer && op == ReduceOp::kAverage ? kRanks : std::complex<double>{kFactor, kImaginaryFactor};
}

Bytes run_kernel(const InstructionSet& set, const std::vector<Bytes>& sources, DType dtype, ReduceOp op) {
  Bytes destination(sources[0].size());
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  set.kernel(dtype, op)({.destination = destination.data(),
                         .sources = pointers.data(),
                         .source_count = static_cast<int32_t>(sources.size()),
                         .numel = static_cast<int64_t>(destination.size()) / element_bytes(dtype),
                         .factor = factor_of(dtype, op).real(),
                         .factor_imaginary = factor_of(dtype, op).imag()});
  return destination;
}

void for_each_pair(const std::function<void(DType, ReduceOp, const std::string&)>& function) {
  for (const DType dtype : all_dtypes()) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      const auto reduce_op = static_cast<ReduceOp>(op);
      if (!is_supported(dtype, reduce_op)) continue;
      function(dtype, reduce_op, std::string(dtype_name(dtype)) + " " + reduce_op_name(reduce_op));
    }
  }
}

using Fill = Bytes (*)(std::mt19937_64&, DType, int64_t);

void compare_with_reference(Fill fill, const std::vector<int64_t>& numels, const std::vector<int>& source_counts) {
  std::mt19937_64 random(7);
  for_each_pair([&](DType dtype, ReduceOp op, const std::string& name) {
    for (const int64_t numel : numels) {
      for (const int source_count : source_counts) {
        std::vector<Bytes> sources;
        for (int i = 0; i < source_count; ++i) sources.push_back(fill(random, dtype, numel));
        const Bytes wanted = reference(sources, dtype, op);
        for (const InstructionSet& set : usable_instruction_sets()) {
          expect_same(
              run_kernel(set, sources, dtype, op), wanted, dtype,
              name + " " + set.name + " numel " + std::to_string(numel) + " sources " + std::to_string(source_count));
        }
      }
    }
  });
}

TEST(ReduceTest, MatchesTheReferenceOnOrdinaryNumbers) {
  compare_with_reference(ordinary, {0, 1, 2, 3, 7, 16, 31, 65, 100}, {1, 2, 3, 4, 5, 8, 17});
}

TEST(ReduceTest, MatchesTheReferenceOnAnyBits) { compare_with_reference(any_bits, {257}, {1, 2, 3, 8}); }

TEST(ReduceTest, MatchesTheReferenceAcrossBlocks) { compare_with_reference(ordinary, {1023, 1025, 3333}, {2, 3}); }

TEST(ReduceTest, TakesUnalignedStartsAndLeavesNeighboursAlone) {
  std::mt19937_64 random(8);
  for_each_pair([&](DType dtype, ReduceOp op, const std::string& name) {
    const int64_t size = element_bytes(dtype);
    for (const int64_t start : {1, 3}) {
      const std::vector<Bytes> whole = {ordinary(random, dtype, 200), ordinary(random, dtype, 200),
                                        ordinary(random, dtype, 200)};
      std::vector<Bytes> parts;
      std::vector<const void*> pointers;
      for (const Bytes& source : whole) {
        parts.emplace_back(source.begin() + start * size, source.begin() + (start + 150) * size);
        pointers.push_back(source.data() + start * size);
      }
      Bytes destination(200 * size, std::byte{0x5a});
      reduce(destination.data() + start * size, pointers.data(), 3, 150, dtype, op, factor_of(dtype, op), true);
      Bytes wanted(200 * size, std::byte{0x5a});
      const Bytes reduced = reference(parts, dtype, op);
      std::copy(reduced.begin(), reduced.end(), wanted.begin() + start * size);
      expect_same(destination, wanted, dtype, name);
    }
  });
}

TEST(ReduceTest, MayWriteOverAnySource) {
  std::mt19937_64 random(9);
  for_each_pair([&](DType dtype, ReduceOp op, const std::string& name) {
    for (const int source_count : {1, 2, 4}) {
      for (int target = 0; target < source_count; ++target) {
        std::vector<Bytes> sources;
        for (int i = 0; i < source_count; ++i) sources.push_back(ordinary(random, dtype, 1100));
        const Bytes wanted = reference(sources, dtype, op);
        std::vector<const void*> pointers;
        for (const Bytes& source : sources) pointers.push_back(source.data());
        reduce(sources[target].data(), pointers.data(), source_count, 1100, dtype, op, factor_of(dtype, op), true);
        expect_same(sources[target], wanted, dtype, name + " over source " + std::to_string(target));
      }
    }
  });
}

Bytes run_accumulator_kernel(const InstructionSet& set, const std::vector<Bytes>& sources, DType dtype, ReduceOp op,
                             ReduceForm form) {
  const Widening times = widening(dtype, form);
  const int64_t size = element_bytes(dtype);
  const int64_t numel = static_cast<int64_t>(sources[0].size()) / (times.of_sources * size);
  Bytes destination(times.of_destination * size * numel);
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  set.accumulator_kernel(dtype, op, form)({.destination = destination.data(),
                                           .sources = pointers.data(),
                                           .source_count = static_cast<int32_t>(sources.size()),
                                           .numel = numel,
                                           .factor = kFactor});
  return destination;
}

void for_each_half_and_set(const std::function<void(DType, ReduceOp, const InstructionSet&)>& function) {
  for_each_pair([&](DType dtype, ReduceOp op, const std::string&) {
    for (const InstructionSet& set : usable_instruction_sets()) {
      if (is_half(dtype) && set.accumulator_kernel != nullptr) function(dtype, op, set);
    }
  });
}

TEST(ReduceTest, AccumulatesSixteenBitFloatsUnroundedAndRoundsWhatWasAccumulated) {
  std::mt19937_64 random(10);
  for_each_half_and_set([&](DType dtype, ReduceOp op, const InstructionSet& set) {
    for (const int64_t numel : {0, 1, 15, 17, 100, 1025, 2500}) {
      for (const int source_count : {1, 2, 3, 5}) {
        std::vector<Bytes> halves;
        std::vector<Bytes> floats;
        for (int i = 0; i < source_count; ++i) {
          halves.push_back(ordinary(random, dtype, numel));
          floats.push_back(ordinary(random, DType::kFloat32, numel));
        }
        Bytes accumulated;
        Bytes rounded;
        for (int64_t i = 0; i < numel; ++i) {
          std::vector<float> values;
          for (const Bytes& source : halves) {
            values.push_back(static_cast<float>(half_to_double(element<uint16_t>(source, i), format_of(dtype))));
          }
          append(accumulated, reduce_floats(values, op));
          append(rounded, double_to_half(reduce_floats(elements<float>(floats, i), op), format_of(dtype)));
        }
        const std::string what = std::string(dtype_name(dtype)) + " " + reduce_op_name(op) + " " + set.name;
        expect_same(run_accumulator_kernel(set, halves, dtype, op, ReduceForm::kToAccumulators), accumulated,
                    DType::kFloat32, what);
        expect_same(run_accumulator_kernel(set, floats, dtype, op, ReduceForm::kFromAccumulators), rounded, dtype,
                    what);
      }
    }
  });
}

TEST(ReduceTest, TwoStepsOverAccumulatorsAreOneStep) {
  std::mt19937_64 random(11);
  for_each_half_and_set([&](DType dtype, ReduceOp op, const InstructionSet& set) {
    const std::vector<Bytes> sources{any_bits(random, dtype, 999), any_bits(random, dtype, 999),
                                     any_bits(random, dtype, 999)};
    // The first step of an average sums only; the second one multiplies no more.
    const ReduceOp first = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
    const Bytes partial = run_accumulator_kernel(set, sources, dtype, first, ReduceForm::kToAccumulators);
    const Bytes result =
        run_accumulator_kernel(set, {partial}, dtype, op_over_partial_results(op), ReduceForm::kFromAccumulators);
    expect_same(result, reference(sources, dtype, op), dtype, set.name);
  });
}

TEST(ReduceTest, OtherDtypesAreTheirOwnAccumulators) {
  for_each_pair([](DType dtype, ReduceOp op, const std::string& name) {
    if (is_half(dtype)) return;
    std::mt19937_64 random(12);
    const std::vector<Bytes> sources{ordinary(random, dtype, 50), ordinary(random, dtype, 50)};
    const void* pointers[] = {sources[0].data(), sources[1].data()};
    for (const ReduceForm form : {ReduceForm::kToAccumulators, ReduceForm::kFromAccumulators}) {
      Bytes result(sources[0].size());
      reduce(result.data(), pointers, 2, 50, dtype, op, factor_of(dtype, op), true, form);
      expect_same(result, reference(sources, dtype, op), dtype, name);
    }
  });
}

// Each small source alone is 3/8 of the last bit of one and would be rounded away; together they round up.
TEST(ReduceTest, RoundsSixteenBitFloatsOnce) {
  const uint16_t one = 0x3f80;
  const uint16_t small = 0x3b40;  // 3 * 2^-10
  const void* sources[] = {&one, &small, &small};
  uint16_t result = 0;
  reduce(&result, sources, 3, 1, DType::kBFloat16, ReduceOp::kSum, 1, true);
  EXPECT_EQ(result, 0x3f81);
}

TEST(ReduceTest, AverageDividesOnlyWhereTheResultIsFinal) {
  const std::vector<float> a(100, 1);
  const std::vector<float> b(100, 2);
  const void* sources[] = {a.data(), b.data()};
  std::vector<float> result(100);
  reduce(result.data(), sources, 2, 100, DType::kFloat32, ReduceOp::kAverage, 3, false);
  EXPECT_EQ(result, std::vector<float>(100, 3));
  reduce(result.data(), sources, 2, 100, DType::kFloat32, ReduceOp::kAverage, 3, true);
  EXPECT_EQ(result, std::vector<float>(100, 1));
}

void set_flushing(bool is_on) {
#if defined(__x86_64__)
  constexpr uint32_t kFlush = 0x8040;
  __builtin_ia32_ldmxcsr(is_on ? __builtin_ia32_stmxcsr() | kFlush : __builtin_ia32_stmxcsr() & ~kFlush);
#elif defined(__aarch64__)
  constexpr uint64_t kFlush = 1 << 24;
  uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" ::"r"(is_on ? control | kFlush : control & ~kFlush));
#endif
}

TEST(ReduceTest, DoesNotDependOnTheRulesOfTheThread) {
  constexpr size_t kCount = 101;
  const std::vector<float> inexact(kCount, 1.1F);
  const std::vector<float> subnormal(kCount, 1e-40F);
  for (const auto* input : {&inexact, &subnormal}) {
    const void* sources[] = {input->data(), input->data(), input->data()};
    const auto sum = [&] {
      std::vector<float> result(kCount);
      reduce(result.data(), sources, 3, kCount, DType::kFloat32, ReduceOp::kSum, 1, true);
      return std::bit_cast<uint32_t>(result.back());
    };
    const uint32_t expected = sum();
    set_flushing(true);
    std::fesetround(FE_UPWARD);
    const uint32_t under_other_rules = sum();
    volatile float least = 1e-40F;
    const bool flushes_still = least * 2 == 0;
    const int rounding = std::fegetround();
    std::fesetround(FE_TONEAREST);
    set_flushing(false);
    EXPECT_EQ(under_other_rules, expected);
    EXPECT_TRUE(flushes_still);
    EXPECT_EQ(rounding, FE_UPWARD);
  }
}

TEST(ReduceTest, SupportsWhatAnOperationMeans) {
  for (const DType dtype : all_dtypes()) {
    const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const bool is_float = is_half(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
    const bool is_divisible = is_float || is_complex;
    EXPECT_TRUE(is_supported(dtype, ReduceOp::kSum));
    EXPECT_TRUE(is_supported(dtype, ReduceOp::kProduct));
    EXPECT_EQ(is_supported(dtype, ReduceOp::kMin), !is_complex);
    EXPECT_EQ(is_supported(dtype, ReduceOp::kMax), !is_complex);
    EXPECT_EQ(is_supported(dtype, ReduceOp::kAverage), dtype != DType::kBool);
    EXPECT_EQ(is_supported(dtype, ReduceOp::kPremulSum), is_divisible);
    EXPECT_EQ(is_supported(dtype, ReduceOp::kBitXor), !is_divisible);
  }
}

TEST(ReduceTest, AnUnsupportedPairIsAnErrorThatNamesIt) {
  const int32_t value = 1;
  const void* sources[] = {&value};
  int32_t result = 0;
  try {
    reduce(&result, sources, 1, 1, DType::kInt32, ReduceOp::kPremulSum, 2, true);
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("premul_sum over 1 sources of int32"), std::string::npos) << error.what();
  }
  EXPECT_THROW(reduce(&result, sources, 0, 1, DType::kInt32, ReduceOp::kSum, 1, true), std::invalid_argument);
}

// All 65536 halves through a product with one: widening and narrowing are inverse, on every instruction set.
TEST(ReduceTest, KeepsEveryHalfValue) {
  Bytes every;
  Bytes ones;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    every.clear();
    ones.clear();
    for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
      append(every, static_cast<uint16_t>(bits));
      append(ones, double_to_half(1, format_of(dtype)));
    }
    for (const InstructionSet& set : usable_instruction_sets()) {
      expect_same(run_kernel(set, {every, ones}, dtype, ReduceOp::kProduct), every, dtype, set.name);
    }
  }
}

}  // namespace
}  // namespace zeropg
