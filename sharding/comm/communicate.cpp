#include "sharding/comm/communicate.h"

#include <ATen/ops/empty.h>
#include <torch/headeronly/version.h>

#include <stdexcept>

#include "backend/diagnostics/notices.h"
#include "backend/process_group/process_group.h"

namespace zeropg {
namespace {

// What is only moved travels as bytes where its dtype is one that not every backend knows.
at::Tensor movable(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
      return tensor;
    default:
      return tensor.view(at::kByte);
  }
}

}  // namespace

Communicator::Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, EventLog& log)
    : group_(std::move(group)), log_(log), rank_(group_->getRank()), world_size_(group_->getSize()) {}

std::string Communicator::context(const char* operation) const {
  return c10::str("[zeropg rank ", rank_, "/", world_size_, "] ", operation, ": ");
}

c10::intrusive_ptr<c10d::Work> Communicator::all_gather(at::Tensor whole, at::Tensor part, uint64_t item) {
  whole = movable(whole);
  part = movable(part);
  if (item != 0 && compares_items(whole.device())) {
    return zeropg_group().all_gather_item(whole, part, item);
  }
#if TORCH_VERSION_MINOR >= 15
  return group_->all_gather_single(whole, part);
#else
  return group_->_allgather_base(whole, part);
#endif
}

bool Communicator::compares_items(c10::Device device) const { return device.is_cpu() && find_zeropg() != nullptr; }

c10::intrusive_ptr<c10d::Work> Communicator::all_gather_encoded(const at::Tensor& whole, const at::Tensor& part,
                                                                const std::shared_ptr<const Compressor>& codec,
                                                                uint64_t item) {
  return zeropg_group().compressed_all_gather(whole, part, codec, /*is_asynchronous=*/true, item);
}

c10::intrusive_ptr<c10d::Work> Communicator::reduce_scatter_average(at::Tensor part, at::Tensor whole,
                                                                    const Compression& compression) {
  if (compression.codec != nullptr) {
    return zeropg_group().compressed_reduce_scatter(part, whole, compression, c10d::ReduceOp::AVG,
                                                    /*is_asynchronous=*/true);
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
#if TORCH_VERSION_MINOR >= 15
  return group_->reduce_scatter_single(part, whole, options);
#else
  return group_->_reduce_scatter_base(part, whole, options);
#endif
}

bool Communicator::scatters_by_all_reduce(c10::Device device) const {
  return device.is_cpu() && group_->getBackend(at::kCPU)->getBackendName() == "gloo";
}

c10::intrusive_ptr<c10d::Work> Communicator::all_reduce_average(at::Tensor whole, const Compression& compression) {
  if (compression.codec != nullptr) {
    return zeropg_group().compressed_all_reduce(whole, compression, c10d::ReduceOp::AVG, /*is_asynchronous=*/true);
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  std::vector<at::Tensor> tensors{std::move(whole)};
  return group_->allreduce(tensors, options);
}

c10::intrusive_ptr<c10d::Work> Communicator::all_reduce_max(at::Tensor whole) {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{std::move(whole)};
  return group_->allreduce(tensors, options);
}

c10::intrusive_ptr<c10d::Work> Communicator::broadcast(const at::Tensor& whole, int64_t root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{movable(whole)};
  return group_->broadcast(tensors, options);
}

bool Communicator::is_same_everywhere(int64_t value, c10::Device device) {
  if (world_size_ == 1) {
    return true;
  }
  const at::Tensor mine = at::empty({1}, at::kLong).fill_(value).to(device);
  const at::Tensor all = at::empty({world_size_}, mine.options());
  wait(all_gather(all, mine));
  return all.eq(value).all().item<bool>();
}

at::Tensor Communicator::allocate(int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  ProcessGroupZero* zeropg = device.is_cpu() && world_size_ > 1 ? find_zeropg() : nullptr;
  if (zeropg != nullptr && zeropg->supportsTensorAlloc(device.index())) {
    try {
      return zeropg->allocateTensor(bytes, options);
    } catch (const c10::DistBackendError& error) {
      notice("buckets", c10::str(error.what_without_backtrace(), " Gradients use ordinary memory instead: slower."));
    }
  }
  return at::empty({bytes}, options);
}

ProcessGroupZero* Communicator::find_zeropg() const {
  return dynamic_cast<ProcessGroupZero*>(group_->getBackend(at::kCPU).get());
}

ProcessGroupZero& Communicator::zeropg_group() {
  ProcessGroupZero* zeropg = find_zeropg();
  TORCH_CHECK_VALUE(zeropg != nullptr, "[zeropg rank ", rank_, "/", world_size_,
                    "] compression: only zeropg's collectives carry codecs, and this group's backend is another one.");
  return *zeropg;
}

void Communicator::wait(const c10::intrusive_ptr<c10d::Work>& work, EventLog::Kind purpose, const std::string& unit) {
  try {
    timed([&] { work->wait(); }, purpose, unit);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::runtime_error& error) {  // gloo's; what a signal handler raised is neither
    C10_THROW_ERROR(DistBackendError, c10::str("[zeropg rank ", rank_, "/", world_size_,
                                               "] a collective failed while this rank waited for the others; look at "
                                               "their logs: ",
                                               error.what()));
  }
}

}  // namespace zeropg
