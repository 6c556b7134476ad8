// What the operations of one group have done so far, by kind.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "backend/group/operation_label.h"
#include "compression/codec_meter.h"

namespace zeropg {

// Counters of one kind of operation.
struct OperationStatistics {
  uint64_t calls = 0;
  uint64_t direct_calls = 0;  // of those, collectives that read and wrote tensors of other ranks where they lie
  int64_t bytes = 0;
  double seconds = 0;                   // from submission to completion
  std::vector<double> waiting_seconds;  // per rank: how long this rank was late for us
};

// Any thread.
class StatisticsTable {
 public:
  void count(const OperationLabel& label, double seconds, const std::vector<double>& waiting_seconds);
  void count_waiting(const OperationLabel& label, int32_t peer, double seconds);
  void count_direct(const OperationLabel& label);
  std::map<std::string, OperationStatistics> by_name() const;
  CodecMeter& coding() { return coding_; }  // of encoded calls that have no meter of their own

 private:
  mutable std::mutex mutex_;
  std::map<std::string, OperationStatistics> statistics_;  // guarded by mutex_
  CodecMeter coding_;
};

}  // namespace zeropg
