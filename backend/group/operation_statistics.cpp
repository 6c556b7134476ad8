#include "backend/group/operation_statistics.h"

#include <cstddef>

namespace zeropg {

void StatisticsTable::count(const OperationLabel& label, double seconds, const std::vector<double>& waiting_seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  OperationStatistics& statistics = statistics_[label.name()];
  ++statistics.calls;
  statistics.bytes += label.bytes;
  statistics.seconds += seconds;
  statistics.waiting_seconds.resize(static_cast<size_t>(label.world_size));
  for (size_t peer = 0; peer < waiting_seconds.size(); ++peer) {
    statistics.waiting_seconds[peer] += waiting_seconds[peer];
  }
}

void StatisticsTable::count_waiting(const OperationLabel& label, int32_t peer, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  OperationStatistics& statistics = statistics_[label.name()];
  statistics.waiting_seconds.resize(static_cast<size_t>(label.world_size));
  statistics.waiting_seconds[static_cast<size_t>(peer)] += seconds;
}

void StatisticsTable::count_direct(const OperationLabel& label) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++statistics_[label.name()].direct_calls;
}

std::map<std::string, OperationStatistics> StatisticsTable::by_name() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

}  // namespace zeropg
