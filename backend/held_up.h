// Who holds an operation up: a rank that is waited for may itself wait for another one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeropg {

// Whom a rank waits for, as far as anybody here knows; empty: nobody.
using WaitsOf = std::function<std::vector<int32_t>(int32_t rank)>;

// "; rank 1 itself waits for rank 2" for every rank that `rank` waits for, `awaited` at first and then those that they
// wait for, so that whoever is in none of these sentences but at their ends is the one to look at. "": all of `awaited`
// are.
std::string describe_held_up(int32_t rank, const std::vector<int32_t>& awaited, const WaitsOf& waits_of);

}  // namespace zeropg
