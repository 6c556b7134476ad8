// The gradient of one flat parameter: what backwards collect of it on this rank, and its reduction to the average that
// is kept until the optimizer's step.
//
// It is collected in a buffer of the pool or, where the average is whole and none is kept yet, in the average's own
// memory.
#pragma once

#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_average.h"
#include "sharding/gradients/gradient_slot.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"

namespace zeropg {

// What the buckets of one model share.
struct BucketContext {
  Communicator& communicator;
  ShardingOptions options;  // its codecs may change; what earlier ones have lost is still owed
  BufferPool pool;
  // False: backwards end as always, but gradients stay this rank's own, for an optimizer that averages something else.
  // Only where gradients are replicated.
  bool averages = true;
};

// `slots`: those of the flat parameter.
class FlatGradient {
 public:
  FlatGradient(BucketContext& context, const FlatParameter& flat)
      : context_(context), flat_(flat), average_(context.communicator, flat, context.options.stage.shards_gradients) {}

  // What is collected: nothing, or a buffer that is open. Its padding is zero.
  bool is_open() const { return collected_.defined(); }
  bool is_in_place() const { return collected_.is_alias_of(average_.values()); }
  // `synchronize`: this backward reduces it. Otherwise gradients of several backwards are summed in it.
  void open(const std::vector<GradientSlot>& slots, bool synchronize);
  at::Tensor collected(const ParameterSlot& slot) const { return collected_.narrow(0, slot.offset, slot.numel); }

  void begin_backward() { phase_ = Phase::kCollecting; }
  // Begins the reduction, once every slot has its values. Collective.
  void launch();
  bool is_launched() const { return phase_ != Phase::kCollecting; }
  bool is_in_flight() const { return phase_ == Phase::kInFlight; }
  bool is_reduced() const { return phase_ == Phase::kReduced; }
  bool must_wait() const { return work_ && !work_->isCompleted(); }  // finish() would
  // Whether the wire may still read what was collected; let_go() waits until it does not, and gives that memory back.
  bool is_held() const { return is_in_flight() && is_open(); }
  bool must_wait_to_let_go() const { return work_ && !context_.communicator.has_read(work_); }
  void let_go();
  // Waits for the reduction, which the average takes.
  void finish();
  // Waits for what is on the wire and drops everything; where a signal handler ends that, throws what it raised, to be
  // called again.
  void abandon();

  GradientAverage& average() { return average_; }
  const GradientAverage& average() const { return average_; }

  // Of what is collected and of the average:
  void drop();
  void zero();

 private:
  enum class Phase { kCollecting, kInFlight, kReduced };

  Compression compression() const;
  c10::ScalarType reduce_dtype() const { return context_.options.reduce_dtype.value_or(flat_.master_dtype()); }
  void release(at::Tensor& buffer);
  // Add to what is collected what earlier encodings have lost and the next one will not add itself
  // (error_feedback.h): of worlds of other sizes, and of a codec that is not used any more. Or what one hop has lost.
  void pay_debts(bool codec_pays_its_own);
  void pay(ResidualHop hop, int64_t factor);

  BucketContext& context_;
  const FlatParameter& flat_;
  GradientAverage average_;
  Phase phase_ = Phase::kCollecting;  // of the backward that runs
  at::Tensor collected_;              // [total_numel]; open over several backwards inside no_sync
  at::Tensor reduced_;                // what the reduction writes: a slice, collected_, or the average's memory
  c10::intrusive_ptr<c10d::Work> work_;
  int64_t began_ = 0;  // work_, for the log
};

}  // namespace zeropg
