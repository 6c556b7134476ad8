#include "backend/process_group/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace zeropg {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void FlightRecorder::record(RecordedOperation operation) {
  operation.created_ns = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  operation.id = ++recorded_;
  operations_.push_back(std::move(operation));
  if (operations_.size() > capacity_) {
    operations_.pop_front();
  }
}

// What completes is nearly always among the newest.
void FlightRecorder::complete(uint64_t completion_key, float duration_ms) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(operations_.rbegin(), operations_.rend(),
                                  [&](const auto& operation) { return operation.completion_key == completion_key; });
  if (found != operations_.rend()) {
    found->completed_ns = now_ns();
    found->duration_ms = duration_ms;
  }
}

std::vector<RecordedOperation> FlightRecorder::operations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {operations_.begin(), operations_.end()};
}

}  // namespace zeropg
