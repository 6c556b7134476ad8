#include "backend/diagnostics/group_members.h"

#include <mutex>
#include <string>
#include <unordered_set>

namespace zeropg {
namespace {

constexpr size_t kFewestInSteps = 4;  // below, a list is as short
constexpr size_t kMostListed = 64;

// What lies between each rank and the next, if that is always the same; otherwise 0.
uint64_t step_of(const std::vector<uint64_t>& ranks) {
  if (ranks.size() < 2 || ranks[1] <= ranks[0]) return 0;
  const uint64_t step = ranks[1] - ranks[0];
  for (size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] != ranks[0] + i * step) return 0;
  }
  return step;
}

std::string describe(const std::vector<uint64_t>& ranks) {
  const uint64_t step = step_of(ranks);
  if (ranks.empty() || (ranks[0] == 0 && (step == 1 || ranks.size() == 1))) return "";
  std::string text = ranks.size() == 1 ? " of global rank " : " of global ranks ";
  if (step != 0 && ranks.size() >= kFewestInSteps) {
    text += std::to_string(ranks.front()) + " to " + std::to_string(ranks.back());
    return step == 1 ? text : text + " by " + std::to_string(step);
  }
  for (size_t i = 0; i < ranks.size() && i < kMostListed; ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return ranks.size() > kMostListed ? text + ", ..." : text;
}

}  // namespace

const char* describe_members(const std::vector<uint64_t>& global_ranks) {
  static std::mutex mutex;
  static auto* const kept = new std::unordered_set<std::string>();  // texts of errors may outlive static objects
  const std::lock_guard<std::mutex> lock(mutex);
  return kept->insert(describe(global_ranks)).first->c_str();
}

}  // namespace zeropg
