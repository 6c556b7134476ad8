// The c10d face of the backend: checks arguments, turns calls into requests, and hands them to the engine.
//
// c10d's old names are overridden (_allgather_base, ...): they exist in every supported torch, and the newer names
// forward to them.
#pragma once

#include <torch/version.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "backend/group/hooks.h"
#include "backend/group/planner.h"
#include "backend/group/timeouts.h"
#include "backend/process_group/arguments.h"
#include "backend/process_group/flight_recorder.h"
#include "backend/process_group/group_runtime.h"
#include "backend/process_group/options.h"
#include "backend/topology/topology.h"
#include "backend/transport/shm/node_output.h"
#include "backend/transport/shm/shared_segment.h"

namespace zeropg {

// CPU tensors run on the engine; CUDA tensors go to an inner backend that `make_cuda_backend` makes when the first one
// comes. Its constructor and its destructor wait (for the peers, for running operations): without the GIL.
class ProcessGroupZero : public c10d::Backend {
 public:
  // Makes the backend for CUDA tensors of a group; collective. Kept and handed on to the group's children.
  using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)>;

  // Collective over all ranks. `store` is the group's own; `options` is copied. Throws DistBackendError naming the
  // ranks that did not come.
  ProcessGroupZero(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                   const c10::intrusive_ptr<BackendOptions>& options, BackendFactory make_cuda_backend = nullptr);
  ~ProcessGroupZero() override;

  const std::string getBackendName() const override { return "zeropg"; }
  // A copy: c10d changes what it gets here when it splits a group.
  c10::intrusive_ptr<Options> getBackendOptions() override;

  // Of ours, beside c10d's interface.
  Topology topology() const;  // with what its links carry now
  bool is_one_node() const { return group().topology().is_one_node(); }
  std::map<std::string, OperationStatistics> statistics() const { return group().statistics().by_name(); }
  CodecCounters coding() const { return group().statistics().coding().counters(); }
  // Of the links of its nodes; for groups of the same nodes. Empty before the first reconfiguration.
  KnownLinks known_links() const;
  // Of an operation such as "all_reduce" on fp32 tensors, `bytes` as in CollectiveSpec. ValueError for another name.
  std::vector<AlgorithmEstimate> estimates(const std::string& operation, int64_t bytes) const;
  std::chrono::milliseconds default_timeout() const { return timeouts_.get(); }
  std::shared_ptr<GroupRuntime> current_channels() const;  // other ones after a reconfiguration; null before the first
  // Collective: memory that the ranks of each node map, a part for each of them. DistBackendError when the sizes
  // differ.
  std::shared_ptr<SharedSegment> allocate_shared(int64_t bytes_per_rank);
  // Collective. Reductions whose bytes travel encoded by `compression.codec`, which must be the same on every rank, as
  // must its ranges; its residuals are this rank's own. fp32, fp16 or bf16 on the CPU, sum or average; 16-bit tensors
  // are summed in fp32 and rounded once. All ranks get the same bits. TypeError for other dtypes and devices,
  // ValueError for other operations and for ranges that are not the input's. `tensor`: [n], in place.
  c10::intrusive_ptr<c10d::Work> compressed_all_reduce(const at::Tensor& tensor, Compression compression,
                                                       const c10d::ReduceOp& op, bool is_asynchronous);
  // `output` [n] <- this rank's block of the reduced `input` [world_size * n].
  c10::intrusive_ptr<c10d::Work> compressed_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                           Compression compression, const c10d::ReduceOp& op,
                                                           bool is_asynchronous);
  // `output` [world_size * n] <- what every rank's `input` [n] decodes to, this rank's too. `item`, `node_output` as
  // below; the latter for fp32 only.
  c10::intrusive_ptr<c10d::Work> compressed_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                       Compression compression, bool is_asynchronous, uint64_t item = 0,
                                                       std::shared_ptr<NodeOutput> node_output = nullptr);
  // Collective, asynchronous: `output` [world_size * n] <- every rank's `input` [n], on the CPU. `item`: which of the
  // caller's things it is, from 1. Where ranks gather different ones, that is an error, though their sizes be the same.
  // `node_output`, of make_node_output: where it has data() at the end, that is the output, and `output` is untouched.
  c10::intrusive_ptr<c10d::Work> all_gather_item(const at::Tensor& output, const at::Tensor& input, uint64_t item,
                                                 std::shared_ptr<NodeOutput> node_output = nullptr);
  // Not collective, for one call of the two above: `bytes` of output that all ranks of this rank's node share (Note
  // [Node outputs]). Null where the group is on one node, or has no tensor pool.
  std::shared_ptr<NodeOutput> make_node_output(int64_t bytes);
  // Keeps the last operations from now on; for a torch that does not record them itself. Before the first operation.
  void start_recording();
  std::vector<RecordedOperation> recorded_operations() const;  // empty unless recording
  std::string prefix(const char* title) const;  // of errors: "zeropg:split" gives "[zeropg rank 3/8] split"
  // Throws DistBackendError when the group has failed or `peer` has left or died.
  void check_peer(const char* title, int32_t peer);
  // Shuts every group of this process down; for the interpreter's exit.
  static void shutdown_all();

  // Children are groups of their own, with the parent's options but for what `opts` says (null: nothing). They outlive
  // the parent. split() is called by every rank of this group with the ranks of its own child, in the child's order;
  // it returns null on a rank that is in none. merge() is called by the `size` ranks of the new group.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override;
  uint64_t split_count() const { return split_count_.load(); }
  // Called by the ranks that stay, also after others died: a group of them, in their order, with the old one's options.
  // It waits for what runs on the old group, or with torch's SHRINK_ABORT ends it. After it the old group is unusable.
  // The group's store must still be there. DistBackendError when a rank that should stay does not come in time.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                           const c10::intrusive_ptr<Options>& opts) override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts = {}) override;
  // Sums (or averages) sparse COO tensors; on the CPU. Waits: the sizes come from the peers.
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks = false) override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  // Where there is NCCL, which needs it: the operations between start and end begin together there. CPU operations
  // begin at once and end together.
  bool supportsCoalescing() const override { return has_cuda_; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  void setSequenceNumberForGroup() override {}  // starts at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void waitForPendingWorks() override;        // up to the group's timeout
  void enableCollectivesTiming() override {}  // Work::getDuration() always knows

  // Ends every operation with an error, on the peers too; never waits. The group stays unusable.
  void abort() override;
  // Ends what runs, and whatever is called later, with an error of this text; other ranks hear of it. Any thread.
  void fail(const std::string& why);
  // Gives running operations a few seconds to end, then leaves the group. A second call does nothing.
  void shutdown() override;

  // On the CPU: a tensor in memory that all ranks of the node share, which collectives of this group read and write
  // where it lies (README.md, tensors in shared memory). Contents are undefined. Not collective; the memory lives as
  // long as the tensor, also when the group is gone. DistBackendError when there is no room, ValueError for a negative
  // `numel`. For CUDA: NCCL's, refused where there is none.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long numel, at::TensorOptions options = {}) override;
  // For CUDA: NCCL's. Refused where there is none.
  void eagerConnectSingleDevice(at::Device device) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // Refused: each says what to use instead.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool isInitialized() override { return current_channels() != nullptr; }
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override { timeouts_.extend(timeout); }
  void startTimeEstimate() override;
  float endTimeEstimate() override;
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // Leaves the group for one of the ranks whose handles are given; the store of the first one must still be there.
  // Collective over the new members, done when it returns. Not while another thread uses the group. ValueError for
  // handles without this rank's and for a uuid that was used; DistBackendError naming the ranks that did not come.
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  // Collective where a tensor is given. See c10d_window.h.
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                    const c10d::GatherOptions& opts = {}) override;
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

 protected:
  // A backend of this class for a child.
  virtual c10::intrusive_ptr<c10d::Backend> make_child(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                       const c10::intrusive_ptr<BackendOptions>& options);
  BackendFactory cuda_factory();

 private:
  // Meets the other ranks in store_. Replaces the group that there was, which must be closed.
  void join(std::chrono::milliseconds timeout);
  GroupContext& group() const;  // DistBackendError before the first reconfiguration
  c10::intrusive_ptr<BackendOptions> child_options(const c10::intrusive_ptr<Options>& given) const;

  Call make_call(const char* title);
  c10::intrusive_ptr<c10d::Work> submit(Call call, c10d::OpType type, std::chrono::milliseconds timeout,
                                        bool is_asynchronous);
  c10::intrusive_ptr<c10d::Work> post(Call call, c10d::OpType type, const at::Tensor& data);  // a message
  c10::intrusive_ptr<ZeroWork> make_work(Call& call, c10d::OpType type, std::chrono::milliseconds timeout,
                                         std::shared_ptr<OperationHost> host);
  void record_collective(const std::vector<CollectiveArgs>& requests, const ZeroWork& work);
  void record_message(const at::Tensor& data, const ZeroWork& work);
  struct CoalescedCalls {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    bool has_cuda = false;       // the inner backend coalesces too
    std::exception_ptr error{};  // the first one of its messages
  };
  c10::intrusive_ptr<c10d::Work> coalesce(c10::intrusive_ptr<c10d::Work> work);
  c10::intrusive_ptr<c10d::Work> coalesce_message(const std::function<c10::intrusive_ptr<c10d::Work>()>& start);
  c10::intrusive_ptr<c10d::Work> run_barrier(const char* title, int64_t bytes, std::chrono::milliseconds timeout,
                                             bool is_asynchronous);
  // Null for CPU tensors and for none. The one place that decides by device.
  c10d::Backend* inner_for(const std::vector<at::Tensor>& tensors) {
    return tensors.empty() ? nullptr : inner_for(tensors[0]);
  }
  c10d::Backend* inner_for(const at::Tensor& tensor) { return tensor.defined() ? inner_for(tensor.device()) : nullptr; }
  c10d::Backend* inner_for(const c10::Device& device) { return device.is_cuda() ? &inner_backend(device) : nullptr; }
  c10d::Backend& inner_backend(const c10::Device& device);
  c10d::Backend& cuda_backend_for(const char* title);

  const c10::intrusive_ptr<c10d::Store> first_store_;
  c10::intrusive_ptr<c10d::Store> store_;  // part of first_store_ after a reconfiguration
  const c10::intrusive_ptr<BackendOptions> options_;
  Timeouts timeouts_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();  // life shared with groups that still end
  std::shared_ptr<FlightRecorder> recorder_;                        // life shared with its hook; null: not recording
  mutable std::mutex membership_mutex_;
  // Both null until the first reconfiguration where that is asked for. Written under membership_mutex_, which only
  // those take who may run beside a reconfiguration.
  const char* members_ = "";                // of describe_members
  std::shared_ptr<Planner> planner_;        // life shared with the queue, which plans anew what links have changed
  std::shared_ptr<GroupRuntime> channels_;  // life shared with close_all, which may be closing it
  mutable std::string handle_;              // guarded by membership_mutex_
  std::set<int64_t> uuids_;                 // of reconfigurations
  std::atomic<uint64_t> sequence_{0};       // of collectives
  std::atomic<uint64_t> messages_{0};       // of this rank
  std::atomic<uint64_t> split_count_{0};
  std::atomic<uint64_t> shrink_count_{0};
  std::atomic<uint64_t> monitored_count_{0};  // barriers

  const bool has_cuda_;
  std::mutex inner_mutex_;
  BackendFactory make_cuda_backend_;                      // guarded by inner_mutex_
  c10::intrusive_ptr<c10d::Backend> cuda_backend_;        // guarded by inner_mutex_
  std::map<std::thread::id, CoalescedCalls> coalescing_;  // per thread inside a block; guarded by inner_mutex_

  std::mutex split_mutex_;
  std::string last_child_name_;                                                             // guarded by split_mutex_
  c10::weak_intrusive_ptr<c10d::Backend> last_child_{c10::intrusive_ptr<c10d::Backend>()};  // guarded by split_mutex_
};

}  // namespace zeropg
