#include "sharding/optim/registry.h"

#include <c10/util/Exception.h>

#include <sstream>

#include "sharding/optim/adagrad.h"
#include "sharding/optim/adamw.h"
#include "sharding/optim/lion.h"
#include "sharding/optim/sgd.h"

namespace zeropg {
namespace {

struct Entry {
  std::string_view name;
  std::unique_ptr<Optimizer> (*make)(Isa isa);
};

template <WeightDecay kDecay, StateBits kBits>
std::unique_ptr<Optimizer> make_adam(Isa isa) {
  return std::make_unique<AdamW>(kDecay, kBits, isa);
}

constexpr Entry kOptimizers[] = {
    {"adagrad", [](Isa isa) -> std::unique_ptr<Optimizer> { return std::make_unique<Adagrad>(isa); }},
    {"adam", make_adam<WeightDecay::kCoupled, StateBits::k32>},
    {"adam_16bit", make_adam<WeightDecay::kCoupled, StateBits::k16>},
    {"adam_8bit", make_adam<WeightDecay::kCoupled, StateBits::k8>},
    {"adamw", make_adam<WeightDecay::kDecoupled, StateBits::k32>},
    {"adamw_16bit", make_adam<WeightDecay::kDecoupled, StateBits::k16>},
    {"adamw_8bit", make_adam<WeightDecay::kDecoupled, StateBits::k8>},
    {"lion", [](Isa isa) -> std::unique_ptr<Optimizer> { return std::make_unique<Lion>(isa); }},
    {"sgd", [](Isa isa) -> std::unique_ptr<Optimizer> { return std::make_unique<Sgd>(isa); }},
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(std::string_view name, Isa isa) {
  std::ostringstream known;
  for (const Entry& entry : kOptimizers) {
    if (entry.name == name) {
      return entry.make(isa);
    }
    known << ' ' << entry.name;
  }
  TORCH_CHECK_VALUE(false, "[zeropg] make_optimizer: no optimizer is named '", name, "'; the registry has",
                    known.str());
}

std::vector<std::string_view> optimizer_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kOptimizers) {
    names.push_back(entry.name);
  }
  return names;
}

}  // namespace zeropg
