#include "backend/collectives/select/node_shares.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace zeropg {

namespace {

constexpr double kAlike = 1.1;  // the fastest link to the slowest one

// The nodes with the fastest links take part until the next one would get less than nothing.
std::vector<double> fill(const std::vector<double>& speeds) {
  std::vector<size_t> by_speed(speeds.size());
  std::iota(by_speed.begin(), by_speed.end(), size_t{0});
  std::stable_sort(by_speed.begin(), by_speed.end(), [&](size_t a, size_t b) { return speeds[a] > speeds[b]; });
  const double others = static_cast<double>(speeds.size()) - 2;
  double together = 0;
  double time = 0;
  double sharing = 0;
  for (const size_t node : by_speed) {
    if (sharing > 0 && speeds[node] * time <= 1) break;
    together += speeds[node];
    time = (++sharing + others) / together;
  }
  std::vector<double> shares(speeds.size());
  for (size_t node = 0; node < speeds.size(); ++node) shares[node] = std::max(0.0, (speeds[node] * time - 1) / others);
  return shares;
}

// Rounded sums instead of shares, so that all of them add up to the whole.
std::vector<int32_t> rounded(const std::vector<double>& shares) {
  std::vector<int32_t> result;
  double sum = 0;
  int32_t given = 0;
  for (const double share : shares) {
    sum += share;
    const int32_t until = std::min(kWholeShare, static_cast<int32_t>(sum * kWholeShare + 0.5));
    result.push_back(until - given);
    given = until;
  }
  return result;
}

// Of a byte, over the slowest link.
double longest_time(const std::vector<double>& speeds, const std::vector<int32_t>& shares) {
  const double others = static_cast<double>(speeds.size()) - 2;
  double longest = 0;
  for (size_t node = 0; node < speeds.size(); ++node) {
    longest = std::max(longest, (1 + others * shares[node] / kWholeShare) / speeds[node]);
  }
  return longest;
}

}  // namespace

std::vector<int32_t> node_shares(const CostModel& model, const std::vector<std::vector<int32_t>>& nodes) {
  const std::vector<double>& speeds = model.node_bytes_per_us;
  if (speeds.empty() || nodes.size() < 3) return {};
  if (speeds.size() != nodes.size()) {
    throw std::invalid_argument("node_shares: " + std::to_string(speeds.size()) + " link speeds for " +
                                std::to_string(nodes.size()) + " nodes; give one per node");
  }
  const auto [slowest, fastest] = std::minmax_element(speeds.begin(), speeds.end());
  if (*fastest <= kAlike * *slowest) return {};
  std::vector<int32_t> shares = rounded(fill(speeds));
  // Among hundreds of nodes a share is a few units, and its rounding may cost more than it brings.
  const double equal = 2 * (static_cast<double>(nodes.size()) - 1) / static_cast<double>(nodes.size()) / *slowest;
  if (longest_time(speeds, shares) >= equal) return {};
  return shares;
}

}  // namespace zeropg
