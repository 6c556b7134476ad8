// Broadcast, gathers, scatter and all-to-all: each override checks its arguments and says what is to be moved where.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

namespace {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr OpType kGatherCoalesced = OpType::ALLGATHER_INTO_TENSOR_COALESCED;
#else
constexpr OpType kGatherCoalesced = OpType::COALESCED;
#endif

CollectiveArgs move_request(OpKind op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                            const at::Tensor& block) {
  CollectiveArgs request;
  request.op = op;
  request.inputs = std::move(inputs);
  request.outputs = std::move(outputs);
  request.dtype = block.scalar_type();
  request.bytes = block.numel() * static_cast<int64_t>(block.element_size());
  return request;
}

CollectiveArgs gather_request(Call& call, const at::Tensor& output, const at::Tensor& input) {
  call.only({input}, "input");
  call.check_same_dtype(input, output);
  call.check_blocks(output, input, "output");
  return move_request(OpKind::kAllGather, {call.input(input)}, {call.output(output)}, input);
}

}  // namespace

c10::intrusive_ptr<Work> ProcessGroupZero::broadcast(std::vector<at::Tensor>& tensors,
                                                     const c10d::BroadcastOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->broadcast(tensors, opts);
  }
  Call call = make_call("zeropg:broadcast");
  const at::Tensor data = call.in_place(call.only(tensors, "input"));
  CollectiveArgs request = move_request(OpKind::kBroadcast, {data}, {data}, data);
  request.root = call.root(opts.rootRank);
  call.add(std::move(request));
  return submit(std::move(call), OpType::BROADCAST, opts.timeout, opts.asyncOp);
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
  CollectiveArgs request = move_request(OpKind::kAllGather, {call.input(input)}, call.outputs(list), input);
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
  call.add(gather_request(call, output, input));
  return submit(std::move(call), OpType::_ALLGATHER_BASE, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::all_gather_item(const at::Tensor& output, const at::Tensor& input,
                                                           uint64_t item, std::shared_ptr<NodeOutput> node_output) {
  Call call = make_call("zeropg:all_gather_into_tensor");
  CollectiveArgs request = gather_request(call, output, input);
  request.item = item;
  request.node_output = std::move(node_output);
  call.add(std::move(request));
  return submit(std::move(call), OpType::_ALLGATHER_BASE, c10d::kUnsetTimeout, /*asyncOp=*/true);
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
    CollectiveArgs request = move_request(OpKind::kAllGather, {call.input(inputs[i])}, call.outputs(list), inputs[i]);
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
    call.check_blocks(outputs[i], inputs[i], "output");
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
  CollectiveArgs request = move_request(OpKind::kGather, {call.input(input)}, call.outputs(list), input);
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
    call.check_blocks(output, input, "output");
    outputs = {call.output(output)};
  }
  CollectiveArgs request = move_request(OpKind::kGather, {call.input(input)}, std::move(outputs), input);
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
  CollectiveArgs request = move_request(OpKind::kScatter, call.inputs(list), {call.output(output)}, output);
  request.root = root;
  request.input_is_list = true;
  call.add(std::move(request));
  return submit(std::move(call), OpType::SCATTER, opts.timeout, opts.asyncOp);
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
  CollectiveArgs request;
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
  CollectiveArgs request;
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

}  // namespace zeropg
