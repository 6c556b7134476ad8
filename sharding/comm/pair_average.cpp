#include "sharding/comm/pair_average.h"

#include <ATen/core/grad_mode.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace zeropg {

PairAverage::PairAverage(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Tensor part, const at::Tensor& whole,
                         c10d::ReduceOp::RedOpType op)
    : part_(std::move(part)), own_(whole.narrow(0, group->getRank() * part_.numel(), part_.numel())), op_(op) {
  const int peer = 1 - group->getRank();
  std::vector<int64_t> sent(2, 0);
  sent[peer] = part_.numel();
  std::vector<int64_t> received = sent;
  at::Tensor of_peer = whole.narrow(0, peer * part_.numel(), part_.numel());
#if TORCH_VERSION_MINOR >= 15
  exchange_ = group->all_to_all_single(part_, of_peer, received, sent);
#else
  exchange_ = group->alltoall_base(part_, of_peer, received, sent);
#endif
}

bool PairAverage::wait(std::chrono::milliseconds timeout) {
  exchange_->wait(timeout);
  if (std::exchange(is_added_, true)) {
    return true;
  }
  at::NoGradGuard no_grad;
  constexpr int64_t kAtOnce = 64 << 10;  // stays in a core's cache from the sum to the division
  for (int64_t start = 0; start < part_.numel(); start += kAtOnce) {
    const int64_t count = std::min(kAtOnce, part_.numel() - start);
    at::Tensor sum = part_.narrow(0, start, count).add_(own_.narrow(0, start, count));
    if (op_ == c10d::ReduceOp::AVG) sum.div_(2);
  }
  own_.reset();
  return true;
}

}  // namespace zeropg
