#include "backend/held_up.h"

#include <set>

#include "backend/transport/rank_names.h"

namespace zeropg {

std::string describe_held_up(int32_t rank, const std::vector<int32_t>& awaited, const WaitsOf& waits_of) {
  constexpr size_t kLongest = 8;  // sentences; the rest of a long queue says nothing new
  std::vector<int32_t> queue = awaited;
  std::set<int32_t> seen(awaited.begin(), awaited.end());
  seen.insert(rank);
  std::string text;
  size_t sentences = 0;
  for (size_t i = 0; i < queue.size() && sentences < kLongest; ++i) {
    const std::vector<int32_t> next = waits_of(queue[i]);
    if (next.empty()) continue;
    ++sentences;
    text += "; rank " + std::to_string(queue[i]) + " itself waits for " + format_ranks(next);
    for (const int32_t peer : next) {
      if (seen.insert(peer).second) queue.push_back(peer);
    }
  }
  return text;
}

}  // namespace zeropg
