#include "sharding/fetch/gathered_buffers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "backend/process_group/process_group.h"

namespace zeropg {

GatheredBuffers::GatheredBuffers(Communicator& communicator, bool is_on_cpu)
    : communicator_(communicator), sharers_(is_on_cpu ? communicator.ranks_that_share_output() : 1) {}

void GatheredBuffers::hold(int64_t bytes) {
  held_bytes_ += bytes;
  most_held_bytes_ = std::max(most_held_bytes_, held_bytes_);
}

GatheredBuffers::Buffer GatheredBuffers::acquire(const FlatParameter& flat, bool may_share) {
  const int64_t numel = flat.layout().total_numel;
  if (!may_share || !shares_in_node()) {
    return {.whole = pool_.acquire(numel, flat.dtype(), flat.device())};
  }
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(flat.dtype()));
  Buffer buffer;
  buffer.node_output = communicator_.make_node_output(bytes);
  // Not at::empty, which fills it where torch is told to be deterministic: then it would be memory, not addresses.
  buffer.whole = at::detail::empty_cpu({numel}, at::TensorOptions().dtype(flat.dtype()));
  buffer.shared_bytes = (bytes + sharers_ - 1) / sharers_;
  hold(buffer.shared_bytes);
  return buffer;
}

at::Tensor GatheredBuffers::arrived(Buffer buffer) {
  if (buffer.node_output == nullptr) {
    return buffer.whole;
  }
  int64_t bytes = buffer.shared_bytes;
  at::Tensor whole = std::move(buffer.whole);
  if (std::byte* data = buffer.node_output->data()) {
    whole = at::for_blob(data, whole.sizes())
                .deleter([held = buffer.node_output](void*) {})
                .options(whole.options())
                .make_tensor();
  } else {  // the ranks of the node had to take memory of their own
    bytes = static_cast<int64_t>(whole.nbytes());
    hold(bytes - buffer.shared_bytes);
  }
  held_.emplace(whole.storage().unsafeGetStorageImpl(), bytes);
  return whole;
}

void GatheredBuffers::release(at::Tensor whole) {
  const auto found = held_.find(whole.storage().unsafeGetStorageImpl());
  if (found == held_.end()) {
    pool_.release(std::move(whole));
    return;
  }
  held_bytes_ -= found->second;
  held_.erase(found);
}

void GatheredBuffers::forget(const Buffer& buffer) {
  if (buffer.node_output == nullptr) {
    pool_.forget(buffer.whole);
  } else {
    held_bytes_ -= buffer.shared_bytes;
  }
}

}  // namespace zeropg
