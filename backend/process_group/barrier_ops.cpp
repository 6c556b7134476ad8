// Barriers.
#include "backend/bootstrap/store_client.h"
#include "backend/diagnostics/format_ranks.h"
#include "backend/platform/process/signal_check.h"
#include "backend/process_group/process_group.h"

namespace zeropg {

namespace {

constexpr std::chrono::seconds kStorePatience{10};

}  // namespace

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

// Between nodes a barrier meets its peers one after the other, and knows of one that is late. So each rank leaves a
// note in the store that it has come; who times out looks for the others'. A note stays until the next barrier: ranks
// may still look, and the store may be gone by the end. Without the store the barrier is one all the same.
void ProcessGroupZero::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  TORCH_CHECK_WITH(DistBackendError, opts.timeout.count() != 0, prefix(kMonitoredBarrierTitle), ": Rank ", rank_,
                   " timed out in monitoredBarrier after 0 ms, before it began; give it time.");
  if (group().topology().node_count() == 1) {
    run_barrier(kMonitoredBarrierTitle, 0, opts.timeout, /*is_asynchronous=*/false);
    return;
  }
  const uint64_t number = monitored_count_.fetch_add(1);
  const auto key_of = [&](uint64_t barrier, int rank) { return c10::str("zeropg/monitored/", barrier, "/", rank); };
  StoreClient store(store_, Clock::now() + kStorePatience, check_signals);
  const auto ask = [](const auto& question) {
    try {
      question();
    } catch (const c10::Error&) {  // not what a signal handler throws
    }
  };
  ask([&] {
    store.set(key_of(number, rank_), "");
    if (number > 0) store.remove(key_of(number - 1, rank_));
  });
  try {
    run_barrier(kMonitoredBarrierTitle, 0, opts.timeout, /*is_asynchronous=*/false);
  } catch (const c10::DistBackendError& error) {
    std::vector<int32_t> late;
    ask([&] {
      for (int rank = 0; rank < size_; ++rank) {
        if (!store.check({key_of(number, rank)})) late.push_back(rank);
      }
    });
    if (late.size() < 2) throw;  // the error names it
    std::string ranks = format_ranks(late);
    ranks[0] = 'R';
    C10_THROW_ERROR(DistBackendError,
                    c10::str(prefix(kMonitoredBarrierTitle), ": ", ranks, " failed to pass monitoredBarrier (",
                             error.what_without_backtrace(), ")"));
  }
}

}  // namespace zeropg
