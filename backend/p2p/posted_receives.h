// Receives that have no message yet, in the order of their calls.
#pragma once

#include <deque>
#include <optional>
#include <utility>

#include "backend/p2p/p2p_message.h"

namespace zeropg {

class PostedReceives {
 public:
  void push(PostedMessage posted) { queue_.push_back(std::move(posted)); }
  // The earliest one that takes a message of this peer and tag.
  std::optional<PostedMessage> take(int32_t peer, int32_t tag);
  bool wants_from(int32_t peer) const;  // by name or from anybody
  bool names(int32_t peer) const;
  // Takes out those for which `serve` is true.
  template <typename Serve>
  bool take_if(const Serve& serve, FinishedMessages& finished) {
    bool has_any = false;
    for (auto it = queue_.begin(); it != queue_.end();) {
      if (!serve(*it)) {
        ++it;
        continue;
      }
      has_any = true;
      finished.emplace_back(std::move(*it), nullptr);
      it = queue_.erase(it);
    }
    return has_any;
  }
  const std::deque<PostedMessage>& queue() const { return queue_; }
  std::deque<PostedMessage> take_all() { return std::exchange(queue_, {}); }

 private:
  std::deque<PostedMessage> queue_;
};

}  // namespace zeropg
