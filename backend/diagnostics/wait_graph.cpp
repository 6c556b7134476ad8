#include "backend/diagnostics/wait_graph.h"

#include <algorithm>
#include <set>

#include "backend/diagnostics/format_ranks.h"

namespace zeropg {

WaitCulprits find_culprits(int32_t rank, const std::vector<int32_t>& awaited, const WaitsOf& waits_of) {
  constexpr size_t kLongest = 8;  // sentences; the rest of a long queue says nothing new
  std::vector<int32_t> queue = awaited;
  std::set<int32_t> seen(awaited.begin(), awaited.end());
  seen.insert(rank);
  WaitCulprits found;
  size_t sentences = 0;
  for (size_t i = 0; i < queue.size(); ++i) {
    const std::vector<int32_t> next = waits_of(queue[i]);
    if (next.empty()) {
      found.culprits.push_back(queue[i]);
    } else if (++sentences <= kLongest) {
      found.chain += "; rank " + std::to_string(queue[i]) + " itself waits for " + format_ranks(next);
    }
    for (const int32_t peer : next) {
      if (seen.insert(peer).second) queue.push_back(peer);
    }
  }
  if (found.culprits.empty()) found.culprits = awaited;
  std::sort(found.culprits.begin(), found.culprits.end());
  return found;
}

std::string advise_to_look_at(const std::vector<int32_t>& culprits) {
  return "see what " + format_ranks(culprits) + (culprits.size() == 1 ? " does" : " do");
}

}  // namespace zeropg
