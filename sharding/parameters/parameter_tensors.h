// A parameter as the program has it, and the plain tensor whose memory it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>

namespace zeropg {

// What a parameter that torch has distributed over other ranks (a DTensor: tensor parallelism) needs of torch.
struct DistributedTensor {
  // The local part of a gradient of the parameter, [local sizes]. Redistributes it to the parameter's placements where
  // it has others, which communicates over the parameter's mesh.
  std::function<at::Tensor(const at::Tensor& gradient)> local_of;
  // A tensor of the parameter's kind and placements over `local` [local sizes], whose memory it shares.
  std::function<at::Tensor(const at::Tensor& local)> over;
};

struct ParameterTensors {
  at::Tensor parameter;  // its identity, gradient and requires_grad
  at::Tensor local;      // its memory: the parameter itself, or the part of a distributed one that this rank has
  std::shared_ptr<const DistributedTensor> distributed;  // null: `local` is `parameter`

  ParameterTensors(const at::Tensor& plain) : parameter(plain), local(plain) {}  // NOLINT(google-explicit-constructor)
  ParameterTensors(at::Tensor parameter, at::Tensor local, std::shared_ptr<const DistributedTensor> distributed)
      : parameter(std::move(parameter)), local(std::move(local)), distributed(std::move(distributed)) {}

  // Of a gradient of the parameter, or what stands for it, this rank's part, [local sizes]; may communicate.
  at::Tensor local_of(const at::Tensor& gradient) const {
    return distributed == nullptr ? gradient : distributed->local_of(gradient);
  }
  // What the program sees where `values` [local sizes] is this rank's part of a gradient.
  at::Tensor over(const at::Tensor& values) const {
    return distributed == nullptr ? values : distributed->over(values);
  }
};

}  // namespace zeropg
