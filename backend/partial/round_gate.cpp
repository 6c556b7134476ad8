#include "backend/partial/round_gate.h"

#include <algorithm>
#include <cmath>

namespace zeropg {

namespace {

constexpr double kRounding = 1e-9;  // 0.1 * 30 is a little less than 3

int32_t least(int32_t ranks, double tolerance) {
  return ranks - static_cast<int32_t>(std::floor(tolerance * ranks + kRounding));
}

}  // namespace

RoundGate::RoundGate(int32_t ranks, double tolerance, int64_t rounds_per_step, int64_t max_steps_behind)
    : quorum_(std::max(1, least(ranks, tolerance))),
      rounds_per_step_(rounds_per_step),
      max_steps_behind_(max_steps_behind),
      counts_(ranks) {}

void RoundGate::note(int32_t rank, int64_t count) { counts_[rank] = std::max(counts_[rank], count); }

bool RoundGate::may_begin(int64_t round) const {
  const auto present = std::count_if(counts_.begin(), counts_.end(), [&](int64_t count) { return count > round; });
  const int64_t step = round / rounds_per_step_;
  const int64_t needed = (step - max_steps_behind_ + 1) * rounds_per_step_;
  return present >= quorum_ && *std::min_element(counts_.begin(), counts_.end()) >= needed;
}

std::vector<int32_t> RoundGate::missing(int64_t round) const {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < static_cast<int32_t>(counts_.size()); ++rank) {
    if (counts_[rank] <= round) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace zeropg
