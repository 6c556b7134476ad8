// A send or a receive, as the channel of messages keeps it.
#pragma once

#include <c10/core/ScalarType.h>

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
  at::ScalarType dtype = at::ScalarType::Byte;
};

struct PostedMessage {
  P2pMessage message;
  uint64_t order = 0;  // of posting, over all peers
  std::chrono::steady_clock::time_point start;
  double waiting_seconds = 0;  // for its peer
};

// Fails the receive unless the message that `source` sent for it has its size and dtype.
void check_fits(const P2pMessage& receive, int32_t source, uint64_t bytes, uint16_t dtype);

// What has ended; a null error is success.
using FinishedMessages = std::vector<std::pair<PostedMessage, std::exception_ptr>>;

}  // namespace zeropg
