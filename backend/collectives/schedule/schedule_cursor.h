// Reads a schedule step by step: runs its loops (Note [Loops] in schedule.h), and says of each step where it works in
// the chunk that is its turn.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// A step in a chunk of its loop.
struct SchedulePosition {
  size_t step = 0;
  int64_t chunk = 0;
};

class ScheduleCursor {
 public:
  explicit ScheduleCursor(const Schedule& schedule);  // at the first step; must outlive it

  bool is_done() const { return position_.step == schedule_->steps.size(); }
  // Unless done: the step as if it were alone, for one chunk. Valid until the cursor moves.
  const Step& step() const { return position_.chunk == 0 ? schedule_->steps[position_.step] : step_; }
  Region source(int32_t index) const;  // of the step's sources and echoes
  Region echo(int32_t index) const;
  const SchedulePosition& position() const { return position_; }

  void next();
  void restart() { *this = ScheduleCursor(*schedule_); }

 private:
  void enter_loop();
  void find_step();  // at or behind the current place of the loop, that has a chunk in this iteration or a later one

  const Schedule* schedule_;
  Step step_{};  // where chunk > 0
  SchedulePosition position_{};
  size_t loop_ = 0;
  size_t loop_begin_ = 0;
  size_t loop_end_ = 0;
  int64_t iteration_ = 0;
  int64_t iterations_ = 0;
};

// The same step, or region, of a later chunk.
Step step_of_chunk(const Step& step, int64_t chunk);
Region region_of_chunk(Region region, int64_t chunk);

// Of all chunks together.
int64_t total_bytes(const Step& step);
// How many steps a schedule runs, and how much memory it takes.
double steps_to_run(const Schedule& schedule);
size_t memory_bytes(const Schedule& schedule);

}  // namespace zeropg
