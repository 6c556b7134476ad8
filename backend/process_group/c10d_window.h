// One-sided access to the memory of other ranks: c10d's windows (torch 2.15).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW
#include <atomic>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Window.hpp>
#include <vector>

#include "backend/process_group/group_runtime.h"
#include "backend/process_group/process_group.h"
#include "backend/transport/shm/shared_segment.h"
#include "backend/windows/signal_queue.h"

namespace zeropg {

// Note [Windows]
// A registered tensor's storage moves into memory that all ranks of the node map, with its contents; the tensor, its
// views and its address in Python stay valid, raw pointers taken before do not. put() is then a copy by the caller, and
// a signal is a counter in the receiver's part. To ranks of other nodes both are messages (Note [Windows between
// nodes]). What was put before a signal is seen after the wait for it.
class C10dWindow final : public c10d::Window {
 public:
  // The group stays alive as long as its windows.
  explicit C10dWindow(c10::intrusive_ptr<ProcessGroupZero> group);

  // Collective. ValueError on every rank when dtypes or shapes differ. `tensor`: on the CPU, contiguous, the first in a
  // storage of its own (not numpy's or another library's). `owning`: the window keeps it alive.
  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  // Collective; puts and signals that were issued before it have arrived. The tensor stays usable.
  void tensor_deregister() override;
  // `tensor`: of the window's dtype. `offset` counts elements. Returns when the bytes are there, or on their way to
  // another node; `tensor` may change then.
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t destination, int64_t offset,
                                     bool is_asynchronous, const c10d::PutOptions& opts) override;
  // The memory of a peer on this node, with this rank's shape and dtype. Lives as long as the tensor that is returned.
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t peer, bool is_asynchronous, const c10d::SignalOptions& opts) override;
  // Takes one signal of `peer`; of several waits the oldest gets it. DistBackendError when none comes within the
  // timeout, or the peer is gone. The signal of a wait that failed, or whose work died before it was seen to be
  // complete, is the next one's.
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t peer, bool is_asynchronous,
                                             const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t peer) override;

 private:
  bool is_elsewhere(int32_t peer) const { return places_[static_cast<size_t>(peer)] < 0; }
  std::byte* part_of(int64_t rank) const;                                // of this node
  WindowTraffic* traffic() const { return runtime_->window_traffic(); }  // null: all ranks are on this node
  bool has_other_members() const { return group_->current_channels() != runtime_; }
  void allocate(int64_t bytes);
  std::atomic<uint64_t>& signals(int64_t receiver, int64_t sender) const;
  void check_alike(const std::string& prefix, const at::Tensor& tensor) const;
  int32_t check_peer(const char* title, int64_t rank) const;
  void wait_for_traffic();
  template <typename Options>
  std::chrono::milliseconds timeout_of(const Options& opts) const {
    return opts.timeout.count() > 0 ? opts.timeout : group_->default_timeout();
  }

  const c10::intrusive_ptr<ProcessGroupZero> group_;
  std::shared_ptr<SharedSegment> segment_;  // null: nothing is registered. Life shared with tensors on it
  std::shared_ptr<GroupRuntime> runtime_;   // of the ranks that registered. Life shared with the group
  at::Tensor tensor_;                       // while it is owned
  std::vector<int32_t> places_;             // per rank: in the segment; -1: on another node
  std::vector<int64_t> sizes_;
  int64_t bytes_ = 0;  // of the storage that moved
  c10::ScalarType dtype_ = c10::ScalarType::Byte;
  std::vector<std::shared_ptr<SignalQueue>> waits_;  // per sender: of this rank. Life shared with works
  uint64_t id_ = 0;                                  // for ranks of other nodes
};

}  // namespace zeropg
#endif
