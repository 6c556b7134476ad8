// All-reduce of sparse tensors.
//
// Each rank has indices of its own, so the sum is made of everybody's: the sizes are gathered first, then indices and
// values, padded to the longest, and every rank adds them up in rank order (as gloo does). What follows depends on the
// sizes, so the call waits; the order of the group's operations stays that of the calls.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "backend/platform/cpu/ieee_arithmetic.h"
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::OpType;

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                                  const c10d::AllreduceOptions& opts) {
  if (auto* inner = inner_for(tensors)) {
    return inner->allreduce_sparse(tensors, opts);
  }
  Call call = make_call("zeropg:all_reduce_sparse");
  call.check_value(tensors.size() == 1 && tensors[0].defined(), "got ", tensors.size(), " tensors, expected one.");
  at::Tensor& tensor = tensors[0];
  call.check_type(tensor.layout() == c10::kSparse, "the tensor has layout ", tensor.layout(),
                  ", expected sparse COO; call to_sparse_coo() first.");
  const bool is_average = opts.reduceOp == c10d::ReduceOp::AVG;
  call.check_type(is_average || opts.reduceOp == c10d::ReduceOp::SUM,
                  "sparse tensors can be summed and averaged only; use a dense tensor.");
  call.reduction(opts.reduceOp, tensor.scalar_type());

  // 16-bit floats are added in fp32, and rounded where they travel and once at the end.
  const at::ScalarType dtype = tensor.scalar_type();
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  const at::Tensor own = [&] {
    const IeeeArithmetic rules;
    return tensor.to(wide).coalesce();
  }();
  const auto gather = [&](const at::Tensor& input) {
    std::vector<at::Tensor> inputs{input};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int peer = 0; peer < size_; ++peer) {
      outputs[0].push_back(at::empty(input.sizes(), input.options()));
    }
    c10d::AllgatherOptions options;
    options.timeout = opts.timeout;
    options.asyncOp = false;
    allgather(outputs, inputs, options);
    return outputs[0];
  };
  const auto padded = [](const at::Tensor& tensor, int64_t dimension, int64_t size) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[static_cast<size_t>(dimension)] = size;
    at::Tensor result = at::zeros(sizes, tensor.options());
    result.narrow(dimension, 0, tensor.size(dimension)).copy_(tensor);
    return result;
  };

  // Shapes first, and what is made of them: a rank with another one must fail on every rank, before anything of that
  // shape is gathered.
  std::vector<int64_t> shape{own._nnz(), own.sparse_dim(), own.dense_dim(), is_average ? 1 : 0};
  constexpr size_t kMostDimensions = 64;
  call.check_value(own.sizes().size() <= kMostDimensions, "the tensor has more than ", kMostDimensions, " dimensions.");
  shape.insert(shape.end(), own.sizes().begin(), own.sizes().end());
  shape.resize(4 + kMostDimensions, -1);
  const std::vector<at::Tensor> shapes = gather(at::tensor(shape, at::kLong));
  int64_t longest = 0;
  for (int peer = 0; peer < size_; ++peer) {
    const at::Tensor& other = shapes[static_cast<size_t>(peer)];
    const auto* values = other.const_data_ptr<int64_t>();
    call.check_value(shape[3] == values[3], "rank ", peer, values[3] == 1 ? " averages" : " sums", " and this rank",
                     is_average ? " averages" : " sums", "; make the same call on every rank.");
    call.check_value(std::equal(shape.begin() + 1, shape.end(), values + 1), "the tensor of rank ", peer,
                     " has other dimensions than this rank's ", own.sizes(), " (", own.sparse_dim(),
                     " of them sparse); use the same shape on every rank.");
    longest = std::max(longest, values[0]);
  }
  const std::vector<at::Tensor> indices = gather(padded(own._indices(), 1, longest));
  const std::vector<at::Tensor> values = gather(padded(own._values().to(dtype), 0, longest));

  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  for (size_t peer = 0; peer < shapes.size(); ++peer) {
    const int64_t count = shapes[peer].const_data_ptr<int64_t>()[0];
    all_indices.push_back(indices[peer].narrow(1, 0, count));
    all_values.push_back(values[peer].narrow(0, 0, count));
  }
  const IeeeArithmetic rules;
  at::Tensor sum = at::_sparse_coo_tensor_unsafe(at::cat(all_indices, 1), at::cat(all_values, 0).to(wide), own.sizes(),
                                                 own.options())
                       .coalesce();
  if (is_average) {
    at::Tensor values = sum._values();
    if (at::isIntegralType(values.scalar_type(), /*includeBool=*/false)) {
      values.div_(size_, "trunc");
    } else {
      values.div_(size_);
    }
  }
  tensor.copy_(sum.to(dtype));
  ZeroWork::Tensors result;
  result.outputs = {tensor};
  auto work = c10::make_intrusive<ZeroWork>(call.label(), OpType::_ALLREDUCE_SPARSE, std::move(result),
                                            timeouts_.next(opts.timeout), channels_->collectives());
  work->complete(nullptr);
  return coalesce(work);
}

}  // namespace zeropg
