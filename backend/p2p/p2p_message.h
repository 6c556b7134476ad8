// A send or a receive, as the channel of messages keeps it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "backend/engine/work.h"

namespace zeropg {

// `data` is contiguous and kept alive by `work`.
struct P2pMessage {
  c10::intrusive_ptr<ZeroWork> work;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  MessageRoute route;
};

struct PostedMessage {
  P2pMessage message;
  uint64_t order = 0;  // of posting, over all peers
  std::chrono::steady_clock::time_point start;
  double waiting_seconds = 0;  // for its peer
};

// What has ended; a null error is success.
using FinishedMessages = std::vector<std::pair<PostedMessage, std::exception_ptr>>;

}  // namespace zeropg
