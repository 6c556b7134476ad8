// From a checked call to a running operation: its number, its work, and the channel that runs it.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

Call ProcessGroupZero::make_call(const char* title) {
  TORCH_CHECK_WITH(DistBackendError, group().is_own_process(), "[zeropg rank ", rank_, "/", size_,
                   "] this process group belongs to the parent of this forked process; make a new one here.");
  return Call(OperationLabel{.rank = rank_, .world_size = size_, .members = members_, .title = title});
}

c10::intrusive_ptr<ZeroWork> ProcessGroupZero::make_work(Call& call, OpType type, std::chrono::milliseconds timeout,
                                                         std::shared_ptr<OperationHost> host) {
  return c10::make_intrusive<ZeroWork>(call.label(), type, call.take_tensors(), timeouts_.next(timeout),
                                       std::move(host));
}

c10::intrusive_ptr<Work> ProcessGroupZero::submit(Call call, OpType type, std::chrono::milliseconds timeout,
                                                  bool is_asynchronous) {
  auto job = std::make_unique<CollectiveJob>();
  {
    const GroupContext::Use use(group());
    for (const CollectiveArgs& request : call.requests()) {
      job->collectives.push_back(planner_->plan(request));
    }
  }
  call.set_sequence(sequence_.fetch_add(1) + 1);  // not before: a call whose arguments are refused must not count
  auto work = make_work(call, type, timeout, channels_->collectives());
  job->work = work;
  if (recorder_) {
    record_collective(call.requests(), *work);
  }
  call.requests().clear();
  channels_->collectives()->submit(std::move(job), !is_asynchronous);
  if (!is_asynchronous) {
    work->wait();
  }
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::post(Call call, OpType type, const at::Tensor& data) {
  call.set_sequence(messages_.fetch_add(1) + 1);  // as of collectives, and as torch's flight recorder counts messages
  const MessageRoute route = *call.label().route;
  // A tensor that is guarded against writes can still be sent: a message that is sent is only read.
  void* address = route.is_send ? const_cast<void*>(data.const_data_ptr()) : data.mutable_data_ptr();
  auto work = make_work(call, type, c10d::kUnsetTimeout, channels_->messages());
  work->copy_in();
  if (recorder_) {
    record_message(data, *work);
  }
  channels_->messages()->post({.work = work,
                               .data = static_cast<std::byte*>(address),
                               .bytes = static_cast<int64_t>(data.nbytes()),
                               .route = route,
                               .dtype = data.scalar_type()});
  return coalesce(work);
}

}  // namespace zeropg
