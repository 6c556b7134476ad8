#include "sharding/comm/communicate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>
#include <utility>

#include "backend/diagnostics/notices.h"
#include "backend/process_group/process_group.h"
#include "sharding/comm/pair_average.h"

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

using WorkPointer = c10::intrusive_ptr<c10d::Work>;

WorkPointer gather(const RankGroups::Group& group, const at::Tensor& whole, const at::Tensor& part) {
  at::Tensor output = movable(whole);
  at::Tensor input = movable(part);
#if TORCH_VERSION_MINOR >= 15
  return group->all_gather_single(output, input);
#else
  return group->_allgather_base(output, input);
#endif
}

bool has_gloo(const RankGroups::Group& group) { return group->getBackend(at::kCPU)->getBackendName() == "gloo"; }

// How gloo, which divides after its sum, averages over the group. In fp16 the sum may overflow where the average does
// not: there `values` are divided before.
c10d::ReduceOp::RedOpType prepare_average(const RankGroups::Group& group, const at::Tensor& values) {
  if (values.scalar_type() != at::kHalf || !values.is_cpu() || !has_gloo(group)) return c10d::ReduceOp::AVG;
  at::NoGradGuard no_grad;
  at::Tensor(values).div_(group->getSize());
  return c10d::ReduceOp::SUM;
}

// `whole` may change.
WorkPointer reduce_scatter(const RankGroups::Group& group, const at::Tensor& part, const at::Tensor& whole) {
  at::Tensor output = part;
  at::Tensor input = whole;
  c10d::ReduceScatterOptions options;
  options.reduceOp = prepare_average(group, whole);
#if TORCH_VERSION_MINOR >= 15
  return group->reduce_scatter_single(output, input, options);
#else
  return group->_reduce_scatter_base(output, input, options);
#endif
}

WorkPointer all_reduce(const RankGroups::Group& group, const at::Tensor& whole, c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors{whole};
  return group->allreduce(tensors, options);
}

WorkPointer average(const RankGroups::Group& group, const at::Tensor& whole) {
  return all_reduce(group, whole, prepare_average(group, whole));
}

WorkPointer broadcast_in(const RankGroups::Group& group, const at::Tensor& whole, int64_t root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{movable(whole)};
  return group->broadcast(tensors, options);
}

// What carries the group's CPU tensors, unless it is another backend.
ProcessGroupZero* find_zeropg(const RankGroups::Group& group) {
  return dynamic_cast<ProcessGroupZero*>(group->getBackend(at::kCPU).get());
}

// The ranges of elements [start, start + numel).
std::vector<ResidualRange> ranges_in(const std::vector<ResidualRange>& ranges, int64_t start, int64_t numel) {
  std::vector<ResidualRange> result;
  int64_t at = 0;
  for (const ResidualRange& range : ranges) {
    const int64_t from = std::max(start, at);
    const int64_t to = std::min(start + numel, at + range.numel);
    if (from < to) {
      result.push_back({range.name, range.start + from - at, to - from});
    }
    at += range.numel;
  }
  return result;
}

// Every rank's `mine` [n], on the CPU, as [size, n]. Waits for all of them.
at::Tensor gather_to_host(Communicator& communicator, const RankGroups::Group& group, const at::Tensor& mine,
                          c10::Device device) {
  const at::Tensor own = mine.to(device);
  const at::Tensor all = at::empty({group->getSize(), own.numel()}, own.options());
  communicator.wait(communicator.watched_calls().begun(gather(group, all.view(-1), own)));
  return all.cpu();
}

}  // namespace

Communicator::Communicator(RankGroups groups, std::shared_ptr<EventLog> log)
    : groups_(std::move(groups)), log_(std::move(log)) {}

std::string Communicator::context(const char* operation) const {
  return c10::str("[zeropg rank ", rank(), "/", world_size(), "] ", operation, ": ");
}

// --- slices ---

WorkPointer Communicator::gather_slices(at::Tensor whole, at::Tensor part, uint64_t item,
                                        std::shared_ptr<NodeOutput> node_output) {
  if (item != 0 && compares_items(whole.device())) {
    return watched_.begun(
        zeropg_group(groups_.shards).all_gather_item(movable(whole), movable(part), item, std::move(node_output)));
  }
  return watched_.begun(gather(groups_.shards, whole, part));
}

bool Communicator::compares_items(c10::Device device) const {
  return device.is_cpu() && find_zeropg(groups_.shards) != nullptr;
}

WorkPointer Communicator::gather_slices_encoded(const at::Tensor& whole, const at::Tensor& part,
                                                const Compression& compression, uint64_t item,
                                                std::shared_ptr<NodeOutput> node_output) {
  return watched_.begun(
      zeropg_group(groups_.shards)
          .compressed_all_gather(whole, part, compression, /*is_asynchronous=*/true, item, std::move(node_output)));
}

int64_t Communicator::ranks_that_share_output() const {
  ProcessGroupZero* zeropg = find_zeropg(groups_.shards);
  if (zeropg == nullptr || zeropg->is_one_node() || !zeropg->supportsTensorAlloc(/*device=*/-1)) {
    return 1;
  }
  return static_cast<int64_t>(zeropg->topology().own_node().size());
}

std::shared_ptr<NodeOutput> Communicator::make_node_output(int64_t bytes) {
  return zeropg_group(groups_.shards).make_node_output(bytes);
}

WorkPointer Communicator::reduce_scatter_average(at::Tensor part, at::Tensor whole, const Compression& compression) {
  if (replicas() == 1) {
    if (compression.codec == nullptr && is_gloo(part.device()) && shards() == 2) {
      return c10::make_intrusive<PairAverage>(groups_.shards, part, whole, prepare_average(groups_.shards, whole));
    }
    return watched_.begun(compression.codec == nullptr
                              ? reduce_scatter(groups_.shards, part, whole)
                              : zeropg_group(groups_.shards)
                                    .compressed_reduce_scatter(part, whole, compression, c10d::ReduceOp::AVG,
                                                               /*is_asynchronous=*/true));
  }
  const auto average_replicas = [this, part, &compression]() -> std::function<WorkPointer()> {
    if (compression.codec == nullptr) {
      return [this, part] { return average(groups_.replicas, part); };
    }
    Compression of_slice = compression;
    of_slice.arrears_factor = static_cast<float>(shards());  // what is encoded is an average over these
    of_slice.ranges = ranges_in(compression.ranges, shard() * part.numel(), part.numel());
    return [this, part, of_slice = std::move(of_slice)] {
      return zeropg_group(groups_.replicas)
          .compressed_all_reduce(part, of_slice, c10d::ReduceOp::AVG, /*is_asynchronous=*/true);
    };
  }();
  if (shards() == 1) {
    if (!part.is_alias_of(whole)) {
      part.copy_(whole);
    }
    return average_replicas();
  }
  return two_hops_.add(reduce_scatter(groups_.shards, part, whole), average_replicas);
}

bool Communicator::is_gloo(c10::Device device) const { return device.is_cpu() && has_gloo(groups_.shards); }

bool Communicator::scatters_by_all_reduce(c10::Device device) const {
  return is_gloo(device) && replicas() == 1 && shards() > 2;
}

bool Communicator::is_same_on_shards(int64_t value, c10::Device device) {
  return shards() == 1 || gather_to_host(*this, groups_.shards, at::tensor(at::IntArrayRef(value), at::kLong), device)
                              .eq(value)
                              .all()
                              .item<bool>();
}

bool Communicator::has_read(const WorkPointer& work) {
  const auto* hops = dynamic_cast<const TwoHops*>(work.get());
  if (hops == nullptr) {
    return work->isCompleted();
  }
  two_hops_.issue_ready();
  return hops->is_issued();
}

void Communicator::wait_until_read(const WorkPointer& work) {
  const auto* hops = dynamic_cast<const TwoHops*>(work.get());
  if (hops == nullptr) {
    wait(work);
  } else {
    timed([&] { two_hops_.issue_to(*hops); });
  }
}

void Communicator::issue_second_hops() {
  timed([&] { two_hops_.issue_all(); });
}

// --- every rank of the model ---

WorkPointer Communicator::all_gather(at::Tensor whole, at::Tensor part) {
  return watched_.begun(gather(groups_.everybody, whole, part));
}

WorkPointer Communicator::all_reduce_average(at::Tensor whole, const Compression& compression) {
  if (compression.codec != nullptr) {
    return watched_.begun(
        zeropg_group(groups_.everybody)
            .compressed_all_reduce(whole, compression, c10d::ReduceOp::AVG, /*is_asynchronous=*/true));
  }
  return watched_.begun(average(groups_.everybody, whole));
}

WorkPointer Communicator::all_reduce_max(at::Tensor whole) {
  return watched_.begun(all_reduce(groups_.everybody, whole, c10d::ReduceOp::MAX));
}

WorkPointer Communicator::broadcast(const at::Tensor& whole, int64_t root) {
  return watched_.begun(broadcast_in(groups_.everybody, whole, root));
}

at::Tensor Communicator::gather_values(at::IntArrayRef values, c10::Device device) {
  return gather_to_host(*this, groups_.everybody, at::tensor(values, at::kLong), device);
}

// --- replicas of this rank's slice ---

WorkPointer Communicator::broadcast_to_replicas(const at::Tensor& part) {
  return broadcast_in(groups_.replicas, part, /*root=*/0);
}

at::Tensor Communicator::allocate(int64_t bytes, c10::Device device, bool for_slices) {
  const RankGroups::Group& group = for_slices ? groups_.shards : groups_.everybody;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  ProcessGroupZero* zeropg = device.is_cpu() && group->getSize() > 1 ? find_zeropg(group) : nullptr;
  if (zeropg != nullptr && zeropg->supportsTensorAlloc(device.index())) {
    try {
      return zeropg->allocateTensor(bytes, options);
    } catch (const c10::DistBackendError& error) {
      notice("buckets", c10::str(error.what_without_backtrace(), " Gradients use ordinary memory instead: slower."));
    }
  }
  return at::empty({bytes}, options);
}

ProcessGroupZero& Communicator::zeropg_group(const RankGroups::Group& group) const {
  ProcessGroupZero* zeropg = find_zeropg(group);
  TORCH_CHECK_VALUE(zeropg != nullptr, "[zeropg rank ", rank(), "/", world_size(),
                    "] compression: only zeropg's collectives carry codecs, and this group's backend is another one.");
  return *zeropg;
}

void Communicator::wait(const WorkPointer& work, EventLog::Kind purpose, const std::string& unit) {
  try {
    timed([&] { watched_.wait(work, unit); }, purpose, unit);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::runtime_error& error) {  // gloo's; what a signal handler raised is neither
    C10_THROW_ERROR(DistBackendError, c10::str("[zeropg rank ", rank(), "/", world_size(),
                                               "] a collective failed while this rank waited for the others; look at "
                                               "their logs: ",
                                               error.what()));
  }
}

void watch_paths(Communicator& gathers, Communicator& reductions, c10::intrusive_ptr<c10d::Store> store) {
  const std::array groups{gathers.groups().shards, reductions.groups().shards};
  const bool is_zeropg =
      std::all_of(groups.begin(), groups.end(), [](const auto& group) { return find_zeropg(group); });
  if (!store || gathers.replicas() > 1 || !is_zeropg) {
    return;
  }
  // Weak: the thread of the watch must not be the last to have a group.
  using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  const auto fail = [weak = std::array{WeakGroup(groups[0]), WeakGroup(groups[1])}](PathWatch::Kind kind,
                                                                                    const std::string& why) {
    if (const RankGroups::Group group = weak[kind].lock()) find_zeropg(group)->fail(why);
  };
  const auto watch = std::make_shared<PathWatch>(std::move(store), gathers.rank(), gathers.world_size(), fail);
  gathers.watched_calls() = WatchedCalls(watch, PathWatch::kGather);
  reductions.watched_calls() = WatchedCalls(watch, PathWatch::kReduction);
}

std::vector<double> gather_over_split(Communicator& communicator, int64_t split, std::vector<double> values,
                                      c10::Device device) {
  for (const RankGroups::Group& group : communicator.groups().splits.at(split)) {
    const at::Tensor here = gather_to_host(communicator, group, at::tensor(values, at::kDouble), device);
    values.assign(here.const_data_ptr<double>(), here.const_data_ptr<double>() + here.numel());
  }
  return values;
}

at::Tensor gather_values_of_parts(Communicator& communicator, at::IntArrayRef values, c10::Device device) {
  return gather_to_host(communicator, communicator.groups().parts, at::tensor(values, at::kLong), device);
}

}  // namespace zeropg
