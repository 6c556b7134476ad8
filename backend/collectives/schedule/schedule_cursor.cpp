#include "backend/collectives/schedule/schedule_cursor.h"

#include <algorithm>

namespace zeropg {

Region region_of_chunk(Region region, int64_t chunk) {
  switch (region.space) {
    case Space::kStaging:
      region.bank = static_cast<uint8_t>((region.bank + chunk) % 2);
      break;
    case Space::kScratch:
      region.offset_bytes += chunk % 2 * region.stride_bytes;
      break;
    default:
      region.offset_bytes += chunk * region.stride_bytes;
  }
  return region;
}

Step step_of_chunk(const Step& step, int64_t chunk) {
  Step one = step;
  one.destination = region_of_chunk(step.destination, chunk);
  one.source = region_of_chunk(step.source, chunk);
  one.residual = region_of_chunk(step.residual, chunk);
  if (chunk > 0 && chunk == step.chunks - 1) one.bytes = step.last_bytes;
  return one;
}

int64_t total_bytes(const Step& step) {
  return step.chunks == 1 ? step.bytes : (step.chunks - 1) * step.bytes + step.last_bytes;
}

double steps_to_run(const Schedule& schedule) {
  double steps = 0;
  for (const Step& step : schedule.steps) steps += static_cast<double>(step.chunks);
  return steps;
}

size_t memory_bytes(const Schedule& schedule) {
  return sizeof(Schedule) + schedule.steps.size() * sizeof(Step) + schedule.loop_ends.size() * sizeof(size_t) +
         (schedule.sources.size() + schedule.echoes.size()) * sizeof(Region);
}

ScheduleCursor::ScheduleCursor(const Schedule& schedule) : schedule_(&schedule) {
  enter_loop();
  find_step();
}

void ScheduleCursor::next() {
  ++position_.step;
  find_step();
}

Region ScheduleCursor::source(int32_t index) const {
  return region_of_chunk(schedule_->sources[step().first_source + index], position_.chunk);
}

Region ScheduleCursor::echo(int32_t index) const {
  return region_of_chunk(schedule_->echoes[step().first_echo + index], position_.chunk);
}

void ScheduleCursor::enter_loop() {
  const std::vector<Step>& steps = schedule_->steps;
  loop_begin_ = position_.step = loop_end_;
  loop_end_ = loop_ < schedule_->loop_ends.size() ? schedule_->loop_ends[loop_] : steps.size();
  iteration_ = 0;
  iterations_ = 0;
  for (size_t i = loop_begin_; i < loop_end_; ++i) {
    iterations_ = std::max(iterations_, steps[i].lag + steps[i].chunks);
  }
}

void ScheduleCursor::find_step() {
  const std::vector<Step>& steps = schedule_->steps;
  while (true) {
    for (; position_.step < loop_end_; ++position_.step) {
      const Step& step = steps[position_.step];
      position_.chunk = iteration_ - step.lag;
      if (position_.chunk < 0 || position_.chunk >= step.chunks) continue;
      if (position_.chunk > 0) step_ = step_of_chunk(step, position_.chunk);
      return;
    }
    if (++iteration_ < iterations_) {
      position_.step = loop_begin_;
    } else if (loop_end_ < steps.size()) {
      ++loop_;
      enter_loop();
    } else {
      position_ = {.step = steps.size()};
      return;
    }
  }
}

}  // namespace zeropg
