// Keeps a group's connections to other nodes moving, also while no operation of this rank waits: peers read registered
// memory, and say that they fail or leave.
#pragma once

#include <chrono>
#include <memory>

#include "backend/engine/progress_engine.h"
#include "backend/group/group_context.h"

namespace zeropg {

class NetworkProgress final : public Channel {
 public:
  // Joins the engine, where the group has other nodes. Must be closed before the group goes.
  NetworkProgress(std::shared_ptr<GroupContext> group, ProgressEngine& engine);

  // Leaves the engine, then gives the last bytes up to `patience` to arrive. After every other channel of the group.
  void close(std::chrono::milliseconds patience, bool waits_for_callbacks);

  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override {}
  void set_sleeping(bool) override {}
  int32_t local_world_size() const override { return static_cast<int32_t>(group_->node().size()); }
  int descriptor() const override { return group_->network()->descriptor(); }
  bool arm() override { return group_->network()->arm(); }

 private:
  std::shared_ptr<GroupContext> group_;  // life shared with the process group
  ProgressEngine& engine_;
};

}  // namespace zeropg
