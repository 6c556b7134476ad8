// Messages as a program posts them: a buffer, a work, and who it goes to or comes from.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/p2p/p2p_message.h"
#include "backend/transport/transport.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {

struct Message {
  std::vector<std::byte> data;  // behind a receive's bytes stand others, which nobody may touch
  int64_t bytes = 0;
  c10::intrusive_ptr<ZeroWork> work;
  P2pMessage message;

  std::vector<std::byte> received() const { return {data.begin(), data.begin() + bytes}; }
};

inline constexpr std::byte kUntouched{0xA5};
inline constexpr size_t kGuardBytes = 64;

inline bool is_guard_untouched(const Message& message) {
  for (size_t i = static_cast<size_t>(message.bytes); i < message.data.size(); ++i) {
    if (message.data[i] != kUntouched) return false;
  }
  return true;
}

inline Message make_message(bool is_send, int32_t rank, int32_t peer, int32_t tag, std::vector<std::byte> data,
                            std::chrono::milliseconds timeout, std::shared_ptr<OperationHost> host) {
  Message made;
  made.bytes = static_cast<int64_t>(data.size());
  made.data = std::move(data);
  made.data.resize(made.data.size() + kGuardBytes, kUntouched);
  const OperationLabel label{.rank = rank,
                             .world_size = 8,  // more than any test has: statistics have a place for each
                             .title = is_send ? "zeropg:send" : "zeropg:recv",
                             .sequence = 1,
                             .bytes = made.bytes,
                             .route = MessageRoute{.is_send = is_send, .peer = peer, .tag = tag}};
  const c10d::OpType type = is_send ? c10d::OpType::SEND : c10d::OpType::RECV;
  made.work = c10::make_intrusive<ZeroWork>(label, type, ZeroWork::Tensors(), OperationTimeout{.timeout = timeout},
                                            std::move(host));
  made.message = {.work = made.work, .data = made.data.data(), .bytes = made.bytes, .route = *label.route};
  return made;
}

inline Message make_send(int32_t rank, int32_t peer, int32_t tag, std::vector<std::byte> data,
                         std::shared_ptr<OperationHost> host, std::chrono::milliseconds timeout = kLongTimeout) {
  return make_message(/*is_send=*/true, rank, peer, tag, std::move(data), timeout, std::move(host));
}

inline Message make_receive(int32_t rank, int32_t peer, int32_t tag, int64_t bytes, std::shared_ptr<OperationHost> host,
                            std::chrono::milliseconds timeout = kLongTimeout) {
  return make_message(/*is_send=*/false, rank, peer, tag,
                      std::vector<std::byte>(static_cast<size_t>(bytes), kUntouched), timeout, std::move(host));
}

}  // namespace zeropg
