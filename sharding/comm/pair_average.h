// A slice's average over two ranks of a backend that has no reduce-scatter of its own: each sends the other the slice
// that it wants, half of what an all-reduce sends, and adds. The bits are those of an all-reduce: a sum of two has no
// order.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace zeropg {

// Complete as soon as waiting for it would not wait for the other rank.
class PairAverage final : public c10d::Work {
 public:
  // Begins it. `part` [n] <- this rank's slice of the average of both ranks' `whole` [2 * n]; both stay as they are
  // until the end. `op`: AVG; or SUM, where both have halved their `whole` before. CPU tensors of one dtype. Collective
  // in `group`, of two ranks.
  PairAverage(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Tensor part, const at::Tensor& whole,
              c10d::ReduceOp::RedOpType op);

  bool isCompleted() override { return exchange_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  at::Tensor part_;
  at::Tensor own_;
  const c10d::ReduceOp::RedOpType op_;
  c10::intrusive_ptr<c10d::Work> exchange_;
  bool is_added_ = false;
};

}  // namespace zeropg
