#include "backend/process_group/arguments.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>
#include <set>

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

// Its bytes are its elements in order.
bool is_plain(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         dtype.value_or(tensor.scalar_type()) == tensor.scalar_type();
}

at::Tensor contiguous_like(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return at::empty(
      tensor.sizes(),
      tensor.options().dtype(dtype.value_or(tensor.scalar_type())).memory_format(c10::MemoryFormat::Contiguous));
}

}  // namespace

void Call::check_tensor(const at::Tensor& tensor) const {
  check_value(tensor.defined(), "a tensor is undefined; pass tensors with storage.");
  check_type(tensor.layout() == c10::kStrided, "a tensor has layout ", tensor.layout(),
             ", expected a dense one; call to_dense() first.");
  check_type(tensor.device().is_cpu(), "a tensor is on ", tensor.device(),
             ", expected all of them on the cpu; move it there.");
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                         static_cast<size_t>(tensor.storage_offset()));
  check_value(needed <= tensor.storage().nbytes(), "a tensor of shape ", tensor.sizes(), " needs ", needed,
              " bytes, and its storage has ", tensor.storage().nbytes(),
              "; it was freed or has no memory of its own: give it some first, as clone() does.");
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
    check_type(reduction.factor.imag() == 0 || c10::isComplexType(dtype),
               "the factor of PREMUL_SUM is complex, and the tensor has ", c10::toString(dtype),
               " (dist.all_reduce hands complex tensors over as real ones); multiply the tensor before and use SUM.");
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

at::Tensor Call::copy_at_start(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  at::Tensor copy = contiguous_like(tensor, dtype);
  tensors_.copies_in.emplace_back(copy, tensor.detach());
  return copy;
}

at::Tensor Call::input(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  at::Tensor contiguous = is_plain(tensor, dtype) ? tensor : copy_at_start(tensor, dtype);
  tensors_.held.push_back(contiguous);
  return contiguous;
}

at::Tensor Call::output(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  check_value(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "an output tensor of shape ", tensor.sizes(),
              " has strides ", tensor.strides(),
              ": some of its elements are one in memory, as after expand(); clone() it first.");
  tensors_.outputs.push_back(tensor);
  if (is_plain(tensor, dtype)) {
    return tensor;
  }
  at::Tensor contiguous = contiguous_like(tensor, dtype);
  tensors_.copies_back.emplace_back(tensor.detach(), contiguous);
  return contiguous;
}

at::Tensor Call::in_place(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  at::Tensor contiguous = output(tensor, dtype);
  if (!contiguous.is_same(tensor)) {
    tensors_.copies_in.emplace_back(contiguous, tensor.detach());
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

// Tensors with gaps are found to share memory where they begin at one element, as in [tensor.t()] * 2: others may lie
// side by side, as the columns of a matrix do.
std::vector<at::Tensor> Call::outputs(const std::vector<at::Tensor>& tensors) {
  MemoryRanges taken;
  std::set<const void*> beginnings;
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    const bool is_dense = tensor.is_non_overlapping_and_dense();
    const bool is_new = tensor.numel() == 0 || beginnings.insert(tensor.const_data_ptr()).second;
    check_value(is_new && !(is_dense && taken.overlaps(tensor)), "two output tensors share memory, as in [tensor] * ",
                label_.world_size, ", so one would overwrite the other; give each rank's data memory of its own.");
    if (is_dense) taken.add(tensor);
    result.push_back(output(tensor));
  }
  return result;
}

// Note [Overlaps].
void Call::separate(CollectiveArgs& request) {
  const OpTraits& op = traits_of(request.op);
  const bool is_one_tensor =
      op.input == BlockCount::kOne && op.output == BlockCount::kOne && request.inputs[0].is_same(request.outputs[0]);
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
    input = copy_at_start(input);
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
  const OpTraits& op = traits_of(request.op);
  if (op.has_counts) {
    return request.input_is_list && input == own && address(request.inputs[own]) == address(request.outputs[own]);
  }
  if (op.input == BlockCount::kOnePerRank) {
    return (!request.input_is_list || input == own) &&
           block(request.inputs, request.input_is_list) == address(request.outputs[0]);
  }
  return address(request.inputs[0]) == (op.output == BlockCount::kOnePerRank
                                            ? block(request.outputs, request.output_is_list)
                                            : address(request.outputs[0]));
}

at::Tensor Call::message(const at::Tensor& tensor, const MessageRoute& route) {
  check_value(route.tag >= 0, "the tag is ", route.tag, ", expected 0 or more.");
  check_value(label_.world_size > 1 && route.peer != label_.rank,
              "a rank cannot send to or receive from itself; copy the tensor.");
  label_.route = route;
  label_.bytes = static_cast<int64_t>(tensor.nbytes());
  at::Tensor data = route.is_send ? input(tensor) : output(tensor);
  tensors_.storages.push_back(data.storage());
  return data;
}

void Call::add(CollectiveArgs request) {
  separate(request);
  for (const auto* tensors : {&request.inputs, &request.outputs}) {
    std::ranges::for_each(*tensors, [&](const at::Tensor& tensor) { tensors_.storages.push_back(tensor.storage()); });
  }
  label_.bytes += counted_bytes(request);
  requests_.push_back(std::move(request));
}

}  // namespace zeropg
