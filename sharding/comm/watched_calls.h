// The calls of one communicator as its watch sees them: numbered in the order in which they begin.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <utility>

#include "sharding/comm/path_watch.h"

namespace zeropg {

class WatchedCalls {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  WatchedCalls() = default;  // nobody watches
  WatchedCalls(std::shared_ptr<PathWatch> watch, PathWatch::Kind kind) : watch_(std::move(watch)), kind_(kind) {}

  WorkPointer begun(WorkPointer work);  // returns it
  // Waits for `work`, of `what`, in sight of the watch where begun() was told of it. Throws as it does.
  void wait(const WorkPointer& work, const std::string& what);

 private:
  std::shared_ptr<PathWatch> watch_;  // shared with the model's other communicator
  PathWatch::Kind kind_ = PathWatch::kGather;
  std::unordered_map<const c10d::Work*, uint64_t> numbers_;  // of works that nobody has waited for
};

}  // namespace zeropg
