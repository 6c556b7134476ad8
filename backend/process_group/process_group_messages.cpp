// Messages between two ranks, and barriers.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

c10::intrusive_ptr<Work> ProcessGroupZero::run_barrier(const char* title, int64_t bytes,
                                                       std::chrono::milliseconds timeout, bool is_asynchronous) {
  Call call = make_call(title);
  Request request;
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

Message ProcessGroupZero::make_message(Call& call, const at::Tensor& tensor, bool is_send, int peer, int tag) {
  call.check_value(tag >= 0, "the tag is ", tag, ", expected 0 or more.");
  call.check_value(size_ > 1 && peer != rank_, "a rank cannot send to or receive from itself; copy the tensor.");
  call.set_route({.is_send = is_send, .peer = peer, .tag = tag});
  const at::Tensor data = is_send ? call.input(tensor) : call.output(tensor);
  Request request;
  request.bytes = static_cast<int64_t>(data.nbytes());
  call.add(std::move(request));
  const OpType type = is_send ? OpType::SEND : peer == Message::kAnySource ? OpType::RECVANYSOURCE : OpType::RECV;
  call.set_sequence(messages_.fetch_add(1) + 1);  // as of collectives, and as torch's flight recorder counts messages
  // A tensor that is guarded against writes can still be sent: a message that is sent is only read.
  void* address = is_send ? const_cast<void*>(data.const_data_ptr()) : data.mutable_data_ptr();
  auto work = make_work(call, type, c10d::kUnsetTimeout);
  record_message(data, is_send, peer, *work);
  return Message{.work = std::move(work),
                 .data = static_cast<std::byte*>(address),
                 .bytes = static_cast<int64_t>(data.nbytes()),
                 .peer = peer,
                 .tag = tag};
}

c10::intrusive_ptr<Work> ProcessGroupZero::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->send(tensors, destination, tag);
  }
  Call call = make_call("zeropg:send");
  Message message = make_message(call, call.only(tensors, "input"), /*is_send=*/true, call.root(destination), tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().send(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recv(tensors, source, tag);
  }
  Call call = make_call("zeropg:recv");
  Message message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, call.root(source), tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().receive(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recvAnysource(tensors, tag);
  }
  Call call = make_call("zeropg:recvAnySource");
  Message message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, Message::kAnySource, tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().receive(std::move(message));
  return coalesce(work);
}

}  // namespace zeropg
