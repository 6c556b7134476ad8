// Messages between two ranks: each override checks its arguments and says what goes where.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

c10::intrusive_ptr<Work> ProcessGroupZero::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return coalesce_message([&] {
    if (auto* inner = inner_for(tensors)) {
      return inner->send(tensors, destination, tag);
    }
    Call call = make_call("zeropg:send");
    const int32_t peer = call.root(destination);
    const at::Tensor data = call.message(call.only(tensors, "input"), {.is_send = true, .peer = peer, .tag = tag});
    return post(std::move(call), OpType::SEND, data);
  });
}

c10::intrusive_ptr<Work> ProcessGroupZero::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return coalesce_message([&] {
    if (auto* inner = inner_for(tensors)) {
      return inner->recv(tensors, source, tag);
    }
    Call call = make_call("zeropg:recv");
    const int32_t peer = call.root(source);
    const at::Tensor data = call.message(call.only(tensors, "output"), {.peer = peer, .tag = tag});
    return post(std::move(call), OpType::RECV, data);
  });
}

c10::intrusive_ptr<Work> ProcessGroupZero::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return coalesce_message([&] {
    if (auto* inner = inner_for(tensors)) {
      return inner->recvAnysource(tensors, tag);
    }
    Call call = make_call("zeropg:recvAnySource");
    const at::Tensor data = call.message(call.only(tensors, "output"), {.peer = MessageRoute::kAnySource, .tag = tag});
    return post(std::move(call), OpType::RECVANYSOURCE, data);
  });
}

}  // namespace zeropg
