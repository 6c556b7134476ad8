#include "backend/engine/network_progress.h"

namespace zeropg {

NetworkProgress::NetworkProgress(std::shared_ptr<GroupContext> group, ProgressEngine& engine)
    : group_(std::move(group)), engine_(engine) {
  if (group_->network() != nullptr) {
    engine_.add(this);
    engine_.wake();
  }
}

void NetworkProgress::close(std::chrono::milliseconds patience, bool waits_for_callbacks) {
  if (group_->network() != nullptr) {
    engine_.remove(this, waits_for_callbacks);
    group_->network()->close(patience);
  }
}

Activity NetworkProgress::advance_on_engine_thread() {
  return group_->network()->progress() ? Activity::kMoved : Activity::kIdle;
}

}  // namespace zeropg
