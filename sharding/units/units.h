// The units of a model and their flat parameters: which there are, and in what orders they come.
//
// Which of them are whole is in whole_units.h.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"
#include "sharding/units/model_source.h"
#include "sharding/units/unit.h"

namespace zeropg {

class Units {
 public:
  Units(const Communicator& communicator, const ShardingOptions& options, const ModelSource& source);

  Unit& operator[](int64_t index) { return units_[index]; }
  int64_t index_of(const Unit& unit) const { return &unit - units_.data(); }
  Unit& of(const FlatParameter& flat) { return units_[unit_of_.at(&flat)]; }
  Unit& root() { return units_.back(); }
  std::vector<Unit>& all() { return units_; }

  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }
  std::vector<FlatParameter*> flat_pointers() const;
  // The root first: its forward begins before those of the others.
  std::vector<FlatParameter*> forward_order() const;
  // What can be trained, in the order in which a backward finishes it.
  std::vector<FlatParameter*> backward_order() const;

 private:
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::vector<Unit> units_;  // the root comes last
  std::map<const FlatParameter*, int64_t> unit_of_;
};

}  // namespace zeropg
