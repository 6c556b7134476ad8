// The life of a backward: from the first gradient of an output or a parameter to the callback at its end, or to the
// cleaning up after one that raised.
//
// In stage 3 it makes units whole again when the gradients of their outputs arrive, and sharded when their last
// gradient has been taken. One thread at a time: the one that autograd runs it on.
#pragma once

#include <memory>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_listener.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/module/masters.h"
#include "sharding/module/state_offload.h"
#include "sharding/parameters/options.h"
#include "sharding/units/units.h"
#include "sharding/units/whole_units.h"

namespace zeropg {

class Backward final : public GradientListener {
 public:
  Backward(const Communicator& communicator, const ShardingOptions& options, Units& units, WholeUnits& whole_units,
           Masters& masters, GradientReducer& reducer, const StateOffload& state_offload)
      : communicator_(communicator),
        options_(options),
        units_(units),
        whole_units_(whole_units),
        masters_(masters),
        reducer_(reducer),
        state_offload_(state_offload) {}

  // `self`: this object, alive as long as all that it refers to. Puts hooks on parameters.
  void install(const std::weak_ptr<Backward>& self);
  // Frozen parameters that have been unfrozen get masters, and take part in backwards.
  void notice_unfrozen();
  // Whether the next backward reduces its gradients: false inside no_sync.
  void set_synchronize(bool synchronize) { synchronize_ = synchronize; }
  bool synchronizes() const { return synchronize_; }

  // A gradient of the unit's outputs has arrived: the unit's backward comes next. `waits_for_inputs`: inputs_done()
  // will say that it is over; `stays_whole`: nothing will, until the whole backward ends.
  void begin_unit(Unit& unit, bool waits_for_inputs, bool stays_whole);
  void inputs_done(Unit& unit);
  void before_gradient(FlatParameter& flat) override;
  void after_gradient(FlatParameter& flat) override;

  bool is_running() const { return is_running_; }
  // RuntimeError where `operation` is called by a hook of the backward that runs.
  void check_outside(const char* operation) const;
  // Reduces what backwards inside no_sync have left, as the end of a backward does. Collective. Outside of a backward.
  void reduce_accumulated();
  // Where a backward raised: drops its gradients, and makes all units sharded.
  void recover();

 private:
  void begin();
  void finish();
  void end_reduced();
  void maybe_reshard(Unit& unit);
  void end_unit(Unit& unit);  // for the log

  const Communicator& communicator_;
  const ShardingOptions& options_;
  Units& units_;
  WholeUnits& whole_units_;
  Masters& masters_;
  GradientReducer& reducer_;
  const StateOffload& state_offload_;
  std::weak_ptr<Backward> self_;
  bool synchronize_ = true;
  bool is_running_ = false;
  bool accumulates_ = false;    // it puts gradients into `.grad`: not autograd.grad()
  int task_ = -1;               // autograd's number of it
  bool creates_graph_ = false;  // what it makes reads parameters again: units stay whole until the backward through it
  std::weak_ptr<void> token_;   // lives as long as autograd means to call finish()
};

}  // namespace zeropg
