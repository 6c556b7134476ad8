// Gradients of a sharded model: collected from autograd into flat buckets, reduced over the ranks, kept for the
// optimizer.
//
// One bucket per trainable flat parameter. Buckets are sent in one fixed order whatever order autograd finishes in, so
// ranks always agree; a rank on which a parameter got no gradient contributes zeros. Gradients are averaged.
//
// Post-accumulate-grad hooks of users (an optimizer inside backward) run when backward has ended, so that they see the
// reduced gradient; hooks on the tensor itself see the local one.
#pragma once

#include <memory>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_bucket.h"
#include "sharding/gradients/gradient_listener.h"
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

  // Puts hooks on the gradient accumulators of what is trainable now. They outlive the model, and do nothing then:
  // while `listener` can be locked, the reducer is alive.
  void install(std::weak_ptr<GradientListener> listener);
  // Parameters of trainable flats that have been unfrozen, or that autograd has made a new accumulator for, take part
  // in backwards from now on.
  void notice_unfrozen();
  // Whether the autograd task that runs puts gradients into `.grad` of parameters: backward() does, grad() does not.
  bool will_accumulate() const;
  // How the next backwards reduce, to be changed between backwards, the same on every rank.
  BucketContext& context() { return context_; }
  // ValueError where `flat` is none of those that can be trained.
  const GradientBucket& bucket_of(const FlatParameter& flat) const;
  void hold_until_end(const FlatParameter& flat);  // GradientBucket::hold_until_end, of that one

  // Called once at the start of every backward; `synchronize`: reduce at its end (false inside no_sync).
  void begin_backward(bool synchronize);
  // Sends what has not been sent, waits, makes gradients visible. Collective when begin_backward said synchronize.
  void finish_backward();
  // Whether the backward that runs does that.
  bool synchronizes() const { return synchronize_; }
  // Runs the hooks of users that wait for reduced gradients, after finish_backward; what they raise comes out.
  void run_hooks();
  // Forgets a backward that raised, and with it all gradients: some are complete and some are not. Where there were
  // some before it, `.grad` says so, and check_not_lost raises until the user has dropped them.
  // Waits for what is on the wire; where a signal handler ends that, throws what it raised, to be called again.
  void abandon_backward();

  // The averaged gradient of the flat's master range, in the master dtype, or undefined. Valid until the next backward.
  at::Tensor gradient(const FlatParameter& flat);
  // Sets accumulated gradients to zero and keeps them present (zero_grad(set_to_none=False)).
  void zero();
  void scale(double factor, const std::vector<at::Tensor>* parameters = nullptr);  // null: of all
  // RuntimeError beginning with `context` where a backward that raised has taken earlier gradients with it.
  void check_not_lost(const std::string& context) const;
  // Makes every `.grad` whole, in the master dtype, until hide_full(), which takes this rank's slice of what is there
  // then. Collective. Hidden again where it throws.
  void show_full();
  void hide_full();
  // Whether the backward that runs would add to what show_full() shows, instead of to what it stands for.
  bool would_add_to_shown() const { return is_showing_full_ && will_accumulate(); }

  // RuntimeError beginning with `context` where gradients cannot be in other memory now.
  void check_can_move(const std::string& context);
  void move_gradients(const Move& move);  // GradientAverage::move, of all
  void free_buffers() { context_.pool.clear(); }

  // Whether gradients wait for a backward outside of no_sync.
  bool has_unreduced_gradients();

  // Bytes of accumulated gradients and of buckets on this rank.
  int64_t gradient_bytes() const;
  int64_t bucket_bytes() const { return context_.pool.allocated_bytes(); }

 private:
  void install(GradientBucket& bucket);
  void take_gradient(GradientBucket& bucket, GradientSlot& slot);
  void launch_ready();
  void finish_some();
  void share_which_slots_have_gradients();
  void absorb(GradientBucket& bucket);

  BucketContext context_;
  std::vector<std::unique_ptr<GradientBucket>> buckets_;  // in the order in which they are sent
  std::weak_ptr<GradientListener> listener_;
  size_t next_to_launch_ = 0;
  bool synchronize_ = true;
  DuringBackward during_backward_;
  bool is_showing_full_ = false;
};

}  // namespace zeropg
