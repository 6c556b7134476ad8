// The gradient of one flat parameter: what backwards collect of it on this rank, its reduction, and the average that is
// kept until the optimizer's step.
//
// It is collected in a buffer of the pool or, where the average is whole and none is kept yet, in the average's own
// memory. The average is in the master dtype: this rank's slice, or the whole where gradients are replicated. Where it
// is whole, `.grad` shows views of it, and users may keep them: it then moves to other memory before its values change.
#pragma once

#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_slot.h"
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

// `slots`: those of the flat parameter.
class FlatGradient {
 public:
  FlatGradient(BucketContext& context, const FlatParameter& flat)
      : context_(context), flat_(flat), is_sharded_(context.options.stage.shards_gradients) {}

  // The flat parameter has become trainable, and its slots have their names.
  void choose_compression();

  // What is collected: nothing, or a buffer that is open. Its padding is zero.
  bool is_open() const { return collected_.defined(); }
  bool is_in_place() const { return collected_.is_alias_of(average_); }
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
  // Waits for the reduction, and adds it to the average that is kept, or makes it that one.
  void finish();
  // Waits for what is on the wire and drops everything; where a signal handler ends that, throws what it raised, to be
  // called again.
  void abandon();

  // Whether an average is kept; otherwise average() is memory for the next one, undefined before the first.
  bool is_kept() const { return is_kept_; }
  const at::Tensor& average() const { return average_; }
  // The range of the masters, or undefined where there is no average.
  at::Tensor of_masters() const;
  // What this rank keeps of one slot; `start`, if not null: which element of the flattened parameter it begins with.
  at::Tensor kept(const ParameterSlot& slot, int64_t* start) const;
  at::Tensor gather() const;  // the whole average, [total_numel]; collective
  // Before the average is written: it is zero where none was kept, and what users have of it stays as it is.
  void keep(const std::vector<GradientSlot>& slots);
  // Whether move() may be called: nothing waits for its reduction, and `.grad` shows no views of what is kept.
  bool can_move() const { return !is_open() && (is_sharded_ || !is_kept_); }
  void move(const Move& move);  // what is kept, to other memory; memory for the next is freed
  int64_t average_bytes() const { return average_.defined() ? static_cast<int64_t>(average_.nbytes()) : 0; }

  // Of what is collected and of the average:
  void drop();
  void zero();
  void scale(double factor);  // of the average alone

 private:
  enum class Phase { kCollecting, kInFlight, kReduced };

  c10::ScalarType reduce_dtype() const { return context_.options.reduce_dtype.value_or(flat_.master_dtype()); }
  int64_t start() const { return is_sharded_ ? flat_.shard_start() : 0; }
  int64_t numel() const { return is_sharded_ ? flat_.layout().shard_numel : flat_.layout().total_numel; }
  void make_room(const std::vector<GradientSlot>& slots);  // for an average
  void allocate();
  bool has_users(const std::vector<GradientSlot>& slots) const;
  void release(at::Tensor& buffer);

  BucketContext& context_;
  const FlatParameter& flat_;
  const bool is_sharded_;
  Compression compression_;
  Phase phase_ = Phase::kCollecting;  // of the backward that runs
  at::Tensor collected_;              // [total_numel]; open over several backwards inside no_sync
  at::Tensor reduced_;                // what the reduction writes: a slice, collected_, or average_
  c10::intrusive_ptr<c10d::Work> work_;
  int64_t began_ = 0;    // work_, for the log
  at::Tensor average_;   // [numel()]
  size_t own_uses_ = 0;  // of its storage, by this object alone
  bool is_kept_ = false;
};

}  // namespace zeropg
