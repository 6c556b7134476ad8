// What a program moves out of the memory that computes, between steps, until it brings it back: for one who needs the
// device for something else meanwhile, such as generation.
//
// What is away is out of reach: check() is asked by all that needs it. The state of optimizers is theirs to move.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/units/units.h"
#include "sharding/units/whole_units.h"

namespace zeropg {

class StateOffload {
 public:
  // kMasters: those that are apart from the parameters. kBuffers: memory for reductions, which is freed.
  enum State : uint32_t { kParameters = 1, kMasters = 2, kGradients = 4, kBuffers = 8, kAll = 15 };
  static State named(const std::string& name);  // "parameters", "masters", ...; ValueError

  StateOffload(const Communicator& communicator, const Units& units, WholeUnits& whole_units, GradientReducer& reducer)
      : communicator_(communicator), units_(units), whole_units_(whole_units), reducer_(reducer) {}

  // Moves `states` (bits of State), those that are away already aside, to host memory, page-locked if `pin_memory`;
  // `moves` false: only out of reach, where the host's memory is what computes. Nothing may be written and unsettled.
  // RuntimeError, before anything is moved, inside full_parameters and where gradients cannot be moved.
  void offload(uint32_t states, bool moves, bool pin_memory, bool non_blocking);
  void reload(bool non_blocking);
  uint32_t away() const { return away_; }

  // RuntimeError where one of `needed` is away.
  void check(uint32_t needed, const char* operation) const;

 private:
  const Communicator& communicator_;
  const Units& units_;
  WholeUnits& whole_units_;
  GradientReducer& reducer_;
  uint32_t away_ = 0;
  uint32_t moved_ = 0;  // of these, what is in other memory
};

}  // namespace zeropg
