// What the queues of a group share as hosts of its works.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "backend/engine/work.h"
#include "backend/group/group_context.h"

namespace zeropg {

class QueueOfGroup : public OperationHost {
 public:
  explicit QueueOfGroup(std::shared_ptr<GroupContext> group) : group_(std::move(group)) {}

  void run_callback(std::function<void()> callback) final { group_->run_in_background(std::move(callback)); }
  void forget(const ZeroWork& work) final { group_->retired_works().remove(work); }

 protected:
  const std::shared_ptr<GroupContext> group_;  // life shared with the process group
};

}  // namespace zeropg
