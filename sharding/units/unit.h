// A unit: the parameters that are made whole together, while one module (a transformer block, or the root) runs.
//
// Life of a unit in stage 3: pre_forward unshards, post_forward reshards, the hook on its outputs unshards again when
// their gradients arrive, and it is resharded when its last gradient has been taken. In stages 0 to 2 the fetch does
// nothing and the same path runs.
#pragma once

#include <string>
#include <vector>

#include "sharding/fetch/fetch.h"

namespace zeropg {

struct Unit {
  std::string name;
  std::vector<FlatParameter*> flats;
  int64_t numel = 0;  // without padding: the same on any number of ranks
  bool is_root = false;
  bool is_whole = false;
  int64_t running = 0;        // forwards of it that run, one inside another: it stays whole
  int64_t forwards = 0;       // since the last backward ended
  int64_t forward_began = 0;  // for the log, as is
  int64_t backward_began = 0;
  bool is_in_backward = false;     // between the hook on its outputs and its last gradient
  bool has_hooked_inputs = false;  // in the forward that runs: some input needs a gradient
  // In the forward that runs: some input needs a gradient and takes no hook (it is sparse), or the unit has called
  // itself.
  bool has_other_inputs = false;
  bool stays_whole = false;       // until the end of the backward
  bool waits_for_inputs = false;  // in backward: until those gradients are there, parameters may still be read

  void end_backward() {
    is_in_backward = false;
    waits_for_inputs = false;
    stays_whole = false;
    forwards = 0;
  }
};

}  // namespace zeropg
