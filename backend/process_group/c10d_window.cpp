#include "backend/process_group/c10d_window.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "backend/engine/completed_work.h"
#include "backend/platform/cpu/waiter.h"
#include "backend/platform/memory/round_up.h"
#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

using Clock = std::chrono::steady_clock;

int64_t padded(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  return round_up(bytes, kAlignment);
}

template <typename... Text>
void check(bool condition, const std::string& prefix, const Text&... text) {
  if (!condition) {
    C10_THROW_ERROR(ValueError, c10::str(prefix, ": ", text...));
  }
}

// Done when its signal has come; whoever waits looks at the counter.
class SignalWork final : public c10d::Work {
 public:
  SignalWork(c10::intrusive_ptr<ProcessGroupZero> group, std::shared_ptr<SharedSegment> segment,
             const std::atomic<uint64_t>& signals, std::shared_ptr<SignalQueue> waits, int32_t peer,
             std::chrono::milliseconds timeout)
      : Work(group->getRank(), c10d::OpType::UNKNOWN, "zeropg:wait_signal"),
        group_(std::move(group)),
        segment_(std::move(segment)),
        signals_(signals),
        place_(std::move(waits)),
        peer_(peer),
        timeout_(timeout) {}

  bool isCompleted() override { return has_come(); }
  bool isSuccess() const override { return has_come(); }
  void synchronize() override {}

  bool wait(std::chrono::milliseconds timeout) override {
    constexpr std::chrono::microseconds kNap{50};
    constexpr std::chrono::milliseconds kCheckInterval{20};
    constexpr std::chrono::milliseconds kLastWords{200};
    const WaitingThread thread;
    const auto limit = timeout == kNoTimeout || timeout.count() < 0 ? timeout_ : timeout;
    const auto start = Clock::now();
    auto next_check = start + kCheckInterval;
    Clock::time_point lost_at{};
    Waiter waiter(group_->getSize(), kCallersPatience);
    while (!has_come()) {
      const auto now = Clock::now();
      if (now >= next_check) {
        next_check = now + kCheckInterval;
        check_signals();
        try {
          group_->check_peer("zeropg:wait_signal", peer_);
        } catch (const c10::DistBackendError&) {
          // It may have signalled, and then left; what came from another node the progress thread may still have to
          // take.
          if (lost_at == Clock::time_point{}) lost_at = now;
          if (!has_come() && now - lost_at >= kLastWords) throw;
        }
        TORCH_CHECK_WITH(DistBackendError, now - start < limit || has_come(), group_->prefix("zeropg:wait_signal"),
                         ": timed out after ", limit.count(), " ms waiting for a signal of rank ", peer_,
                         "; see what it does, or give more time.");
      }
      if (waiter.should_sleep()) {
        std::this_thread::sleep_for(kNap);
      } else {
        waiter.pause();
      }
    }
    return true;
  }

 private:
  bool has_come() const { return place_.take(signals_.load(std::memory_order_acquire)); }

  const c10::intrusive_ptr<ProcessGroupZero> group_;
  const std::shared_ptr<SharedSegment> segment_;  // life shared with the window: signals_ lies there
  const std::atomic<uint64_t>& signals_;
  mutable SignalQueue::Place place_;
  const int32_t peer_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace

C10dWindow::C10dWindow(c10::intrusive_ptr<ProcessGroupZero> group) : group_(std::move(group)) {}

std::byte* C10dWindow::part_of(int64_t rank) const {
  return segment_->data() + places_[static_cast<size_t>(rank)] * segment_->bytes_per_rank();
}

// Behind the receiver's data, one counter per sender.
std::atomic<uint64_t>& C10dWindow::signals(int64_t receiver, int64_t sender) const {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  return reinterpret_cast<std::atomic<uint64_t>*>(part_of(receiver) + padded(bytes_))[sender];
}

int32_t C10dWindow::check_peer(const char* title, int64_t rank) const {
  check(segment_ != nullptr, group_->prefix(title), "no tensor is registered; call tensor_register on every rank.");
  check_own_process(runtime_->group(), {.rank = group_->getRank(), .world_size = group_->getSize(), .title = title});
  check(!has_other_members(), group_->prefix(title),
        "the group has other members since the tensor was registered; call tensor_deregister, and tensor_register on"
        " every rank.");
  check(rank >= 0 && rank < group_->getSize(), group_->prefix(title), "the peer is rank ", rank, ", expected 0 to ",
        group_->getSize() - 1, ".");
  return static_cast<int32_t>(rank);
}

// What peers put, and see of a peer's memory, has this rank's dtype and shape.
void C10dWindow::check_alike(const std::string& prefix, const at::Tensor& tensor) const {
  constexpr int64_t kMostDimensions = 64;
  check(tensor.dim() <= kMostDimensions, prefix, "the tensor has more than ", kMostDimensions, " dimensions.");
  std::vector<int64_t> own{static_cast<int64_t>(tensor.scalar_type()), tensor.dim()};
  own.insert(own.end(), tensor.sizes().begin(), tensor.sizes().end());
  own.resize(2 + kMostDimensions);
  at::Tensor input = at::tensor(own, at::kLong);
  at::Tensor all = at::empty({group_->getSize(), input.numel()}, input.options());
  group_->_allgather_base(all, input)->wait();
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    const int64_t* other = all[rank].const_data_ptr<int64_t>();
    check(std::equal(own.begin(), own.end(), other), prefix, "rank ", rank, " registers ",
          static_cast<c10::ScalarType>(other[0]), " of shape ", c10::IntArrayRef(other + 2, other[1]), ", this rank ",
          tensor.scalar_type(), " of shape ", tensor.sizes(), "; register the same dtype and shape on every rank.");
  }
}

void C10dWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  const std::string prefix = group_->prefix("zeropg:tensor_register");
  check(segment_ == nullptr, prefix, "the window has a tensor; call tensor_deregister on every rank before.");
  check(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == c10::kStrided && tensor.is_contiguous(),
        prefix, "expected a contiguous dense tensor on the CPU.");
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  check(tensor.storage_offset() == 0 && storage.resizable(), prefix,
        "the tensor is a later part of a storage, or its memory belongs to numpy or another library; expected a tensor"
        " at the beginning of memory that torch allocated.");
  check_alike(prefix, tensor);
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  const auto counters = static_cast<int64_t>(sizeof(uint64_t)) * group_->getSize();
  runtime_ = group_->current_channels();
  allocate(padded(bytes) + padded(counters));
  const Topology topology = group_->topology();
  places_ = topology.local_rank;
  for (int32_t rank = 0; rank < group_->getSize(); ++rank) {
    if (!topology.is_on_this_node(rank)) places_[static_cast<size_t>(rank)] = -1;
  }
  bytes_ = bytes;
  sizes_ = tensor.sizes().vec();
  dtype_ = tensor.scalar_type();
  waits_.clear();
  for (int32_t rank = 0; rank < group_->getSize(); ++rank) waits_.push_back(std::make_shared<SignalQueue>());
  std::byte* own = part_of(group_->getRank());
  std::memcpy(own, storage.data(), storage.nbytes());
  // Note [Windows]: the old memory is given back here, the new one lives as long as the storage.
  storage.set_data_ptr(at::DataPtr(
      own, new std::shared_ptr<SharedSegment>(segment_),
      [](void* context) { delete static_cast<std::shared_ptr<SharedSegment>*>(context); }, at::kCPU));
  storage.set_resizable(false);  // a resize would leave the window
  tensor_ = owning ? tensor : at::Tensor();
  if (traffic() != nullptr) {
    id_ = traffic()->open(
        {.memory = segment_, .data = own, .bytes = bytes_, .signals = &signals(group_->getRank(), /*sender=*/0)});
  }
  group_->barrier()->wait();  // nobody writes before the contents have moved
}

// On all ranks or on none.
void C10dWindow::allocate(int64_t bytes) {
  if (traffic() == nullptr) {
    segment_ = group_->allocate_shared(bytes);
    return;
  }
  std::shared_ptr<SharedSegment> segment;
  std::string failure;
  try {
    segment = group_->allocate_shared(bytes);
  } catch (const c10::DistBackendError& error) {
    failure = error.what_without_backtrace();
  }
  at::Tensor has_it = at::tensor({segment != nullptr ? int64_t{1} : int64_t{0}}, at::kLong);
  at::Tensor all = at::empty({group_->getSize()}, has_it.options());
  group_->_allgather_base(all, has_it)->wait();
  TORCH_CHECK_WITH(DistBackendError, failure.empty(), failure);
  const int64_t* ranks = all.const_data_ptr<int64_t>();
  const auto without = std::find(ranks, ranks + all.numel(), 0);
  TORCH_CHECK_WITH(DistBackendError, without == ranks + all.numel(), group_->prefix("zeropg:tensor_register"),
                   ": rank ", without - ranks, " has no memory for it; see the error there.");
  segment_ = std::move(segment);
}

void C10dWindow::tensor_deregister() {
  if (segment_ != nullptr && has_other_members()) {  // nobody reaches it any more
    segment_.reset();
    tensor_ = at::Tensor();
    return;
  }
  check_peer("zeropg:tensor_deregister", group_->getRank());
  wait_for_traffic();
  group_->barrier()->wait();
  if (traffic() != nullptr) traffic()->close(id_);
  segment_.reset();
  tensor_ = at::Tensor();
}

// Until all that ranks of other nodes have sent is here.
void C10dWindow::wait_for_traffic() {
  if (traffic() == nullptr) return;
  const WaitingThread thread;
  constexpr const char* kTitle = "zeropg:tensor_deregister";
  constexpr std::chrono::microseconds kNap{50};
  at::Tensor sent = at::tensor(traffic()->sent(), at::kLong);
  at::Tensor coming = at::empty_like(sent);
  std::vector<int64_t> equal;
  group_->alltoall_base(coming, sent, equal, equal)->wait();
  const auto deadline = Clock::now() + group_->default_timeout();
  for (int32_t peer = 0; peer < group_->getSize(); ++peer) {
    while (traffic()->received(peer) < coming.const_data_ptr<int64_t>()[peer]) {
      check_signals();
      group_->check_peer(kTitle, peer);
      TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline, group_->prefix(kTitle), ": timed out after ",
                       group_->default_timeout().count(), " ms waiting for what rank ", peer,
                       " has put; see what it does, or give more time.");
      std::this_thread::sleep_for(kNap);
    }
  }
}

c10::intrusive_ptr<c10d::Work> C10dWindow::put(const at::Tensor& tensor, int64_t destination, int64_t offset,
                                               bool /*is_asynchronous*/, const c10d::PutOptions& opts) {
  const int32_t peer = check_peer("zeropg:put", destination);
  const std::string prefix = group_->prefix("zeropg:put");
  check(tensor.defined() && tensor.device().is_cpu() && tensor.scalar_type() == dtype_, prefix, "the tensor is ",
        tensor.toString(), ", expected a CPU tensor of the window's dtype ", dtype_, ".");
  const auto item = static_cast<int64_t>(tensor.element_size());
  check(offset >= 0 && offset <= bytes_ / item && tensor.numel() <= bytes_ / item - offset, prefix, tensor.numel(),
        " elements at ", offset, " do not fit into a window of ", bytes_ / item, ".");
  group_->check_peer("zeropg:put", peer);
  const at::Tensor source = tensor.resolve_conj().resolve_neg().contiguous();
  if (is_elsewhere(peer)) {
    const std::span bytes(static_cast<const std::byte*>(source.const_data_ptr()), source.nbytes());
    traffic()->put({.peer = peer, .window = id_}, offset * item, bytes, timeout_of(opts));
  } else {
    // To this rank itself the two may overlap.
    std::memmove(part_of(peer) + offset * item, source.const_data_ptr(), source.nbytes());
  }
  return c10::make_intrusive<CompletedWork>(group_->getRank());
}

at::Tensor C10dWindow::map_remote_tensor(int64_t rank) {
  const int32_t peer = check_peer("zeropg:map_remote_tensor", rank);
  if (is_elsewhere(peer)) {
    C10_THROW_ERROR(NotImplementedError,
                    c10::str(group_->prefix("zeropg:map_remote_tensor"), ": rank ", peer,
                             " is on another node, whose memory cannot be mapped; put and signal reach it."));
  }
  return at::from_blob(
      part_of(peer), sizes_, [segment = segment_](void*) {}, at::TensorOptions().dtype(dtype_));
}

c10::intrusive_ptr<c10d::Work> C10dWindow::signal(int64_t peer, bool /*is_asynchronous*/,
                                                  const c10d::SignalOptions& opts) {
  const int32_t receiver = check_peer("zeropg:signal", peer);
  if (is_elsewhere(receiver)) {
    traffic()->signal({.peer = receiver, .window = id_}, timeout_of(opts));
  } else {
    signals(receiver, group_->getRank()).fetch_add(1, std::memory_order_release);
  }
  return c10::make_intrusive<CompletedWork>(group_->getRank());
}

c10::intrusive_ptr<c10d::Work> C10dWindow::wait_signal(int64_t peer, bool is_asynchronous,
                                                       const c10d::WaitSignalOptions& opts) {
  const int32_t sender = check_peer("zeropg:wait_signal", peer);
  const auto timeout = timeout_of(opts);
  auto work = c10::make_intrusive<SignalWork>(group_, segment_, signals(group_->getRank(), sender),
                                              waits_[static_cast<size_t>(sender)], sender, timeout);
  if (!is_asynchronous) work->wait(timeout);
  return work;
}

c10d::WindowAttr C10dWindow::get_attr(int64_t peer) {
  check_peer("zeropg:get_attr", peer);
  return c10d::WindowAttr{.access_type = c10d::WindowAccessType::UNIFIED};
}

}  // namespace zeropg
#endif
