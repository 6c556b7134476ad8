// One-sided messages between nodes: what this rank puts into windows of ranks on other nodes, and what they put into
// its own.
//
// Note [Windows between nodes]
// A put is a message in a stream of its own (Lane::kOneSided): the window, the place in it, and the bytes. The progress
// thread of the receiver writes them there, whatever its program does; a signal behind them is counted after them. Who
// puts waits until the transport has taken all, so nothing is copied or queued here, and two ranks that put into each
// other's windows do not hold each other up: their progress threads never wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "backend/engine/progress_engine.h"
#include "backend/group/group_context.h"

namespace zeropg {

class WindowTraffic final : public Channel {
 public:
  // Where ranks of other nodes may write.
  struct Target {
    std::weak_ptr<void> memory;  // gone: what still comes is dropped
    std::byte* data = nullptr;
    int64_t bytes = 0;
    std::atomic<uint64_t>* signals = nullptr;  // one count per rank of the group
  };
  struct Address {
    int32_t peer = -1;    // on another node
    uint64_t window = 0;  // as it was opened there
  };

  // Of a group on several nodes, which `engine` advances.
  WindowTraffic(std::shared_ptr<GroupContext> group, ProgressEngine& engine);

  // Any thread. The result is the same on all ranks if they open the same windows in the same order.
  uint64_t open(Target target);
  void close(uint64_t window);

  // Both return when the transport has taken all. OperationError when the group fails, the peer is gone, or nothing
  // moves for `timeout`. `data` must fit into the peer's window.
  void put(const Address& to, int64_t offset, std::span<const std::byte> data, std::chrono::milliseconds timeout);
  void signal(const Address& to, std::chrono::milliseconds timeout);

  // Puts and signals since the group was made, by rank.
  std::vector<int64_t> sent() const;
  int64_t received(int32_t peer) const;

  // See Channel.
  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override {}
  void set_sleeping(bool /*is_sleeping*/) override {}
  int32_t local_world_size() const override { return static_cast<int32_t>(group_->topology().own_node().size()); }

 private:
  struct Header {
    static constexpr uint32_t kPut = 0x7a707574;     // "zput": catches a stream that got out of step
    static constexpr uint32_t kSignal = 0x7a736967;  // "zsig"

    uint32_t magic = 0;
    uint32_t unused = 0;
    uint64_t window = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  struct Outgoing {
    std::timed_mutex mutex;  // held for a whole message
    std::atomic<std::thread::id> holder{};
    std::atomic<int64_t> sent{0};
  };
  // This thread's turn to send to a peer, which it waits for.
  class Turn;
  struct Incoming {
    Header header;
    size_t header_received = 0;
    Target target;  // of the put that is coming in
    int64_t data_received = 0;
    std::atomic<int64_t> received{0};
  };

  void send(const Address& to, const Header& header, std::span<const std::byte> data,
            std::chrono::milliseconds timeout);
  void check(const OperationLabel& label, int32_t peer);
  void fail_if_open(int32_t peer, bool has_begun, const Failure& failure);
  void receive(int32_t peer);
  void begin(int32_t peer, Incoming& incoming);
  bool receive_data(int32_t peer, Incoming& incoming, size_t& room);

  const std::shared_ptr<GroupContext> group_;
  ProgressEngine& engine_;
  std::atomic<bool> is_used_{false};
  std::mutex mutex_;
  uint64_t opened_ = 0;                 // guarded by mutex_
  std::map<uint64_t, Target> targets_;  // guarded by mutex_
  std::vector<Outgoing> outgoing_;      // by rank
  std::vector<Incoming> incoming_;      // by rank; of the progress thread, but for its count
  std::vector<std::byte> dropped_;      // of that thread: what came for windows that are gone
};

}  // namespace zeropg
