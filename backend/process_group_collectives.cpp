// The operations of ProcessGroupZero: each override checks its arguments and says what is to be moved where.
#include "backend/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

namespace {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr OpType kGatherCoalesced = OpType::ALLGATHER_INTO_TENSOR_COALESCED;
constexpr OpType kReduceScatterCoalesced = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr OpType kGatherCoalesced = OpType::COALESCED;
constexpr OpType kReduceScatterCoalesced = OpType::COALESCED;
#endif

Request reduce_request(OpKind op, const at::Tensor& input, const at::Tensor& output, const Reduction& reduction,
                       int64_t block_numel) {
  Request request;
  request.op = op;
  request.inputs = {input};
  request.outputs = {output};
  request.dtype = output.scalar_type();
  request.reduce_op = reduction.op;
  request.factor = reduction.factor;
  request.bytes = block_numel * static_cast<int64_t>(output.element_size());
  return request;
}

Request move_request(OpKind op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                     const at::Tensor& block) {
  Request request;
  request.op = op;
  request.inputs = std::move(inputs);
  request.outputs = std::move(outputs);
  request.dtype = block.scalar_type();
  request.bytes = block.numel() * static_cast<int64_t>(block.element_size());
  return request;
}

}  // namespace

Call ProcessGroupZero::make_call(const char* title) {
  TORCH_CHECK_WITH(DistBackendError, group_->is_own_process(), "[zeropg rank ", rank_, "/", size_,
                   "] this process group belongs to the parent of this forked process; make a new one here.");
  return Call(OperationLabel{.rank = rank_, .world_size = size_, .title = title});
}

c10d::Backend* ProcessGroupZero::inner_for(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? nullptr : inner_for(tensors[0]);
}

c10d::Backend* ProcessGroupZero::inner_for(const at::Tensor& tensor) {
  return tensor.defined() ? inner_for(tensor.device()) : nullptr;
}

c10::intrusive_ptr<ZeroWork> ProcessGroupZero::make_work(Call& call, OpType type, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    timeout = std::chrono::milliseconds(timeout_ms_.load());
  }
  return c10::make_intrusive<ZeroWork>(call.label(), type, call.take_tensors(), timeout, callbacks_,
                                       [group = group_] { return group->who_is_late(); });
}

c10::intrusive_ptr<Work> ProcessGroupZero::submit(Call call, OpType type, std::chrono::milliseconds timeout,
                                                  bool is_asynchronous) {
  call.set_sequence(sequence_.fetch_add(1) + 1);  // not before: a call whose arguments are refused must not count
  auto job = std::make_unique<CollectiveJob>();
  for (const Request& request : call.requests()) {
    job->collectives.push_back(planner_.plan(request));
  }
  auto work = make_work(call, type, timeout);
  job->work = work;
  call.requests().clear();
  collectives_.submit(std::move(job), !is_asynchronous);
  if (!is_asynchronous) {
    work->wait();
  }
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::allreduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->allreduce(tensors, opts);
  }
  Call call = make_call("zeropg:all_reduce");
  const at::Tensor& tensor = call.only(tensors, "input");
  const Reduction reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
  const at::Tensor data = call.in_place(tensor);
  call.add(reduce_request(OpKind::kAllReduce, data, data, reduction, data.numel()));
  return submit(std::move(call), OpType::ALLREDUCE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                               const c10d::AllreduceCoalescedOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->allreduce_coalesced(tensors, opts);
  }
  Call call = make_call("zeropg:all_reduce_coalesced");
  for (const at::Tensor& tensor : tensors) {
    call.only({tensor}, "input");
    const Reduction reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
    const at::Tensor data = call.in_place(tensor);
    call.add(reduce_request(OpKind::kAllReduce, data, data, reduction, data.numel()));
  }
  return submit(std::move(call), OpType::ALLREDUCE_COALESCED, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::broadcast(std::vector<at::Tensor>& tensors,
                                                     const c10d::BroadcastOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->broadcast(tensors, opts);
  }
  Call call = make_call("zeropg:broadcast");
  const at::Tensor data = call.in_place(call.only(tensors, "input"));
  Request request = move_request(OpKind::kBroadcast, {data}, {data}, data);
  request.root = call.root(opts.rootRank);
  call.add(std::move(request));
  return submit(std::move(call), OpType::BROADCAST, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->reduce(tensors, opts);
  }
  Call call = make_call("zeropg:reduce");
  const at::Tensor& tensor = call.only(tensors, "input");
  const Reduction reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
  const at::Tensor data = call.in_place(tensor);
  Request request = reduce_request(OpKind::kReduce, data, data, reduction, data.numel());
  request.root = call.root(opts.rootRank);
  call.add(std::move(request));
  return submit(std::move(call), OpType::REDUCE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->allgather(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:all_gather");
  const at::Tensor& input = call.only(inputs, "input");
  const std::vector<at::Tensor>& list = call.only(outputs, "output");
  call.check_list(list, input, "output");
  Request request = move_request(OpKind::kAllGather, {call.input(input)}, call.outputs(list), input);
  request.output_is_list = true;
  call.add(std::move(request));
  return submit(std::move(call), OpType::ALLGATHER, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& opts) {
  if (auto* inner = inner_for(input)) {
    return inner->_allgather_base(output, input, opts);
  }
  Call call = make_call("zeropg:all_gather_into_tensor");
  call.only({input}, "input");
  call.check_same_dtype(input, output);
  call.check_numel(output, input.numel() * size_, "output");
  call.add(move_request(OpKind::kAllGather, {call.input(input)}, {call.output(output)}, input));
  return submit(std::move(call), OpType::_ALLGATHER_BASE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                               std::vector<at::Tensor>& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->allgather_coalesced(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:all_gather_coalesced");
  // c10d's convention: outputs[rank][i] is what `rank` gave as inputs[i].
  call.check_value(outputs.size() == static_cast<size_t>(size_), "got ", outputs.size(),
                   " output lists, expected one per rank: ", size_, ".");
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.only({inputs[i]}, "input");
    std::vector<at::Tensor> list;
    for (const std::vector<at::Tensor>& of_rank : outputs) {
      call.check_value(of_rank.size() == inputs.size(), "an output list has ", of_rank.size(),
                       " tensors, expected one per input: ", inputs.size(), ".");
      list.push_back(of_rank[i]);
    }
    call.check_list(list, inputs[i], "output");
    Request request = move_request(OpKind::kAllGather, {call.input(inputs[i])}, call.outputs(list), inputs[i]);
    request.output_is_list = true;
    call.add(std::move(request));
  }
  return submit(std::move(call), OpType::ALLGATHER_COALESCED, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                           std::vector<at::Tensor>& inputs,
                                                                           const c10d::AllgatherOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:all_gather_into_tensor_coalesced");
  call.check_value(outputs.size() == inputs.size(), "got ", outputs.size(), " outputs for ", inputs.size(),
                   " inputs, expected as many.");
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.only({inputs[i]}, "input");
    call.check_same_dtype(inputs[i], outputs[i]);
    call.check_numel(outputs[i], inputs[i].numel() * size_, "output");
    call.add(move_request(OpKind::kAllGather, {call.input(inputs[i])}, {call.output(outputs[i])}, inputs[i]));
  }
  return submit(std::move(call), kGatherCoalesced, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                  std::vector<at::Tensor>& inputs, const c10d::GatherOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->gather(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:gather");
  const at::Tensor& input = call.only(inputs, "input");
  const int32_t root = call.root(opts.rootRank);
  std::vector<at::Tensor> list;
  if (rank_ == root) {
    list = call.only(outputs, "output");
    call.check_list(list, input, "output");
  } else {
    call.check_value(outputs.empty(), "got outputs on a rank that is not the root ", root, ", expected none.");
  }
  Request request = move_request(OpKind::kGather, {call.input(input)}, call.outputs(list), input);
  request.root = root;
  request.output_is_list = true;
  call.add(std::move(request));
  return submit(std::move(call), OpType::GATHER, opts.timeout, opts.asyncOp);
}

#ifdef C10D_BACKEND_HAS_HOOKS
c10::intrusive_ptr<Work> ProcessGroupZero::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  if (auto* inner = inner_for(input)) {
    return inner->gather_into_tensor(output, input, opts);
  }
  Call call = make_call("zeropg:gather_into_tensor");
  call.only({input}, "input");
  const int32_t root = call.root(opts.rootRank);
  std::vector<at::Tensor> outputs;
  if (rank_ == root) {
    call.check_same_dtype(input, output);
    call.check_numel(output, input.numel() * size_, "output");
    outputs = {call.output(output)};
  }
  Request request = move_request(OpKind::kGather, {call.input(input)}, std::move(outputs), input);
  request.root = root;
  call.add(std::move(request));
  return submit(std::move(call), OpType::GATHER, opts.timeout, opts.asyncOp);
}
#endif

c10::intrusive_ptr<Work> ProcessGroupZero::scatter(std::vector<at::Tensor>& outputs,
                                                   std::vector<std::vector<at::Tensor>>& inputs,
                                                   const c10d::ScatterOptions& opts) {
  if (auto* inner = inner_for(outputs)) {
    return inner->scatter(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:scatter");
  const at::Tensor& output = call.only(outputs, "output");
  const int32_t root = call.root(opts.rootRank);
  std::vector<at::Tensor> list;
  if (rank_ == root) {
    list = call.only(inputs, "input");
    call.check_list(list, output, "input");
  } else {
    call.check_value(inputs.empty(), "got inputs on a rank that is not the root ", root, ", expected none.");
  }
  Request request = move_request(OpKind::kScatter, call.inputs(list), {call.output(output)}, output);
  request.root = root;
  request.input_is_list = true;
  call.add(std::move(request));
  return submit(std::move(call), OpType::SCATTER, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                          std::vector<std::vector<at::Tensor>>& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  if (auto* inner = inner_for(outputs)) {
    return inner->reduce_scatter(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:reduce_scatter");
  const at::Tensor& output = call.only(outputs, "output");
  const std::vector<at::Tensor>& list = call.only(inputs, "input");
  call.check_list(list, output, "input");
  const Reduction reduction = call.reduction(opts.reduceOp, output.scalar_type());
  Request request = reduce_request(OpKind::kReduceScatter, output, call.output(output), reduction, output.numel());
  request.inputs = call.inputs(list);
  request.input_is_list = true;
  call.add(std::move(request));
  return submit(std::move(call), OpType::REDUCE_SCATTER, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  if (auto* inner = inner_for(input)) {
    return inner->_reduce_scatter_base(output, input, opts);
  }
  Call call = make_call("zeropg:reduce_scatter_tensor");
  call.only({input}, "input");
  call.check_same_dtype(input, output);
  call.check_numel(input, output.numel() * size_, "input");
  const Reduction reduction = call.reduction(opts.reduceOp, input.scalar_type());
  call.add(reduce_request(OpKind::kReduceScatter, call.input(input), call.output(output), reduction, output.numel()));
  return submit(std::move(call), OpType::_REDUCE_SCATTER_BASE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                           std::vector<at::Tensor>& inputs,
                                                                           const c10d::ReduceScatterOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:reduce_scatter_tensor_coalesced");
  call.check_value(outputs.size() == inputs.size(), "got ", outputs.size(), " outputs for ", inputs.size(),
                   " inputs, expected as many.");
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.only({inputs[i]}, "input");
    call.check_same_dtype(inputs[i], outputs[i]);
    call.check_numel(inputs[i], outputs[i].numel() * size_, "input");
    const Reduction reduction = call.reduction(opts.reduceOp, inputs[i].scalar_type());
    call.add(reduce_request(OpKind::kReduceScatter, call.input(inputs[i]), call.output(outputs[i]), reduction,
                            outputs[i].numel()));
  }
  return submit(std::move(call), kReduceScatterCoalesced, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                         std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits,
                                                         const c10d::AllToAllOptions& opts) {
  if (auto* inner = inner_for(input)) {
    return inner->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  Call call = make_call("zeropg:all_to_all_single");
  call.only({input}, "input");
  call.check_same_dtype(input, output);
  Request request;
  request.op = OpKind::kAllToAll;
  request.dtype = input.scalar_type();
  request.send_bytes = call.split_bytes(input, input_splits, "input");
  request.receive_bytes = call.split_bytes(output, output_splits, "output");
  request.inputs = {call.input(input)};
  request.outputs = {call.output(output)};
  call.add(std::move(request));
  return submit(std::move(call), OpType::ALLTOALL_BASE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                    const c10d::AllToAllOptions& opts) {
  if (auto* inner = inner_for(inputs)) {
    return inner->alltoall(outputs, inputs, opts);
  }
  Call call = make_call("zeropg:all_to_all");
  const auto world_size = static_cast<size_t>(size_);
  call.check_value(inputs.size() == world_size && outputs.size() == world_size, "got ", inputs.size(), " inputs and ",
                   outputs.size(), " outputs, expected one of each per rank: ", size_, ".");
  Request request;
  request.op = OpKind::kAllToAll;
  request.dtype = inputs[0].scalar_type();
  request.input_is_list = true;
  request.output_is_list = true;
  for (size_t peer = 0; peer < world_size; ++peer) {
    call.check_same_dtype(inputs[0], inputs[peer]);
    call.check_same_dtype(inputs[0], outputs[peer]);
    request.send_bytes.push_back(static_cast<int64_t>(inputs[peer].nbytes()));
    request.receive_bytes.push_back(static_cast<int64_t>(outputs[peer].nbytes()));
  }
  request.inputs = call.inputs(inputs);
  request.outputs = call.outputs(outputs);
  call.add(std::move(request));
  return submit(std::move(call), OpType::ALLTOALL, opts.timeout, opts.asyncOp);
}

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
  run_barrier("zeropg:monitored_barrier", 0, opts.timeout, /*is_asynchronous=*/false);
}

Message ProcessGroupZero::make_message(Call& call, const at::Tensor& tensor, bool is_send, int peer, int tag) {
  call.check_value(tag >= 0, "the tag is ", tag, ", expected 0 or more.");
  call.check_value(size_ > 1 && peer != rank_, "a rank cannot send to or receive from itself; copy the tensor.");
  const at::Tensor data = is_send ? call.input(tensor) : call.output(tensor);
  Request request;
  request.bytes = static_cast<int64_t>(data.nbytes());
  call.add(std::move(request));
  const OpType type = is_send ? OpType::SEND : peer == Message::kAnySource ? OpType::RECVANYSOURCE : OpType::RECV;
  // A tensor that is guarded against writes can still be sent: a message that is sent is only read.
  void* address = is_send ? const_cast<void*>(data.const_data_ptr()) : data.mutable_data_ptr();
  return Message{.work = make_work(call, type, c10d::kUnsetTimeout),
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
  messages_.send(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recv(tensors, source, tag);
  }
  Call call = make_call("zeropg:recv");
  Message message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, call.root(source), tag);
  c10::intrusive_ptr<Work> work = message.work;
  messages_.receive(std::move(message));
  return coalesce(work);
}

c10::intrusive_ptr<Work> ProcessGroupZero::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  if (auto* inner = inner_for(tensors)) {
    return inner->recvAnysource(tensors, tag);
  }
  Call call = make_call("zeropg:recv_any_source");
  Message message = make_message(call, call.only(tensors, "output"), /*is_send=*/false, Message::kAnySource, tag);
  c10::intrusive_ptr<Work> work = message.work;
  messages_.receive(std::move(message));
  return coalesce(work);
}

}  // namespace zeropg
