// One output for all ranks of a node: a block of the tensor pool, in the part of the node's first rank.
//
// Note [Node outputs]
// Each rank makes an object of its own for each call (ProcessGroupZero::make_node_output). That of the first rank has
// the block; the others learn at the operation's first barrier where it lies (Note [Direct schedules] in
// backend/engine/direct_access.h). Where some rank has no such object, or the first one no room, all write to outputs
// of their own. A rank holds the block until its object is gone: the operation keeps it while it runs, and the caller
// for as long as it reads. The first rank uses the memory again when nobody holds it.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "backend/transport/shm/tensor_pool.h"

namespace zeropg {

class NodeOutput {
 public:
  // `block`: of the first rank, made by allocate_held of `pool`; null: there is no room, or this is another rank.
  NodeOutput(std::shared_ptr<TensorPool> pool, std::byte* block) : pool_(std::move(pool)), block_(block) {}
  ~NodeOutput() {
    if (block_ != nullptr) {
      pool_->let_go(block_);
    }
  }
  NodeOutput(const NodeOutput&) = delete;
  NodeOutput& operator=(const NodeOutput&) = delete;

  // Where it lies, when the operation has ended; null: in the output that the rank has passed.
  std::byte* data() const { return block_; }

  // Of the thread that runs the operation, behind its first barrier, where all ranks decide alike.
  void hold(std::byte* block) { block_ = block; }
  void decline() {
    if (block_ != nullptr) {
      pool_->let_all_go(std::exchange(block_, nullptr));
    }
  }

 private:
  const std::shared_ptr<TensorPool> pool_;  // life shared with the group
  std::byte* block_;
};

}  // namespace zeropg
