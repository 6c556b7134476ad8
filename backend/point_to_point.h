// Messages between two ranks of a group, matched by tag.
//
// Note [Messages]
// A message is a header and its bytes in the stream of its ordered pair of ranks, so messages of one pair arrive in
// order. A receive takes the earliest message of its peer (or of anybody) with its tag. A message that no posted
// receive wants, while another receive waits behind it in the stream, is set aside in memory; without a waiting receive
// it stays in the ring and its sender waits. So sends and receives may be posted in any order on both sides without a
// deadlock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/engine.h"
#include "backend/group.h"
#include "backend/work.h"

namespace zeropg {

// A send or a receive. `data` is contiguous and kept alive by `work`.
struct Message {
  static constexpr int32_t kAnySource = -1;

  c10::intrusive_ptr<ZeroWork> work;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int32_t peer = 0;
  int32_t tag = 0;
};

class PointToPoint final : public Channel {
 public:
  PointToPoint(std::shared_ptr<Group> group, Engine& engine);

  // What can be moved at once is moved in the calling thread, the rest by the progress thread.
  void send(Message message);
  void receive(Message message);  // peer may be kAnySource

  bool wait_until_idle(std::chrono::milliseconds limit);

  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override;
  void set_sleeping(bool is_sleeping) override;
  int32_t local_world_size() const override;

 private:
  struct Header {
    uint64_t bytes = 0;
    int32_t tag = 0;
    uint32_t magic = 0;
  };
  struct Posted {
    Message message;
    uint64_t order = 0;  // of posting, over all peers
    std::chrono::steady_clock::time_point start;
  };
  struct SetAside {
    int32_t tag = 0;
    uint64_t bytes = 0;
    uint64_t order = 0;           // of arrival, over all peers
    std::vector<std::byte> data;  // grows as bytes arrive: the announced length is not believed
  };
  struct Outbox {
    std::deque<Posted> queue;  // the head is being sent
    Header header;
    size_t header_sent = 0;
    int64_t sent = 0;
  };
  struct Inbox {
    std::array<std::byte, sizeof(Header)> header_bytes{};
    size_t header_received = 0;
    Header header;
    bool is_setting_aside = false;   // the current message goes to set_aside.back()
    std::unique_ptr<Posted> target;  // the receive that the current message goes to
    int64_t received = 0;
    std::deque<SetAside> set_aside;
  };
  using Finished = std::vector<std::pair<Posted, std::exception_ptr>>;

  bool advance_outbox(int32_t peer, Finished& finished);
  bool advance_inbox(int32_t peer, Finished& finished);
  bool receive_header(int32_t peer, Inbox& inbox);
  bool receive_body(int32_t peer, Inbox& inbox, Finished& finished);
  bool take_from_set_aside(Posted& posted);
  std::unique_ptr<Posted> take_posted(int32_t peer, int32_t tag);
  bool wants_from(int32_t peer) const;
  bool is_named(int32_t peer) const;  // by a receive that wants this peer and no other
  bool has_pending() const;
  Activity advance_locked(Finished& finished);
  void fail_locked(const std::exception_ptr& error, Finished& finished);
  void check_locked(const Posted& posted, const PeerStates& peers, const std::vector<int32_t>& awaited);
  void finish(Finished finished, bool is_engine_thread);
  void start(Message message, bool is_send);

  std::shared_ptr<Group> group_;  // life shared with the process group
  Engine& engine_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<Outbox> outboxes_;  // per peer; guarded by mutex_
  std::vector<Inbox> inboxes_;    // per peer; guarded by mutex_
  std::deque<Posted> posted_;     // receives without a message, in order; guarded by mutex_
  uint64_t order_ = 0;            // guarded by mutex_
};

}  // namespace zeropg
