#include "backend/p2p/copy_path_tuner.h"

#include <algorithm>
#include <bit>

namespace zeropg {

Path CopyPathTuner::next(uint64_t bytes) {
  SizeClass& size_class = class_of(bytes);
  const auto& [read, receive] = size_class.records;
  const uint64_t asked = size_class.asked++;
  if (std::min(read.count, receive.count) < kTrials) {
    return read.count <= receive.count ? Path::kRead : Path::kReceive;
  }
  const bool takes_faster = asked % kRetryEvery != 0;
  return (read.fastest() <= receive.fastest()) == takes_faster ? Path::kRead : Path::kReceive;
}

void CopyPathTuner::note(Path path, uint64_t bytes, double seconds) {
  Record& record = class_of(bytes).records[static_cast<size_t>(path)];
  record.seconds_per_byte[record.count++ % kTrials] = seconds / static_cast<double>(std::max<uint64_t>(1, bytes));
}

double CopyPathTuner::Record::fastest() const {
  return *std::min_element(seconds_per_byte.begin(), seconds_per_byte.end());
}

CopyPathTuner::SizeClass& CopyPathTuner::class_of(uint64_t bytes) {
  constexpr int kFirstClassBits = 19;
  const int above = std::max(0, static_cast<int>(std::bit_width(std::max<uint64_t>(1, bytes) - 1)) - kFirstClassBits);
  return classes_[std::min<size_t>(classes_.size() - 1, static_cast<size_t>((above + 1) / 2))];
}

}  // namespace zeropg
