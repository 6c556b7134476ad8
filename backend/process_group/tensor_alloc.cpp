// Tensors in memory that the node's ranks share (the tensor pool) or that NCCL allocates.
#include <ATen/ops/from_blob.h>

#include "backend/diagnostics/notices.h"
#include "backend/process_group/process_group.h"

namespace zeropg {

// c10d gives the index of a device alone; the CPU has none.
bool ProcessGroupZero::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device < 0) {
    const GroupContext::Use use(group(), /*must_succeed=*/false);
    return use && group().is_own_process() && !group().has_failed() && group().pool()->bytes_per_rank() > 0;
  }
  return has_cuda_ && cuda_backend_for("zeropg:supports_tensor_alloc").supportsTensorAlloc(device);
}

at::Tensor ProcessGroupZero::allocateTensor(long numel, at::TensorOptions options) {
  if (!options.device().is_cpu()) {
    return cuda_backend_for("zeropg:allocate_tensor").allocateTensor(numel, options);
  }
  const Call call = make_call("zeropg:allocate_tensor");
  const auto item = static_cast<int64_t>(options.dtype().itemsize());
  int64_t bytes = 0;
  call.check_value(numel >= 0 && !__builtin_mul_overflow(numel, item, &bytes), "cannot allocate ", numel,
                   " elements of ", item, " bytes.");
  group().throw_if_failed();  // a rank that does not know it yet may still write to what was freed since
  const GroupContext::Use use(group());
  const std::shared_ptr<TensorPool> pool = group().pool();
  std::byte* data = nullptr;
  try {
    data = pool->allocate(bytes);
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str(prefix("zeropg:allocate_tensor"), ": ", error.what_without_backtrace()));
  }
  return at::for_blob(data, {numel})
      .deleter([pool](void* block) { pool->free(static_cast<std::byte*>(block)); })
      .options(options)
      .make_tensor();
}

std::shared_ptr<NodeOutput> ProcessGroupZero::make_node_output(int64_t bytes) {
  make_call("zeropg:make_node_output");  // refuses a forked child, whose pool would give the parent's memory again
  const GroupContext::Use use(group());
  const std::shared_ptr<TensorPool> pool = group().pool();
  const Topology& topology = group().topology();
  if (topology.is_one_node() || pool->bytes_per_rank() == 0) {
    return nullptr;
  }
  std::byte* block = nullptr;
  const std::vector<int32_t>& ranks = topology.own_node();
  if (ranks.front() == rank_) {
    try {
      block = pool->allocate_held(bytes, static_cast<int32_t>(ranks.size()));
    } catch (const c10::DistBackendError& error) {
      notice("node_output", c10::str(prefix("zeropg:make_node_output"), ": ", error.what_without_backtrace(),
                                     " Each rank of the node uses memory of its own instead."));
    }
  }
  return std::make_shared<NodeOutput>(pool, block);
}

std::shared_ptr<c10::Allocator> ProcessGroupZero::getMemAllocator() {
  return cuda_backend_for("zeropg:mem_allocator").getMemAllocator();
}

}  // namespace zeropg
