#include "sharding/gradients/gradient_buffer.h"

#include <utility>

namespace zeropg {

// Residuals have the names of parameters: buckets depend on units, stage and world.
void GradientBuffer::choose_compression() {
  const ShardingOptions& options = context_.options;
  if (!flat_.is_encoded()) {
    compression_ = {};
    return;
  }
  compression_ = {.codec = options.codec, .residuals = options.residuals, .ranges = {}};
  if (options.residuals == nullptr) {
    return;
  }
  int64_t end = 0;
  for (const ParameterSlot& slot : flat_.slots()) {
    compression_.ranges.push_back({"", 0, slot.offset - end});
    compression_.ranges.push_back({slot.names.front(), 0, slot.numel});
    end = slot.offset + slot.numel;
  }
  compression_.ranges.push_back({"", 0, flat_.layout().total_numel - end});
}

void GradientBuffer::open(bool synchronize) {
  const int64_t numel = flat_.layout().total_numel;
  // Inside no_sync gradients of several backwards are summed here, so they get the master's precision.
  const c10::ScalarType dtype = synchronize ? reduce_dtype() : flat_.master_dtype();
  const bool in_place = !context_.options.stage.shards_gradients && !kept_.is_valid() && dtype == flat_.master_dtype();
  values_ = in_place ? kept_.values() : context_.pool.acquire(numel, dtype, flat_.device());
  int64_t end = 0;  // padding takes part in sums and norms, so it must be zero
  for (const ParameterSlot& slot : flat_.slots()) {
    values_.narrow(0, end, slot.offset - end).zero_();
    end = slot.offset + slot.numel;
  }
  values_.narrow(0, end, numel - end).zero_();
}

void GradientBuffer::zero() {
  if (is_open()) {
    values_.zero_();
  }
}

void GradientBuffer::close() {
  if (is_open() && !is_in_place()) {
    context_.pool.release(values_);
  }
  values_.reset();
}

void GradientBuffer::launch() {
  Communicator& communicator = context_.communicator;
  const c10::ScalarType dtype = reduce_dtype();
  // To the dtype of the wire, where the buffer was opened inside no_sync.
  if (values_.scalar_type() != dtype) {
    at::Tensor cast = context_.pool.acquire(values_.numel(), dtype, flat_.device());
    cast.copy_(values_);
    close();
    values_ = std::move(cast);
  }
  phase_ = Phase::kInFlight;
  reduced_ = values_;
  if (communicator.world_size() == 1) {
    return;
  }
  // Everybody's whole average, or this rank's slice of it.
  if (!context_.options.stage.shards_gradients) {
    if (context_.averages) work_ = communicator.all_reduce_average(values_, compression_);
    return;
  }
  const bool in_place = !kept_.is_valid() && dtype == flat_.master_dtype();
  reduced_ = in_place ? kept_.values() : context_.pool.acquire(kept_.numel(), dtype, flat_.device());
  work_ = communicator.reduce_scatter_average(reduced_, values_, compression_);
}

void GradientBuffer::finish() {
  if (work_) {
    context_.communicator.wait(work_);
    work_.reset();
  }
  kept_.accept(reduced_);
  if (!reduced_.is_alias_of(kept_.values()) && !reduced_.is_alias_of(values_)) {
    context_.pool.release(reduced_);
  }
  reduced_.reset();
  close();
  kept_.set_valid(true);
  phase_ = Phase::kReduced;
}

void GradientBuffer::abandon() {
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
  if (reduced_.defined() && !reduced_.is_alias_of(values_) && !reduced_.is_alias_of(kept_.values())) {
    context_.pool.release(reduced_);
  }
  reduced_.reset();
  close();
  phase_ = Phase::kCollecting;
}

}  // namespace zeropg
