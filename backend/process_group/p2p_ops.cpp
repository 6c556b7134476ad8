// Messages between two ranks.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

P2pMessage ProcessGroupZero::make_message(Call& call, const at::Tensor& tensor, bool is_send, int peer, int tag) {
  call.check_value(tag >= 0, "the tag is ", tag, ", expected 0 or more.");
  call.check_value(size_ > 1 && peer != rank_, "a rank cannot send to or receive from itself; copy the tensor.");
  call.set_route({.is_send = is_send, .peer = peer, .tag = tag});
  const at::Tensor data = is_send ? call.input(tensor) : call.output(tensor);
  CollectiveArgs request;
  (is_send ? request.inputs : request.outputs) = {data};
  request.bytes = static_cast<int64_t>(data.nbytes());
  call.add(std::move(request));
  const OpType type = is_send ? OpType::SEND : peer == P2pMessage::kAnySource ? OpType::RECVANYSOURCE : OpType::RECV;
  call.set_sequence(messages_.fetch_add(1) + 1);  // as of collectives, and as torch's flight recorder counts messages
  // A tensor that is guarded against writes can still be sent: a message that is sent is only read.
  void* address = is_send ? const_cast<void*>(data.const_data_ptr()) : data.mutable_data_ptr();
  auto work = make_work(call, type, c10d::kUnsetTimeout);
  work->copy_in();
  record_message(data, is_send, peer, *work);
  return P2pMessage{.work = std::move(work),
                    .data = static_cast<std::byte*>(address),
                    .bytes = static_cast<int64_t>(data.nbytes()),
                    .peer = peer,
                    .tag = tag,
                    .dtype = data.scalar_type()};
}

c10::intrusive_ptr<Work> ProcessGroupZero::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->send(tensors, destination, tag);
  }
  Call call = make_call("zeropg:send");
  P2pMessage message = make_message(call, call.only(tensors, "input"), /*is_send=*/true, call.root(destination), tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().send(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recv(tensors, source, tag);
  }
  Call call = make_call("zeropg:recv");
  P2pMessage message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, call.root(source), tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().receive(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recvAnysource(tensors, tag);
  }
  Call call = make_call("zeropg:recvAnySource");
  P2pMessage message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, P2pMessage::kAnySource, tag);
  c10::intrusive_ptr<Work> work = message.work;
  channels_->messages().receive(std::move(message));
  return coalesce(work);
}

}  // namespace zeropg
