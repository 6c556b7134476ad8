// Memory for units that are gathered: a rank's own, or one copy for all ranks of its node.
//
// A copy that ranks share lies in the tensor pool of their group. They agree on that when the gather begins (Note [Node
// outputs] in backend/transport/shm/node_output.h); so who asks for memory gets some of its own as well, which no one
// has touched yet, and learns at the end where the values are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

// Not thread-safe: used by the thread that runs forward and backward.
class GatheredBuffers {
 public:
  // `communicator` must outlive it. On a device, or where the group has no memory in common, ranks share nothing.
  GatheredBuffers(Communicator& communicator, bool is_on_cpu);

  bool shares_in_node() const { return sharers_ > 1; }

  // Of one gather.
  struct Buffer {
    at::Tensor whole;                         // [total_numel] of the flat parameter
    std::shared_ptr<NodeOutput> node_output;  // what the gather may write to instead; null: nothing
    int64_t shared_bytes = 0;                 // this rank's part of that
  };
  // `may_share`: the values are the same for all ranks of the node, and nobody writes to them.
  Buffer acquire(const FlatParameter& flat, bool may_share);
  // The gather has ended: where its values are.
  at::Tensor arrived(Buffer buffer);
  // What arrived(), or acquire() as `whole` without a node_output, has given.
  void release(at::Tensor whole);
  // The gather goes on, or has failed: what it writes to is not used again before it ends.
  void forget(const Buffer& buffer);
  void clear() { pool_.clear(); }  // gives back what nobody has

  // Of this rank: its own buffers, and its part of the most that it has held of shared ones.
  int64_t allocated_bytes() const { return pool_.allocated_bytes() + most_held_bytes_; }

 private:
  void hold(int64_t bytes);

  Communicator& communicator_;
  const int64_t sharers_;  // ranks of the node that share what is gathered; 1: none do
  BufferPool pool_;
  std::unordered_map<const c10::StorageImpl*, int64_t> held_;  // what is not of pool_, and the bytes that it counts
  int64_t held_bytes_ = 0;                                     // of those, and of gathers under way
  int64_t most_held_bytes_ = 0;
};

}  // namespace zeropg
