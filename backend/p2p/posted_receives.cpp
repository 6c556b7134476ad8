#include "backend/p2p/posted_receives.h"

#include <algorithm>

namespace zeropg {

std::optional<PostedMessage> PostedReceives::take(int32_t peer, int32_t tag) {
  const auto found = std::find_if(queue_.begin(), queue_.end(), [&](const PostedMessage& posted) {
    const P2pMessage& message = posted.message;
    return message.route.tag == tag && (message.route.peer == peer || message.route.is_from_anybody());
  });
  if (found == queue_.end()) {
    return std::nullopt;
  }
  PostedMessage taken = std::move(*found);
  queue_.erase(found);
  return taken;
}

bool PostedReceives::wants_from(int32_t peer) const {
  return std::any_of(queue_.begin(), queue_.end(), [&](const PostedMessage& posted) {
    return posted.message.route.peer == peer || posted.message.route.is_from_anybody();
  });
}

bool PostedReceives::names(int32_t peer) const {
  return std::any_of(queue_.begin(), queue_.end(),
                     [&](const PostedMessage& posted) { return posted.message.route.peer == peer; });
}

}  // namespace zeropg
