// Gradients of a sharded model: collected from autograd into flat buckets, reduced over the ranks, kept for the
// optimizer.
//
// One bucket per trainable flat parameter. Buckets are sent in one fixed order whatever order autograd finishes in, so
// ranks always agree; a rank on which a parameter got no gradient contributes zeros. Gradients are averaged.
//
// Post-accumulate-grad hooks of users (an optimizer inside backward) run when backward has ended, so that they see the
// reduced gradient; hooks on the tensor itself see the local one.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"

namespace zeropg {

class GradientReducer {
 public:
  // What may be done with buckets while backward runs. Where backward itself communicates, in an order that ranks must
  // share, a wait could be for a rank that waits for this one; and where it does so in the reducer's own group, sending
  // would mix with it differently on each rank.
  enum class DuringBackward { kSendAndWait, kSend, kCollect };

  // `flats`: all that can be trained, in the order in which their buckets are sent: as backward finishes them, so that
  // one can travel while the next is filled.
  GradientReducer(Communicator& communicator, const ShardingOptions& options, const std::vector<FlatParameter*>& flats,
                  DuringBackward during_backward);
  ~GradientReducer();

  // Puts hooks on the gradient accumulators of what is trainable now.
  // `on_backward(flat)` is called before each gradient is taken, `on_gradient(flat)` after it. `alive` guards against
  // hooks that outlive the model.
  void install(const std::weak_ptr<void>& alive, std::function<void(FlatParameter&)> on_backward,
               std::function<void(FlatParameter&)> on_gradient);
  // Parameters of trainable flats that have been unfrozen, or that autograd has made a new accumulator for, take part
  // in backwards from now on.
  void notice_unfrozen();
  // Whether the autograd task that runs puts gradients into `.grad` of parameters: backward() does, grad() does not.
  bool will_accumulate() const;
  // False: backwards end as always, but gradients stay this rank's own, for an optimizer that averages something else.
  // Only where gradients are replicated. The same on every rank.
  void set_averages(bool averages) { averages_ = averages; }
  bool averages() const { return averages_; }
  // In this backward the bucket of `flat` is sent at the end: it may get more than one gradient.
  void hold_until_end(const FlatParameter& flat);

  // Called once at the start of every backward; `synchronize`: reduce at its end (false inside no_sync).
  void begin_backward(bool synchronize);
  // Sends what has not been sent, waits, makes gradients visible. Collective when begin_backward said synchronize; then
  // returns whether every rank passed the same `fingerprint`.
  bool finish_backward(uint64_t fingerprint);
  // Whether the backward that runs does that.
  bool synchronizes() const { return synchronize_; }
  // Runs the hooks of users that wait for reduced gradients, after finish_backward; what they raise comes out.
  void run_hooks();
  // Forgets a backward that raised, and with it all gradients: some are complete and some are not. Where there were
  // some before it, `.grad` says so, and check_not_lost raises until the user has dropped them.
  // Waits for what is on the wire; where a signal handler ends that, throws what it raised, to be called again.
  void abandon_backward();

  // Whether every slot of `flat` has got its gradient in this backward on this rank.
  bool is_complete(const FlatParameter& flat) const;

  // The averaged gradient of the flat's master range, in the master dtype, or undefined. Valid until the next backward.
  at::Tensor gradient(FlatParameter& flat);
  // Whether the optimizer should update this slot: some rank produced a gradient and the user did not drop it.
  bool has_gradient(const FlatParameter& flat, int64_t slot) const;
  // Sets accumulated gradients to zero and keeps them present (zero_grad(set_to_none=False)).
  void zero();
  void scale(double factor);
  // RuntimeError beginning with `context` where a backward that raised has taken earlier gradients with it.
  void check_not_lost(const std::string& context);
  // Makes every `.grad` whole, in the master dtype, until hide_full(), which takes this rank's slice of what is there
  // then. Collective. Hidden again where it throws.
  void show_full();
  void hide_full();
  // Whether the backward that runs would add to what show_full() shows, instead of to what it stands for.
  bool would_add_to_shown() const { return is_showing_full_ && will_accumulate(); }

  // Whether gradients wait for a backward outside of no_sync.
  bool has_unreduced_gradients();

  // Bytes of accumulated gradients and of buckets on this rank.
  int64_t gradient_bytes() const;
  // Bytes of what compression has still to make up for.
  int64_t residual_bytes() const { return options_.residuals == nullptr ? 0 : options_.residuals->bytes(); }
  int64_t bucket_bytes() const { return pool_.allocated_bytes(); }

 private:
  struct Slot;
  struct Bucket;

  void install(Bucket& bucket);
  void take_gradient(Bucket& bucket, Slot& slot);
  void open(Bucket& bucket);
  void release_buffer(Bucket& bucket);
  void launch_ready();
  void launch(Bucket& bucket);
  void finish_some();
  void finish(Bucket& bucket);
  void absorb(Bucket& bucket);
  void renew_kept(Bucket& bucket);
  void give_hooks_back();
  at::Tensor make_kept(const Bucket& bucket);
  bool has_users(const Bucket& bucket);
  void leave_kept_to_users(Bucket& bucket, bool keeps_values);
  void drop(Bucket& bucket, Slot& slot);
  void replace(Bucket& bucket, Slot& slot, const at::Tensor& theirs);
  bool share_which_slots_have_gradients(uint64_t fingerprint);
  void show_gradients();
  void show(Bucket& bucket, Slot& slot);
  void show_full(Bucket& bucket);
  at::Tensor gather(const Bucket& bucket);  // [total_numel], collective
  Bucket& bucket_of(const FlatParameter& flat);
  const Bucket& bucket_of(const FlatParameter& flat) const;
  int64_t kept_start(const Bucket& bucket) const;
  int64_t kept_numel(const Bucket& bucket) const;
  at::Tensor kept_part(const Bucket& bucket, const Slot& slot, int64_t* start) const;

  Communicator& communicator_;
  ShardingOptions options_;
  std::vector<Bucket> buckets_;  // in the order in which they are sent
  BufferPool pool_;
  std::weak_ptr<void> alive_;
  std::function<void(FlatParameter&)> on_backward_;
  std::function<void(FlatParameter&)> on_gradient_;
  size_t next_to_launch_ = 0;
  bool synchronize_ = true;
  bool averages_ = true;
  DuringBackward during_backward_;
  bool is_showing_full_ = false;
};

}  // namespace zeropg
