#include "sharding/module/clip.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace zeropg {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kLanes = 8;

// Eight independent sums, folded in a fixed tree: vectorises without changing the order from run to run.
template <typename T, typename Term>
double block_sum(const T* data, int64_t numel, Term term) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += term(static_cast<double>(data[i + lane]));
    }
  }
  for (int64_t lane = 0; i < numel; ++i, ++lane) {
    lanes[lane] += term(static_cast<double>(data[i]));
  }
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

template <typename T, typename Term>
double blocked_sum(const T* data, int64_t numel, Term term) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  std::vector<double> sums(blocks);
  at::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      sums[block] = block_sum(data + block * kBlock, std::min(kBlock, numel - block * kBlock), term);
    }
  });
  double total = 0;
  for (double sum : sums) {
    total += sum;
  }
  return total;
}

template <typename T>
double maximum(const T* data, int64_t numel) {
  double largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const double magnitude = std::abs(static_cast<double>(data[i]));
    // Written so that NaN wins, as in torch.
    largest = magnitude > largest || std::isnan(magnitude) ? magnitude : largest;
  }
  return largest;
}

}  // namespace

double norm_contribution(const at::Tensor& gradient, double norm_type) {
  if (!gradient.is_cpu()) {
    const double norm = at::linalg_vector_norm(gradient, norm_type, std::nullopt, false, at::kDouble).item<double>();
    return std::isinf(norm_type) ? norm : std::pow(norm, norm_type);
  }
  double result = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gradient.scalar_type(), "norm_contribution", [&] {
    const auto* data = gradient.const_data_ptr<scalar_t>();
    const int64_t numel = gradient.numel();
    if (std::isinf(norm_type)) {
      result = maximum(data, numel);
    } else if (norm_type == 2.0) {
      result = blocked_sum(data, numel, [](double x) { return x * x; });
    } else {
      result = blocked_sum(data, numel, [norm_type](double x) { return std::pow(std::abs(x), norm_type); });
    }
  });
  return result;
}

double combine_norms(const std::vector<double>& contributions, double norm_type) {
  double total = 0;
  for (double contribution : contributions) {
    if (std::isinf(norm_type)) {
      total = contribution > total || std::isnan(contribution) ? contribution : total;
    } else {
      total += contribution;
    }
  }
  return std::isinf(norm_type) ? total : std::pow(total, 1.0 / norm_type);
}

}  // namespace zeropg
