#include "sharding/units/units.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace zeropg {
namespace {

// The parameters of a unit by (dtype, trainable or frozen, encoded or not, split), each group in the given order.
std::vector<std::vector<FlatParameter::Source>> group_sources(const std::vector<FlatParameter::Source>& sources) {
  std::vector<std::vector<FlatParameter::Source>> groups;
  std::map<std::tuple<c10::ScalarType, bool, bool, int64_t>, size_t> index;
  for (size_t i = 0; i < sources.size(); ++i) {
    const FlatParameter::Source& source = sources[i];
    const auto key = std::make_tuple(source.dtype, source.requires_grad, source.is_encoded, source.split);
    const auto [entry, is_new] = index.try_emplace(key, groups.size());
    if (is_new) {
      groups.emplace_back();
    }
    groups[entry->second].push_back(source);
    groups[entry->second].back().index = static_cast<int64_t>(i);
  }
  return groups;
}

}  // namespace

Units::Units(const Communicator& communicator, const ShardingOptions& options, const ModelSource& source) {
  for (const UnitSource& of_unit : source.units) {
    Unit unit;
    unit.name = of_unit.name;
    unit.is_root = &of_unit == &source.units.back();
    for (const FlatParameter::Source& parameter : of_unit.parameters) {
      unit.numel += c10::multiply_integers(parameter.sizes);
    }
    for (auto& group : group_sources(of_unit.parameters)) {
      flats_.push_back(std::make_unique<FlatParameter>(of_unit.name, std::move(group), options, source.device,
                                                       communicator.shard(), communicator.shards()));
      FlatParameter* flat = flats_.back().get();
      unit.flats.push_back(flat);
      unit_of_[flat] = static_cast<int64_t>(units_.size());
    }
    units_.push_back(std::move(unit));
  }
}

std::vector<FlatParameter*> Units::flat_pointers() const {
  std::vector<FlatParameter*> all;
  for (const auto& flat : flats_) {
    all.push_back(flat.get());
  }
  return all;
}

std::vector<FlatParameter*> Units::forward_order() const {
  std::vector<FlatParameter*> order = units_.back().flats;
  std::for_each(units_.begin(), units_.end() - 1,
                [&](const Unit& unit) { order.insert(order.end(), unit.flats.begin(), unit.flats.end()); });
  return order;
}

// Backward runs the units from last to first; the root, which holds the embedding, is done at the very end.
std::vector<FlatParameter*> Units::backward_order() const {
  std::vector<FlatParameter*> order;
  const auto append = [&](const Unit& unit) {
    std::copy_if(unit.flats.begin(), unit.flats.end(), std::back_inserter(order),
                 [](const FlatParameter* flat) { return c10::isFloatingType(flat->dtype()); });
  };
  std::for_each(units_.rbegin() + 1, units_.rend(), append);
  append(units_.back());
  return order;
}

}  // namespace zeropg
