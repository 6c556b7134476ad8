// Global gradient norms that are the same bits on every rank and in every stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zeropg {

// Contribution of one slice to a norm: the sum of |x|^p (fp64), or the maximum for p = infinity. Summed over fixed
// blocks of 4096 elements in order, so the result does not depend on threads or alignment. CPU and CUDA tensors.
double norm_contribution(const at::Tensor& gradient, double norm_type);

// The norm from every slice's contribution, in slice order.
double combine_norms(const std::vector<double>& contributions, double norm_type);

}  // namespace zeropg
