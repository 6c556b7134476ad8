// The ranks of a group on other nodes: byte streams with flow control, and what they say of themselves. One protocol
// over any Wire.
//
// Note [Stream windows]
// A rank may send `window_bytes` of a stream before its peer takes any. The receiver tells now and then how much it has
// taken so far. Since it does so only after half a window, a sender's limit is a window and a half and some room for
// the headers that operations put in front of their bytes; what comes beyond that is not stored but loses the peer.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/transport/network/wire.h"
#include "backend/transport/rank_state.h"
#include "backend/transport/transport.h"

namespace zeropg {

struct RemoteTransportOptions {
  int32_t rank = 0;
  int32_t world_size = 1;
  std::vector<int32_t> peers;  // those on other nodes
  int64_t window_bytes = 0;
};

// What is known of a rank on another node.
struct RemoteState {
  RankState state = RankState::kAlive;
  std::string failure;   // kFailed: what it says
  bool is_lost = false;  // the connection broke before it departed or failed
  std::string loss;      // why
};

// Any thread; none of the calls waits, except close().
class RemoteTransport final : public Transport, private FrameSink {
 public:
  RemoteTransport(std::unique_ptr<Wire> wire, RemoteTransportOptions options);
  ~RemoteTransport() override;

  std::string_view name() const override { return wire_->name(); }
  bool can_reach(int32_t peer) const override;
  size_t try_send(int32_t peer, Lane lane, std::span<const std::byte> data) override;
  size_t try_receive(int32_t peer, Lane lane, std::span<std::byte> data) override;

  // For the progress thread: moves what waits in both directions and serves the peers' reads. True when anything moved.
  bool progress();
  // Readable when progress() has something to do, provided that arm() has returned true since the last call of it.
  int descriptor() const { return wire_->descriptor(); }
  bool arm();

  void tell_state(RankState state, std::string_view text = {});  // to every peer
  RemoteState state_of(int32_t peer) const;
  // Changes whenever any peer's state does.
  uint64_t state_changes() const { return state_changes_.load(std::memory_order_acquire); }
  // Asks every peer for a sign of life now; silent_for(0 ms) are those that have not answered.
  void greet();
  // Asks every peer now and then for a sign of life; to be called while something is awaited.
  void ask_for_life();
  // Peers that have left such a question without an answer for `limit`.
  std::vector<int32_t> silent_for(std::chrono::milliseconds limit) const;

  // Note [Waits]
  // Who waits for a rank that itself waits for a third one should name the third. So a rank says with each sign of life
  // for whom it waits just now; what it said long ago is not believed, since it may have been stopped meanwhile. It
  // also says in which call: ranks that wait for each other, and would all receive, learn only thereby that they
  // differ.
  //
  // To be said again while this rank waits for `awaited` in `lane`, and, in that of collectives, in `call`.
  void note_wait(Lane lane, const std::vector<int32_t>& awaited, const std::optional<WaitingCall>& call = {});
  // Whom `peer` waits for; empty: nobody, as far as is known.
  std::vector<int32_t> waits_of(int32_t peer, Lane lane) const;
  // In which call `peer` waits in the lane of collectives, as far as is known, or waited: what it called does not
  // change. Whatever bytes it sent.
  std::optional<WaitingCall> waiting_call_of(int32_t peer) const;

  // Says goodbye: gives the last bytes up to `patience` to arrive. Nothing can be sent or received after.
  void close(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  struct Outgoing {
    uint64_t sent = 0;
    uint64_t taken = 0;  // by the peer, as it told
  };
  struct Incoming {
    std::deque<Payload> queue;
    size_t offset = 0;      // in queue.front()
    uint64_t received = 0;  // off the wire
    uint64_t taken = 0;     // by the caller
    uint64_t told = 0;
  };
  struct Wait {
    std::vector<int32_t> awaited;
    std::optional<WaitingCall> call;
    Clock::time_point noted{};
  };
  struct Peer {
    bool is_member = false;
    bool owes_pong = false;
    RemoteState remote;
    Outgoing outgoing[kLaneCount];
    Incoming incoming[kLaneCount];
    Clock::time_point asked{};  // zero: no question is open
    Clock::time_point last_asked{};
    Wait waits[kLaneCount];  // as it said itself
  };
  struct Wanted {
    FrameKind kind = FrameKind::kPing;
    int32_t peer = -1;
    uint8_t index = 0;
    bool operator==(const Wanted&) const = default;
  };

  void check_frame(int32_t peer, const FrameHeader& header) override;
  void take_frame(int32_t peer, const FrameHeader& header, Payload payload) override;
  void lose_peer(int32_t peer, const std::string& reason) override;
  void note_sign_of_life(int32_t peer) override;

  Peer& peer_at(int32_t peer);
  bool is_gone(const Peer& peer) const;
  [[noreturn]] void throw_gone(int32_t peer) const;
  void take_credit(int32_t peer, size_t lane, uint64_t taken);
  void take_state(int32_t peer, uint64_t state, const Payload& payload);
  bool read_from(int32_t peer);  // what the wire has, of one or, with -1, of all
  void answer_pings();
  Wait own_wait(Lane lane) const;
  void take_pong(int32_t peer, const FrameHeader& header, const Payload& payload);
  size_t take_queued(Incoming& stream, std::span<std::byte> data);
  void tell_taken(int32_t peer, size_t lane);
  void send_small(int32_t peer, FrameKind kind, uint8_t index, uint64_t value, std::span<const std::byte> payload = {});
  uint64_t limit_bytes() const;

  const pid_t owner_;
  std::unique_ptr<Wire> wire_;
  const RemoteTransportOptions options_;
  std::atomic<uint64_t> state_changes_{0};
  mutable std::mutex mutex_;  // guards all below, and the wire
  std::vector<Peer> peers_;   // by rank
  Wait waits_[kLaneCount];    // this rank's
  Wanted wanted_;             // what the thread that reads waits for itself
  uint64_t events_ = 0;       // counts all else that came: Note [Other people's frames]
  bool owes_pongs_ = false;   // some Peer::owes_pong
  bool is_closed_ = false;
};

}  // namespace zeropg
