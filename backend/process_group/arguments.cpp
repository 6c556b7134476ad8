#include "backend/process_group/arguments.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>

#include "backend/group/planner.h"

namespace zeropg {

namespace {

ReduceOp reduce_op_of(c10d::ReduceOp::RedOpType type) {
  switch (type) {
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      return ReduceOp::kSum;
  }
}

std::complex<double> premul_factor(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    return 1;
  }
  if (!supplement->tensor_factor.defined()) {
    return supplement->double_factor;
  }
  const c10::complex<double> factor = supplement->tensor_factor.item().toComplexDouble();
  return {factor.real(), factor.imag()};
}

}  // namespace

void Call::check_tensor(const at::Tensor& tensor) const {
  check_value(tensor.defined(), "a tensor is undefined; pass tensors with storage.");
  check_type(tensor.layout() == c10::kStrided, "a tensor has layout ", tensor.layout(),
             ", expected a dense one; call to_dense() first.");
  check_type(tensor.device().is_cpu(), "a tensor is on ", tensor.device(),
             ", expected all of them on the cpu; move it there.");
}

const at::Tensor& Call::only(const std::vector<at::Tensor>& tensors, const char* what) const {
  check_value(tensors.size() == 1, "got ", tensors.size(), " ", what,
              " tensors, expected one per rank; call it once for each.");
  check_tensor(tensors[0]);
  return tensors[0];
}

const std::vector<at::Tensor>& Call::only(const std::vector<std::vector<at::Tensor>>& lists, const char* what) const {
  check_value(lists.size() == 1, "got ", lists.size(), " lists of ", what, " tensors, expected one.");
  return lists[0];
}

int32_t Call::root(int64_t rank) const {
  check_value(rank >= 0 && rank < label_.world_size, "the root or peer is rank ", rank, ", expected 0 to ",
              label_.world_size - 1, "; ranks are counted inside the group.");
  return static_cast<int32_t>(rank);
}

ScaledReduceOp Call::reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const {
  ScaledReduceOp reduction{reduce_op_of(op.op_), 1};
  if (reduction.op == ReduceOp::kPremulSum) {
    reduction.factor = premul_factor(op);
  }
  check_type(is_reducible(dtype, reduction.op), "cannot reduce ", c10::toString(dtype), " with ",
             reduce_op_name(reduction.op), "; convert the tensor or use another operation.");
  return reduction;
}

void Call::check_same_dtype(const at::Tensor& one, const at::Tensor& other) const {
  check_tensor(other);
  check_type(one.scalar_type() == other.scalar_type(), "tensors have the dtypes ", one.scalar_type(), " and ",
             other.scalar_type(), ", expected the same one.");
}

void Call::check_list(const std::vector<at::Tensor>& tensors, const at::Tensor& pattern, const char* what) const {
  check_value(tensors.size() == static_cast<size_t>(label_.world_size), "the list of ", what, " tensors has ",
              tensors.size(), " entries, expected one per rank: ", label_.world_size, ".");
  for (const at::Tensor& tensor : tensors) {
    check_same_dtype(pattern, tensor);
    check_numel(tensor, pattern.numel(), what);
  }
}

void Call::check_numel(const at::Tensor& tensor, int64_t numel, const char* what) const {
  check_value(tensor.numel() == numel, "the ", what, " tensor has ", tensor.numel(), " elements, expected ", numel,
              "; match the sizes.");
}

void Call::check_blocks(const at::Tensor& tensor, const at::Tensor& block, const char* what) const {
  int64_t numel = 0;
  check_value(!__builtin_mul_overflow(block.numel(), label_.world_size, &numel), "the ", what, " tensor would need ",
              label_.world_size, " times ", block.numel(), " elements, more than a tensor can have.");
  check_numel(tensor, numel, what);
}

std::vector<int64_t> Call::split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& sizes,
                                       const char* what) const {
  const auto world_size = static_cast<size_t>(label_.world_size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row_bytes = rows == 0 ? 0 : tensor.numel() / rows * static_cast<int64_t>(tensor.element_size());
  if (sizes.empty()) {
    check_value(rows % label_.world_size == 0, "the ", what, " tensor has ", rows,
                " rows, expected a multiple of world_size ", label_.world_size, "; give split sizes.");
    return std::vector<int64_t>(world_size, rows / label_.world_size * row_bytes);
  }
  check_value(sizes.size() == world_size, "got ", sizes.size(), " ", what,
              " split sizes, expected one per rank: ", world_size, ".");
  std::vector<int64_t> bytes;
  int64_t sum = 0;
  for (int64_t size : sizes) {
    check_value(size >= 0, "an ", what, " split size is ", size, ", expected 0 or more.");
    check_value(size <= rows - sum, "the ", what, " split sizes add up to more than dimension 0: ", rows, ".");
    sum += size;
    bytes.push_back(size * row_bytes);
  }
  check_value(sum == rows, "the ", what, " split sizes add up to ", sum, ", expected dimension 0: ", rows, ".");
  return bytes;
}

at::Tensor Call::input(const at::Tensor& tensor) {
  at::Tensor contiguous = tensor.resolve_conj().resolve_neg().contiguous();
  tensors_.held.push_back(contiguous);
  return contiguous;
}

at::Tensor Call::output(const at::Tensor& tensor) {
  tensors_.outputs.push_back(tensor);
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    return tensor;
  }
  at::Tensor contiguous = at::empty(tensor.sizes(), tensor.options().memory_format(c10::MemoryFormat::Contiguous));
  tensors_.copies_back.emplace_back(tensor, contiguous);
  return contiguous;
}

at::Tensor Call::widened_input(const at::Tensor& tensor) {
  return input(tensor.scalar_type() == at::ScalarType::Float ? tensor : tensor.detach().to(at::ScalarType::Float));
}

at::Tensor Call::widened_output(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::ScalarType::Float) {
    return output(tensor);
  }
  tensors_.outputs.push_back(tensor);
  at::Tensor wide = at::empty(
      tensor.sizes(), tensor.options().dtype(at::ScalarType::Float).memory_format(c10::MemoryFormat::Contiguous));
  tensors_.copies_back.emplace_back(tensor, wide);
  return wide;
}

at::Tensor Call::widened_in_place(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::ScalarType::Float) {
    return in_place(tensor);
  }
  at::Tensor wide = widened_output(tensor);
  wide.copy_(tensor.detach());
  return wide;
}

at::Tensor Call::in_place(const at::Tensor& tensor) {
  at::Tensor contiguous = output(tensor);
  if (!contiguous.is_same(tensor)) {
    contiguous.copy_(tensor);
  }
  tensors_.held.push_back(contiguous);
  return contiguous;
}

std::vector<at::Tensor> Call::inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(input(tensor));
  }
  return result;
}

std::vector<at::Tensor> Call::outputs(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(output(tensor));
  }
  return result;
}

// Note [Overlaps].
void Call::separate(CollectiveArgs& request) {
  const bool is_one_tensor =
      (request.op == OpKind::kAllReduce || request.op == OpKind::kReduce || request.op == OpKind::kBroadcast) &&
      request.inputs[0].is_same(request.outputs[0]);
  if (is_one_tensor && requests_.empty()) {
    return;
  }
  if (!requests_.empty()) {
    std::ranges::for_each(requests_.back().outputs, [&](const at::Tensor& output) { written_.add(output); });
  }
  MemoryRanges outputs;
  std::ranges::for_each(request.outputs, [&](const at::Tensor& output) { outputs.add(output); });
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    at::Tensor& input = request.inputs[i];
    if (!written_.overlaps(input) && (!outputs.overlaps(input) || is_in_place(request, i))) {
      continue;
    }
    input = input.clone();
    tensors_.held.push_back(input);
    if (is_one_tensor) {
      tensors_.copies_back.emplace_back(request.outputs[0], input);
      request.outputs[0] = input;
    }
  }
}

bool Call::is_in_place(const CollectiveArgs& request, size_t input) const {
  const auto own = static_cast<size_t>(label_.rank);
  const auto address = [](const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); };
  const auto block = [&](const std::vector<at::Tensor>& tensors, bool is_list) {
    return is_list ? address(tensors[own]) : address(tensors[0]) + label_.rank * request.bytes;
  };
  switch (request.op) {
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      return (!request.input_is_list || input == own) &&
             block(request.inputs, request.input_is_list) == address(request.outputs[0]);
    case OpKind::kAllGather:
    case OpKind::kGather:
      return address(request.inputs[0]) == block(request.outputs, request.output_is_list);
    case OpKind::kAllToAll:
      return request.input_is_list && input == own && address(request.inputs[own]) == address(request.outputs[own]);
    default:
      return address(request.inputs[0]) == address(request.outputs[0]);
  }
}

void Call::add(CollectiveArgs request) {
  separate(request);
  label_.bytes += counted_bytes(request);
  requests_.push_back(std::move(request));
}

}  // namespace zeropg
