#include "sharding/gradients/flat_gradient.h"

#include <ATen/ops/from_blob.h>

#include <utility>

namespace zeropg {

// Residuals have the names of parameters: buckets depend on units, stage and world.
Compression FlatGradient::compression() const {
  const ShardingOptions& options = context_.options;
  if (!flat_.is_encoded()) {
    return {};
  }
  CodecRow row = options.codecs.of(flat_.layout().total_numel);
  Compression compression{.codec = std::move(row.codec), .meter = options.meter};
  if (!row.has_error_feedback) {
    return compression;
  }
  compression.residuals = options.residuals;
  int64_t end = 0;
  for (const ParameterSlot& slot : flat_.slots()) {
    compression.ranges.push_back({"", 0, slot.offset - end});
    compression.ranges.push_back({slot.names.front(), 0, slot.numel});
    end = slot.offset + slot.numel;
  }
  compression.ranges.push_back({"", 0, flat_.layout().total_numel - end});
  return compression;
}

// --- what is collected, and its reduction ---

void FlatGradient::open(const std::vector<GradientSlot>& slots, bool synchronize) {
  if (!average_.is_kept()) {
    average_.make_room(slots);
  }
  const int64_t numel = flat_.layout().total_numel;
  // Inside no_sync gradients of several backwards are summed here, so they get the master's precision.
  const c10::ScalarType dtype = synchronize ? reduce_dtype() : flat_.master_dtype();
  const bool in_place = !average_.is_sharded() && !average_.is_kept() && dtype == flat_.master_dtype();
  collected_ = in_place ? average_.values() : context_.pool.acquire(numel, dtype, flat_.device());
  int64_t end = 0;  // padding takes part in sums and norms, so it must be zero
  for (const ParameterSlot& slot : flat_.slots()) {
    collected_.narrow(0, end, slot.offset - end).zero_();
    end = slot.offset + slot.numel;
  }
  collected_.narrow(0, end, numel - end).zero_();
}

void FlatGradient::launch() {
  Communicator& communicator = context_.communicator;
  const c10::ScalarType dtype = reduce_dtype();
  // To the dtype of the wire, where the buffer was opened inside no_sync.
  if (collected_.scalar_type() != dtype) {
    at::Tensor cast = context_.pool.acquire(collected_.numel(), dtype, flat_.device());
    cast.copy_(collected_);
    release(collected_);
    collected_ = std::move(cast);
  }
  const Compression compression = this->compression();
  pay_debts(compression.residuals != nullptr);
  phase_ = Phase::kInFlight;
  reduced_ = collected_;
  if (communicator.world_size() == 1) {
    return;
  }
  began_ = communicator.log()->now();
  // Everybody's whole average, or this rank's slice of it.
  if (!average_.is_sharded()) {
    if (context_.averages) work_ = communicator.all_reduce_average(collected_, compression);
    return;
  }
  if (compression.codec == nullptr && communicator.scatters_by_all_reduce(flat_.device())) {
    work_ = communicator.all_reduce_average(collected_, compression);
    reduced_ = collected_.narrow(0, average_.start(), average_.numel());
    return;
  }
  const bool in_place = !average_.is_kept() && dtype == flat_.master_dtype();
  reduced_ = in_place ? average_.values() : context_.pool.acquire(average_.numel(), dtype, flat_.device());
  work_ = communicator.reduce_scatter_average(reduced_, collected_, compression);
}

void FlatGradient::pay_debts(bool codec_pays_its_own) {
  if (context_.options.residuals == nullptr) return;
  pay(kArrearsHop, 1);
  if (codec_pays_its_own) return;
  const Communicator& communicator = context_.communicator;
  // Between replicas the averages of slices are encoded, otherwise what ranks contribute.
  pay(kContributionHop, communicator.replicas() > 1 ? communicator.shards() : 1);
  pay(kResultHop, communicator.world_size());
}

// Parameters are whole in the buffer, so ranges of their residuals are ranges of it.
void FlatGradient::pay(ResidualHop hop, int64_t factor) {
  for (const ParameterSlot& slot : flat_.slots()) {
    for (const ResidualSegment& owed : context_.options.residuals->take(slot.names.front(), hop)) {
      const auto numel = static_cast<int64_t>(owed.values->size());
      TORCH_CHECK_VALUE(owed.start >= 0 && owed.start + numel <= slot.numel, "[zeropg] residuals of '",
                        slot.names.front(), "' reach to element ", owed.start + numel, ", and it has ", slot.numel);
      collected_.narrow(0, slot.offset + owed.start, numel)
          .add_(at::from_blob(owed.values->data(), {numel}, at::kFloat), factor);
    }
  }
}

void FlatGradient::let_go() {
  if (work_) {
    context_.communicator.wait_until_read(work_);
  }
  if (!reduced_.is_alias_of(collected_)) {
    release(collected_);
  }
}

void FlatGradient::finish() {
  if (work_) {
    context_.communicator.wait(work_, EventLog::Kind::kWaitForReduce, flat_.unit_name());
    context_.communicator.log()->add(
        EventLog::Kind::kReduce, flat_.unit_name(), began_,
        flat_.layout().total_numel * static_cast<int64_t>(c10::elementSize(reduce_dtype())));
    work_.reset();
  }
  average_.take(reduced_);
  release(reduced_);
  release(collected_);
  phase_ = Phase::kReduced;
}

void FlatGradient::abandon() {
  if (work_) {
    // Where the group has failed, its own error is raised by the next collective. Anything else is what a signal
    // handler raised: the work still runs, so it and its buffers stay until the next call.
    try {
      context_.communicator.wait(work_);
    } catch (const c10::Error&) {
    } catch (...) {
      if (work_->isCompleted()) {
        work_.reset();
      }
      throw;
    }
    work_.reset();
  }
  release(reduced_);
  drop();
  phase_ = Phase::kCollecting;
}

// Gives memory back to the pool, unless it is the average's, or collected_ has it too.
void FlatGradient::release(at::Tensor& buffer) {
  const at::Tensor memory = std::exchange(buffer, at::Tensor());
  const auto is_in = [&](const at::Tensor& other) { return other.defined() && memory.is_alias_of(other); };
  if (memory.defined() && !is_in(average_.values()) && !is_in(collected_)) {
    context_.pool.release(memory);
  }
}

// --- both ---

void FlatGradient::drop() {
  average_.drop();
  release(collected_);
}

void FlatGradient::zero() {
  average_.zero();
  if (is_open()) {
    collected_.zero_();
  }
}

}  // namespace zeropg
