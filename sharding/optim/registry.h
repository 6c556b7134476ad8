// The optimizers with a kernel of our own, by name.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "sharding/optim/elementwise.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

// ValueError with the list of known names if there is none. `isa` is for tests: it changes the speed, never the result.
std::unique_ptr<Optimizer> make_optimizer(std::string_view name, Isa isa = best_isa());

std::vector<std::string_view> optimizer_names();

}  // namespace zeropg
