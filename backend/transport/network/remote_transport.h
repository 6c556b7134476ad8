// The ranks of a group on other nodes: byte streams with flow control over any Wire (Note [Stream windows] in
// byte_stream.h), and what is known of those ranks (peer_liveness.h). One protocol for both.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/transport/network/awaited_frames.h"
#include "backend/transport/network/byte_stream.h"
#include "backend/transport/network/peer_liveness.h"
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

// Any thread; none of the calls waits, except close().
class RemoteTransport final : public Transport, private FrameSink {
 public:
  RemoteTransport(std::unique_ptr<Wire> wire, RemoteTransportOptions options);
  ~RemoteTransport() override;

  std::string_view name() const override { return wire_->name(); }
  bool can_reach(int32_t peer) const override;
  size_t try_send(int32_t peer, Lane lane, std::span<const std::byte> data) override;
  size_t try_receive(int32_t peer, Lane lane, std::span<std::byte> data) override;

  // The ranks of which at least `bytes` of that lane have come that nobody has received, and a copy of the first
  // `bytes`.
  std::map<int32_t, std::vector<std::byte>> unread(Lane lane, size_t bytes) const;

  // For the progress thread: moves what waits in both directions and serves the peers' reads. True when anything moved.
  bool progress();
  bool has_unfinished() const;  // as of the wire
  // Readable when progress() has something to do, provided that arm() has returned true since the last call of it.
  int descriptor() const { return wire_->descriptor(); }
  bool arm();

  std::optional<Delivery> delivery_to(int32_t peer) const;  // as of the wire; empty also where it has not met the peer
  PeerLiveness& liveness() { return liveness_; }
  // To every peer that this rank has met, and to any other as soon as it does; a failure also calls the others.
  void tell_state(RankState state, std::string_view text = {});
  // Asks these for a sign of life now; liveness().silent_for(0 ms) are those that have not answered.
  void greet(const std::vector<int32_t>& peers);
  // Asks these of the peers now and then for a sign of life; to be called while something is awaited. Also loses peers
  // that the wire finds unreachable.
  void ask_for_life(const std::vector<int32_t>& peers);

  // Says goodbye: gives the last bytes up to `patience` to arrive. Nothing can be sent or received after.
  void close(std::chrono::milliseconds patience);

 private:
  void check_frame(int32_t peer, const FrameHeader& header) override;
  void take_frame(int32_t peer, const FrameHeader& header, Payload payload) override;
  std::span<std::byte> place_for(int32_t peer, const FrameHeader& header) override;
  void note_placed(int32_t peer, const FrameHeader& header, size_t bytes) override;
  bool has_enough() const override { return awaited_.is_place_full(); }
  void lose_peer(int32_t peer, const std::string& reason) override;
  void note_connected(int32_t peer) override;
  void note_sign_of_life(int32_t peer) override;

  PeerStreams& streams_of(int32_t rank);
  bool is_gone(int32_t peer) const { return is_closed_ || liveness_.is_gone(peer); }
  [[noreturn]] void throw_gone(int32_t peer) const;
  bool read_from(int32_t peer);  // what the wire has, of one or, with -1, of all; answers questions for a sign of life
  void ask(const std::vector<int32_t>& peers);
  void send_own_state(int32_t peer);
  void send_small(int32_t peer, FrameKind kind, uint8_t index, uint64_t value, std::span<const std::byte> payload = {});

  const pid_t owner_;
  std::unique_ptr<Wire> wire_;
  const RemoteTransportOptions options_;
  PeerLiveness liveness_;             // has a lock of its own
  mutable std::mutex mutex_;          // guards all below, and the wire
  std::vector<PeerStreams> streams_;  // by rank
  AwaitedFrames awaited_;
  bool is_closed_ = false;
};

}  // namespace zeropg
