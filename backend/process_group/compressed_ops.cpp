// Collectives whose bytes travel encoded: what c10d has no call for.
#include <limits>

#include "backend/process_group/process_group.h"
#include "compression/error_feedback.h"

namespace zeropg {

namespace {

// What codecs take: 16-bit tensors are widened when their call runs, and rounded once when it ends.
constexpr at::ScalarType kEncoded = at::ScalarType::Float;

bool is_encodable(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return dtype == at::ScalarType::Float || dtype == at::ScalarType::Half || dtype == at::ScalarType::BFloat16;
}

void check_encodable(const Call& call, const at::Tensor& tensor) {
  call.check_type(is_encodable(tensor), "the tensor is ", tensor.scalar_type(),
                  ", expected float32, float16 or bfloat16, which are what codecs encode; use the uncompressed "
                  "operation.");
}

CollectiveArgs compressed_request(const Call& call, OpKind op, const at::Tensor& input, const at::Tensor& output,
                                  const c10d::ReduceOp& reduce_op, Compression compression) {
  const ScaledReduceOp reduction = call.reduction(reduce_op, output.scalar_type());
  call.check_value(reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage, "got ",
                   reduce_op_name(reduction.op), ", expected sum or avg: other operations do not survive rounding.");
  call.check_value(compression.codec != nullptr, "got no codec; use the uncompressed operation.");
  if (compression.residuals != nullptr) {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    int64_t numel = 0;
    for (const ResidualRange& range : compression.ranges) {
      call.check_value(range.numel >= 0 && range.start >= 0, "a range of residuals has start ", range.start, " and ",
                       range.numel, " elements, expected neither below 0.");
      call.check_value(range.numel <= input.numel() - numel && range.start <= kMost - range.numel,
                       "a range of residuals has start ", range.start, " and ", range.numel,
                       " elements, expected all ranges to have those of the input: ", input.numel(), ".");
      numel += range.numel;
    }
    call.check_value(numel == input.numel(), "the ranges of residuals have ", numel,
                     " elements, expected those of the ", "input: ", input.numel(), ".");
  }
  CollectiveArgs request;
  request.op = op;
  request.inputs = {input};
  request.outputs = {output};
  request.dtype = output.scalar_type();
  request.reduce_op = reduction.op;
  request.factor = reduction.factor;
  request.bytes = output.numel() * static_cast<int64_t>(output.element_size());
  request.compression = std::move(compression);
  return request;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::compressed_all_reduce(const at::Tensor& tensor,
                                                                       Compression compression,
                                                                       const c10d::ReduceOp& op, bool is_asynchronous) {
  Call call = make_call("zeropg:compressed_all_reduce");
  check_encodable(call, call.only({tensor}, "input"));
  const at::Tensor data = call.in_place(tensor, kEncoded);
  call.add(compressed_request(call, OpKind::kAllReduce, data, data, op, std::move(compression)));
  return submit(std::move(call), c10d::OpType::ALLREDUCE, c10d::kUnsetTimeout, is_asynchronous);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::compressed_reduce_scatter(const at::Tensor& output,
                                                                           const at::Tensor& input,
                                                                           Compression compression,
                                                                           const c10d::ReduceOp& op,
                                                                           bool is_asynchronous) {
  Call call = make_call("zeropg:compressed_reduce_scatter");
  check_encodable(call, call.only({input}, "input"));
  call.check_same_dtype(input, output);
  call.check_blocks(input, output, "input");
  call.add(compressed_request(call, OpKind::kReduceScatter, call.input(input, kEncoded), call.output(output, kEncoded),
                              op, std::move(compression)));
  return submit(std::move(call), c10d::OpType::_REDUCE_SCATTER_BASE, c10d::kUnsetTimeout, is_asynchronous);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::compressed_all_gather(const at::Tensor& output,
                                                                       const at::Tensor& input, Compression compression,
                                                                       bool is_asynchronous, uint64_t item,
                                                                       std::shared_ptr<NodeOutput> node_output) {
  Call call = make_call("zeropg:compressed_all_gather");
  check_encodable(call, call.only({input}, "input"));
  call.check_same_dtype(input, output);
  call.check_blocks(output, input, "output");
  call.check_value(compression.codec != nullptr, "got no codec; use the uncompressed operation.");
  call.check_type(node_output == nullptr || output.scalar_type() == kEncoded, "the output that the ranks of a node ",
                  "share is ", output.scalar_type(), ", expected float32, which is what codecs decode to.");
  CollectiveArgs request;
  request.op = OpKind::kAllGather;
  request.inputs = {call.input(input, kEncoded)};
  request.outputs = {call.output(output, kEncoded)};
  request.dtype = kEncoded;
  request.bytes = input.numel() * static_cast<int64_t>(sizeof(float));
  request.item = item;
  request.node_output = std::move(node_output);
  request.compression = std::move(compression);
  call.add(std::move(request));
  return submit(std::move(call), c10d::OpType::_ALLGATHER_BASE, c10d::kUnsetTimeout, is_asynchronous);
}

}  // namespace zeropg
