// Barriers.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

c10::intrusive_ptr<Work> ProcessGroupZero::run_barrier(const char* title, int64_t bytes,
                                                       std::chrono::milliseconds timeout, bool is_asynchronous) {
  Call call = make_call(title);
  CollectiveArgs request;
  request.op = OpKind::kBarrier;
  request.bytes = bytes;
  call.add(std::move(request));
  return submit(std::move(call), OpType::BARRIER, timeout, is_asynchronous);
}

c10::intrusive_ptr<Work> ProcessGroupZero::barrier(const c10d::BarrierOptions& opts) {
  if (opts.device.has_value() && opts.device->is_cuda()) {
    return inner_for(*opts.device)->barrier(opts);
  }
  return run_barrier("zeropg:barrier", 0, opts.timeout, opts.asyncOp);
}

// Every rank names every late rank anyway, so there is nothing to collect on rank 0 as gloo does.
void ProcessGroupZero::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  TORCH_CHECK_WITH(DistBackendError, opts.timeout.count() != 0, prefix(kMonitoredBarrierTitle), ": Rank ", rank_,
                   " timed out in monitoredBarrier after 0 ms, before it began; give it time.");
  run_barrier(kMonitoredBarrierTitle, 0, opts.timeout, /*is_asynchronous=*/false);
}

}  // namespace zeropg
