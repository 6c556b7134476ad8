// The local gradients of one flat parameter in one flat buffer, and its reduction over the ranks.
#pragma once

#include "sharding/comm/communicate.h"
#include "sharding/gradients/kept_gradient.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"

namespace zeropg {

// What the buckets of one model share.
struct BucketContext {
  Communicator& communicator;
  ShardingOptions options;
  BufferPool pool;
  bool averages = true;  // false: gradients stay this rank's own
};

// Closed, or open: then padding is zero, and the kept gradient has memory (KeptGradient::make_room), which the buffer
// may use in place.
class GradientBuffer {
 public:
  GradientBuffer(BucketContext& context, const FlatParameter& flat, KeptGradient& kept)
      : context_(context), flat_(flat), kept_(kept) {}

  // The flat parameter has become trainable, and its slots have their names.
  void choose_compression();

  bool is_open() const { return values_.defined(); }
  bool is_in_place() const { return values_.is_alias_of(kept_.values()); }
  // `synchronize`: this backward reduces it. Otherwise gradients of several backwards are summed in it.
  void open(bool synchronize);
  at::Tensor part(const ParameterSlot& slot) const { return values_.narrow(0, slot.offset, slot.numel); }
  void zero();
  void close();

  void begin_backward() { phase_ = Phase::kCollecting; }
  // Begins the reduction, once every part has its values. Collective.
  void launch();
  bool is_launched() const { return phase_ != Phase::kCollecting; }
  bool is_in_flight() const { return phase_ == Phase::kInFlight; }
  bool is_reduced() const { return phase_ == Phase::kReduced; }
  bool must_wait() const { return work_ && !work_->isCompleted(); }  // finish() would
  // Waits for the reduction, hands the average to the kept gradient, and closes.
  void finish();
  // Waits for what is on the wire and closes; where a signal handler ends that, throws what it raised, to be called
  // again.
  void abandon();

 private:
  enum class Phase { kCollecting, kInFlight, kReduced };

  c10::ScalarType reduce_dtype() const { return context_.options.reduce_dtype.value_or(flat_.master_dtype()); }

  BucketContext& context_;
  const FlatParameter& flat_;
  KeptGradient& kept_;
  Compression compression_;
  Phase phase_ = Phase::kCollecting;  // of the backward that runs
  at::Tensor values_;                 // [total_numel]; open over several backwards inside no_sync
  at::Tensor reduced_;                // what the reduction writes: a slice, the buffer, or the kept gradient itself
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace zeropg
