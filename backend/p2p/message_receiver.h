// The messages from one other rank: the one that is coming in, and those that were set aside.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backend/group/group_context.h"
#include "backend/p2p/copy_path_tuner.h"
#include "backend/p2p/message_header.h"
#include "backend/p2p/p2p_message.h"
#include "backend/p2p/posted_receives.h"
#include "backend/transport/shm/cma.h"

namespace zeropg {

// A message that no receive wanted yet.
struct SetAside {
  int32_t tag = 0;
  uint16_t dtype = 0;
  uint64_t bytes = 0;
  uint64_t order = 0;           // of arrival, over all peers
  std::vector<std::byte> data;  // grows as bytes arrive: the announced length is not believed

  bool is_whole() const { return data.size() == bytes; }
};

class MessageReceiver {
 public:
  // `group` must outlive it. `may_use_cma`: the sender's memory may be read (Note [Offers]).
  MessageReceiver(GroupContext& group, int32_t peer, bool may_use_cma)
      : group_(group), peer_(peer), may_use_cma_(may_use_cma) {}

  // Takes in what has come for the receives of `posted`, which it takes out of there. True: something moved. Stops
  // after a message that it had to set aside, since a receive may have been posted for it meanwhile: `order` counts
  // those. Throws DistNetworkError when a peer is gone that a receive names, DistBackendError when sizes or dtypes
  // differ.
  bool advance(PostedReceives& posted, FinishedMessages& finished, uint64_t& order);

  std::list<SetAside>& set_aside() { return set_aside_; }
  const std::optional<PostedMessage>& target() const { return target_; }  // the receive whose message is coming in
  std::optional<PostedMessage> take_target() { return std::exchange(target_, std::nullopt); }

 private:
  using Clock = std::chrono::steady_clock;
  bool receive_start(const PostedReceives& posted, bool& has_moved);
  void begin(PostedReceives& posted, uint64_t& order);
  void receive_target();
  void receive_set_aside();
  size_t receive(std::span<std::byte> into);
  void take_offer();
  void try_cma();
  void end_offer();
  void answer(Answer answer);

  GroupContext& group_;
  const int32_t peer_;
  const bool may_use_cma_;
  std::optional<CmaReader> reader_;
  const std::byte* pooled_ = nullptr;  // where the offered bytes lie in the pool; null: in the sender's own memory

  MessageStart start_;
  size_t start_received_ = 0;
  bool is_setting_aside_ = false;  // the current message goes to set_aside_.back()
  std::optional<PostedMessage> target_;
  bool is_offered_ = false;  // its bytes are read, not received
  uint64_t received_ = 0;

  uint64_t offers_ = 0;
  CopyPathTuner choice_;
  std::optional<Path> timed_path_;  // of the current message, if it had the choice
  Clock::time_point timed_from_{};
  std::list<SetAside> set_aside_;
};

}  // namespace zeropg
