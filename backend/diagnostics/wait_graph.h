// Who holds an operation up: a rank that is waited for may itself wait for another one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeropg {

// Whom a rank waits for, as far as anybody here knows; empty: nobody.
using WaitsOf = std::function<std::vector<int32_t>(int32_t rank)>;

struct WaitCulprits {
  // "; rank 1 itself waits for rank 2" for every rank that `rank` waits for, `awaited` at first and then those that
  // they wait for, as far as they wait for somebody.
  std::string chain;
  std::vector<int32_t> culprits;  // who does not; ascending. `awaited` where all wait in a circle
};
WaitCulprits find_culprits(int32_t rank, const std::vector<int32_t>& awaited, const WaitsOf& waits_of);

// "see what ranks 1, 2 do": the end of an error's text.
std::string advise_to_look_at(const std::vector<int32_t>& culprits);

}  // namespace zeropg
