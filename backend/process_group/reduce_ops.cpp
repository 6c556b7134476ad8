// All-reduce, reduce and reduce-scatter: each override checks its arguments and says what is to be reduced where.
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;
using c10d::Work;

namespace {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr OpType kReduceScatterCoalesced = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr OpType kReduceScatterCoalesced = OpType::COALESCED;
#endif

CollectiveArgs reduce_request(OpKind op, const at::Tensor& input, const at::Tensor& output,
                              const ScaledReduceOp& reduction, int64_t block_numel) {
  CollectiveArgs request;
  request.op = op;
  request.inputs = {input};
  request.outputs = {output};
  request.dtype = output.scalar_type();
  request.reduce_op = reduction.op;
  request.factor = reduction.factor;
  request.bytes = block_numel * static_cast<int64_t>(output.element_size());
  return request;
}

}  // namespace

c10::intrusive_ptr<Work> ProcessGroupZero::allreduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->allreduce(tensors, opts);
  }
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == c10::kSparse) {
    return allreduce_sparse(tensors, opts);  // c10d has an operation of its own for it only on CUDA
  }
  Call call = make_call("zeropg:all_reduce");
  const at::Tensor& tensor = call.only(tensors, "input");
  const ScaledReduceOp reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
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
    const ScaledReduceOp reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
    const at::Tensor data = call.in_place(tensor);
    call.add(reduce_request(OpKind::kAllReduce, data, data, reduction, data.numel()));
  }
  return submit(std::move(call), OpType::ALLREDUCE_COALESCED, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupZero::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->reduce(tensors, opts);
  }
  Call call = make_call("zeropg:reduce");
  const at::Tensor& tensor = call.only(tensors, "input");
  const ScaledReduceOp reduction = call.reduction(opts.reduceOp, tensor.scalar_type());
  const at::Tensor data = call.in_place(tensor);
  CollectiveArgs request = reduce_request(OpKind::kReduce, data, data, reduction, data.numel());
  request.root = call.root(opts.rootRank);
  call.add(std::move(request));
  return submit(std::move(call), OpType::REDUCE, opts.timeout, opts.asyncOp);
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
  const ScaledReduceOp reduction = call.reduction(opts.reduceOp, output.scalar_type());
  CollectiveArgs request =
      reduce_request(OpKind::kReduceScatter, output, call.output(output), reduction, output.numel());
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
  call.check_blocks(input, output, "input");
  const ScaledReduceOp reduction = call.reduction(opts.reduceOp, input.scalar_type());
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
    call.check_blocks(inputs[i], outputs[i], "input");
    const ScaledReduceOp reduction = call.reduction(opts.reduceOp, inputs[i].scalar_type());
    call.add(reduce_request(OpKind::kReduceScatter, call.input(inputs[i]), call.output(outputs[i]), reduction,
                            outputs[i].numel()));
  }
  return submit(std::move(call), kReduceScatterCoalesced, opts.timeout, opts.asyncOp);
}

}  // namespace zeropg
