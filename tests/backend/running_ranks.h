// Ranks of one group in this process as a program has them: on the process's engine.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backend/process_group/group_runtime.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {

class RunningRanks {
 public:
  explicit RunningRanks(const std::vector<std::string>& hosts,
                        const std::shared_ptr<const Hooks>& hooks = std::make_shared<Hooks>()) {
    for (const auto& rank : meet_on(hosts, small_group(), hooks)) {
      ranks_.push_back(GroupRuntime::open(rank, /*may_use_cma=*/true));
    }
  }
  ~RunningRanks() {
    on_every_rank(static_cast<int32_t>(ranks_.size()),
                  [&](int32_t rank) { ranks_[rank]->close(std::chrono::seconds(5)); });
  }
  RunningRanks(const RunningRanks&) = delete;
  RunningRanks& operator=(const RunningRanks&) = delete;

  const std::shared_ptr<GroupRuntime>& operator[](int32_t rank) { return ranks_[rank]; }

 private:
  std::vector<std::shared_ptr<GroupRuntime>> ranks_;
};

}  // namespace zeropg
