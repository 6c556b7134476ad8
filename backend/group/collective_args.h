// One collective, as a user's call or the sharded module asks for it. Plain data, free of c10d's option types.
#pragma once

#include <ATen/core/Tensor.h>

#include <complex>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "compression/codec_meter.h"
#include "compression/compressor.h"

namespace zeropg {

class NodeOutput;
class ResidualStore;

// Whose residuals the next `numel` elements of a request's data have: elements from `start` of what `name` names, e.g.
// of a parameter. An empty name: none, as for padding.
struct ResidualRange {
  std::string name;
  int64_t start = 0;
  int64_t numel = 0;
};

// How a request's bytes may be compressed on the way. c10d's calls carry none; the sharded module and hooks submit it.
struct Compression {
  std::shared_ptr<const Compressor> codec{};   // life shared with whoever configured it
  std::shared_ptr<ResidualStore> residuals{};  // life shared with the model; null: no error feedback
  std::vector<ResidualRange> ranges{};         // with residuals: of all elements of the input, in order
  std::shared_ptr<CodecMeter> meter{};         // life shared with the model; what the call counts; null: the group's
  float arrears_factor = 1;                    // of what the store calls a contribution, for each unit of the call's
};

// Tensors are contiguous, on the CPU, laid out as CollectiveSpec says; `dtype` is that of the data that is reduced.
struct CollectiveArgs {
  OpKind op = OpKind::kBarrier;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  at::ScalarType dtype = at::ScalarType::Byte;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::complex<double> factor = 1;  // kPremulSum: multiplies every input before the sum
  int32_t root = 0;
  int64_t bytes = 0;  // of one block
  bool input_is_list = false;
  bool output_is_list = false;
  std::vector<int64_t> send_bytes;     // all_to_all
  std::vector<int64_t> receive_bytes;  // all_to_all
  uint64_t item = 0;                   // which of the caller's things it moves, from 1, on every rank; 0: not said
  std::shared_ptr<NodeOutput>
      node_output;          // all_gather: what the node's ranks may share instead of outputs[0], or null
  Compression compression;  // codec is null: bytes travel as they are
};

// What the operation is counted with: a block, or all that this rank sends in an all-to-all.
int64_t counted_bytes(const CollectiveArgs& request);

}  // namespace zeropg
