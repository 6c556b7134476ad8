// CUDA tensors: an inner backend, made through torch's Python binding when the first one comes.
#include "backend/process_group/process_group.h"

namespace zeropg {

c10d::Backend& ProcessGroupZero::inner_backend(const c10::Device& device) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (!cuda_backend_) {
    TORCH_CHECK_NOT_IMPLEMENTED(make_cuda_backend_, "[zeropg rank ", rank_, "/", size_, "] a tensor is on ", device,
                                ", but this group has no NCCL; use a torch that was built with it.");
    cuda_backend_ = make_cuda_backend_(store_, rank_, size_, timeouts_.get());
    cuda_backend_->setGroupUid(getGroupUid());
    cuda_backend_->setGroupDesc(getGroupDesc());
    if (getBoundDeviceId().has_value() && getBoundDeviceId()->is_cuda()) {
      cuda_backend_->setBoundDeviceId(getBoundDeviceId());
    }
  }
  const auto coalescing = coalescing_.find(std::this_thread::get_id());
  if (coalescing != coalescing_.end() && !std::exchange(coalescing->second.has_cuda, true)) {
    cuda_backend_->startCoalescing();
  }
  return *cuda_backend_;
}

ProcessGroupZero::BackendFactory ProcessGroupZero::cuda_factory() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  return make_cuda_backend_;
}

void ProcessGroupZero::eagerConnectSingleDevice(at::Device device) {
  if (auto* inner = inner_for(device)) {
    inner->eagerConnectSingleDevice(device);
  }
}

// The inner backend for what only it has.
c10d::Backend& ProcessGroupZero::cuda_backend_for(const char* title) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_cuda_, prefix(title),
      ": only NCCL has this, and this process sees no GPU; on the"
      " CPU use ordinary tensors (zeropg.fully_shard keeps its buckets in shared memory itself).");
  return inner_backend(c10::Device(c10::DeviceType::CUDA));
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
void ProcessGroupZero::suspend() { cuda_backend_for("zeropg:suspend").suspend(); }
void ProcessGroupZero::resume() { cuda_backend_for("zeropg:resume").resume(); }
std::unordered_map<std::string, uint64_t> ProcessGroupZero::getMemoryStats() {
  return cuda_backend_for("zeropg:memory_stats").getMemoryStats();
}
#endif

}  // namespace zeropg
