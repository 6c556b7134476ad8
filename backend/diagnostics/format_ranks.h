// How errors name ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zeropg {

// "rank 3", "ranks 0, 2".
inline std::string format_ranks(const std::vector<int32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) text.append(i == 0 ? " " : ", ").append(std::to_string(ranks[i]));
  return text;
}

}  // namespace zeropg
