// What the queues of a group share as hosts of its works.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "backend/engine/work.h"
#include "backend/group/group_context.h"

namespace zeropg {

class QueueOfGroup : public OperationHost {
 public:
  explicit QueueOfGroup(std::shared_ptr<GroupContext> group) : group_(std::move(group)) {}

  void forget(const ZeroWork& work) final { group_->retired_works().remove(work); }

 protected:
  // `own`: a work that the calling thread waits for, so that it has an owner. A null `error` is success.
  void end_work(c10::intrusive_ptr<ZeroWork> work, const std::exception_ptr& error, const ZeroWork* own) {
    std::function<void()> callback;
    if (work.get() == own) {
      callback = work->complete(error);
    } else {
      ZeroWork& ending = *work;
      group_->retired_works().add(std::move(work), [&] { callback = ending.complete(error); });
    }
    if (callback) group_->run_in_background(std::move(callback));
  }

  const std::shared_ptr<GroupContext> group_;  // life shared with the process group
};

}  // namespace zeropg
