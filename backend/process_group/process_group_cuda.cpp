// CUDA tensors: an inner backend, made through torch's Python binding when the first one comes, and the coalescing
// windows that it needs.
#include <ATen/ops/from_blob.h>

#include "backend/process_group/process_group.h"

namespace zeropg {

c10d::Backend* ProcessGroupZero::inner_for(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? nullptr : inner_for(tensors[0]);
}

c10d::Backend* ProcessGroupZero::inner_for(const at::Tensor& tensor) {
  return tensor.defined() ? inner_for(tensor.device()) : nullptr;
}

c10d::Backend* ProcessGroupZero::inner_for(const c10::Device& device) {
  if (!device.is_cuda()) {
    return nullptr;
  }
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
  if (is_coalescing_ && !is_cuda_coalescing_) {
    cuda_backend_->startCoalescing();
    is_cuda_coalescing_ = true;
  }
  return cuda_backend_.get();
}

// c10d does not say for which device the window is: the first CUDA tensor in it opens NCCL's.
void ProcessGroupZero::startCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::endCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = false;
  if (std::exchange(is_cuda_coalescing_, false)) {
    if (auto work = cuda_backend_->endCoalescing()) {
      coalesced_.push_back(std::move(work));
    }
  }
  return coalesced_.size() == 1 ? std::exchange(coalesced_, {})[0] : combine(std::exchange(coalesced_, {}));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::coalesce(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (is_coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
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
  return *inner_for(c10::Device(c10::DeviceType::CUDA));
}

// c10d gives the index of a device alone; the CPU has none.
bool ProcessGroupZero::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device < 0) {
    const Group::Use use(group(), /*must_succeed=*/false);
    return use && group().is_own_process() && !group().has_failed() && group().pool().bytes_per_rank() > 0;
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
  const Group::Use use(group());
  const std::shared_ptr<TensorPool> pool = group().shared_pool();
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

std::shared_ptr<c10::Allocator> ProcessGroupZero::getMemAllocator() {
  return cuda_backend_for("zeropg:mem_allocator").getMemAllocator();
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
void ProcessGroupZero::suspend() { cuda_backend_for("zeropg:suspend").suspend(); }
void ProcessGroupZero::resume() { cuda_backend_for("zeropg:resume").resume(); }
std::unordered_map<std::string, uint64_t> ProcessGroupZero::getMemoryStats() {
  return cuda_backend_for("zeropg:memory_stats").getMemoryStats();
}
#endif

}  // namespace zeropg
