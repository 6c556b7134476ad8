// The last operations of one group with their sizes and states, where torch records none itself (2.11, which has no
// hooks for it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace zeropg {

struct RecordedOperation {
  uint64_t id = 0;              // of the group's recorded operations, from 1; what was dropped leaves a gap
  uint64_t completion_key = 0;  // see ZeroWork::completion_key
  std::string name{};           // "all_reduce", "send 0->1", "recv 1<-0"
  bool is_message = false;
  uint64_t sequence = 0;  // as OperationLabel's
  std::vector<std::vector<int64_t>> input_sizes{};
  std::vector<std::vector<int64_t>> output_sizes{};
  std::vector<std::string> input_dtypes{};
  std::vector<std::string> output_dtypes{};
  int64_t timeout_ms = 0;
  int64_t created_ns = 0;    // of the wall clock
  int64_t completed_ns = 0;  // 0: it has not completed
  float duration_ms = 0;
};

// Any thread.
class FlightRecorder {
 public:
  static constexpr size_t kCapacity = 2'000;  // as torch's own
  explicit FlightRecorder(size_t capacity = kCapacity) : capacity_(capacity) {}

  // Fills id and created_ns. Drops the oldest beyond the capacity.
  void record(RecordedOperation operation);
  // Without effect for an operation that was dropped.
  void complete(uint64_t completion_key, float duration_ms);
  std::vector<RecordedOperation> operations() const;  // oldest first

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::deque<RecordedOperation> operations_;  // guarded by mutex_
  uint64_t recorded_ = 0;                     // guarded by mutex_
};

}  // namespace zeropg
