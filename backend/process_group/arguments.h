// Checks what a caller hands to a collective and lays it out for the engine. The only place where arguments are
// checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "backend/engine/work.h"
#include "backend/group/collective_args.h"
#include "backend/platform/memory/memory_ranges.h"

namespace zeropg {

struct ScaledReduceOp {
  ReduceOp op = ReduceOp::kSum;
  std::complex<double> factor = 1;
};

// One call on its way to the engine: its requests, and the tensors that live as long as it runs. A tensor that is not
// contiguous is replaced by a contiguous copy, which goes back into it at the end where it is an output.
//
// Note [Overlaps]
// What a rank gives is what its tensors hold when it calls. An input that lies where the call itself writes, before or
// while peers read the input, is therefore replaced by a copy: one that an earlier request of a coalesced call writes
// (a tensor that is listed twice), or that overlaps an output of its own request. Algorithms are made for the usual
// ways to work in place: the output is the input, or this rank's block of the input, or the input is its block of the
// output. Nothing is copied then.
class Call {
 public:
  explicit Call(OperationLabel label) : label_(label) {}

  const OperationLabel& label() const { return label_; }
  void set_sequence(uint64_t sequence) { label_.sequence = sequence; }
  void set_route(const MessageRoute& route) { label_.route = route; }

  // User faults. The text after "[zeropg rank 3/8] op #4: ": what happened, what was expected; what to do.
  template <typename... Text>
  void check_value(bool condition, const Text&... text) const {
    if (!condition) {
      C10_THROW_ERROR(ValueError, c10::str(label_.prefix(), ": ", text...));
    }
  }
  template <typename... Text>
  void check_type(bool condition, const Text&... text) const {
    if (!condition) {
      C10_THROW_ERROR(TypeError, c10::str(label_.prefix(), ": ", text...));
    }
  }

  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) const;
  const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* what) const;
  int32_t root(int64_t rank) const;
  ScaledReduceOp reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const;
  // world_size tensors, all like `pattern`.
  void check_list(const std::vector<at::Tensor>& tensors, const at::Tensor& pattern, const char* what) const;
  void check_same_dtype(const at::Tensor& one, const at::Tensor& other) const;
  void check_numel(const at::Tensor& tensor, int64_t numel, const char* what) const;
  // world_size times as many elements as `block`.
  void check_blocks(const at::Tensor& tensor, const at::Tensor& block, const char* what) const;
  // Bytes per rank of a tensor that is split along dimension 0; equal parts where `sizes` is empty.
  std::vector<int64_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& sizes, const char* what) const;

  // Contiguous stand-ins, kept alive with the call.
  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor in_place(const at::Tensor& tensor);
  // Likewise in fp32, where a tensor has 16 bits: what goes back into it is rounded then.
  at::Tensor widened_input(const at::Tensor& tensor);
  at::Tensor widened_output(const at::Tensor& tensor);
  at::Tensor widened_in_place(const at::Tensor& tensor);
  std::vector<at::Tensor> inputs(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> outputs(const std::vector<at::Tensor>& tensors);

  void add(CollectiveArgs request);
  std::vector<CollectiveArgs>& requests() { return requests_; }
  ZeroWork::Tensors take_tensors() { return std::move(tensors_); }

 private:
  void check_tensor(const at::Tensor& tensor) const;
  void separate(CollectiveArgs& request);
  bool is_in_place(const CollectiveArgs& request, size_t input) const;

  OperationLabel label_;
  std::vector<CollectiveArgs> requests_;
  MemoryRanges written_;  // by all requests but the last
  ZeroWork::Tensors tensors_;
};

}  // namespace zeropg
