// What is known of a model before it is sharded: its units, and how to get their parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

// What is known of one unit before its parameters have memory: ungrouped, in named_parameters() order.
struct UnitSource {
  std::string name;
  std::vector<FlatParameter::Source> parameters;
};

// The units of a model, of which the last is the root.
struct ModelSource {
  std::vector<UnitSource> units;
  c10::Device device;
  std::vector<int64_t> order;  // in which units are taken over: every index once, the same on every rank
  // The parameters of a unit, as its UnitSource has them; asked for once, when the units before it have been taken
  // over.
  std::function<std::vector<ParameterTensors>(int64_t unit)> take;
};

}  // namespace zeropg
