// Frames over TCP: one connection per peer, made and proven by the ranks' bootstrap, together with the group or on
// demand. The default between nodes without RDMA.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/platform/process/descriptor.h"
#include "backend/transport/network/frame_decoder.h"
#include "backend/transport/network/frame_tags.h"
#include "backend/transport/network/tcp_kernel.h"
#include "backend/transport/network/wire.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

class TcpWire final : public Wire {
 public:
  // `connections`: by rank; empty for ranks that are no peers. Non-blocking, proven, nothing read from them beyond
  // that.
  // `keys`: likewise, of the tags that all frames carry; none: they carry no tags.
  // `patience`: how long sent bytes may stay unacknowledged by the peer's system before the peer is lost. A process
  // that is stopped, and takes nothing, has a system that acknowledges.
  explicit TcpWire(std::vector<Descriptor> connections, std::vector<FrameKeys> keys = {},
                   std::chrono::milliseconds patience = kPatience);
  // On demand: a peer is called when something is first sent to it. `authenticates_frames`: under keys of each
  // connection, of which this is the end of `rank`.
  TcpWire(std::unique_ptr<Connector> connector, const WireOptions& options);
  ~TcpWire() override;

  std::string_view name() const override { return "tcp"; }
  bool has_met(int32_t peer) const override;
  bool send(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) override;
  size_t room(int32_t peer, size_t bytes) const override;
  bool progress(int32_t peer, FrameSink& sink) override;
  bool has_unfinished() const override { return !unsent_.empty(); }
  int descriptor() const override { return epoll_.get(); }
  bool arm() override { return true; }
  void lose_unreachable(FrameSink& sink) override;
  std::optional<Delivery> delivery_to(int32_t peer) const override;
  void close(std::chrono::milliseconds patience) override;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPatience{30'000};

  using Frame = std::pair<FrameHeader, std::vector<std::byte>>;

  struct Connection {
    Descriptor socket;
    TcpSendBuffer send_buffer;
    bool wants_room = false;  // waits for the socket to take more
    bool is_watched = false;  // for room
    bool has_said_end = false;
    bool awaits_word = false;          // Note [The first word]
    Clock::time_point silent_since{};  // zero: its system acknowledges
    std::vector<std::byte> waiting;    // [waiting_sent, end) has been taken but not sent
    size_t waiting_sent = 0;
    bool is_unsent = false;  // in unsent_
    FrameDecoder incoming;
    std::optional<FrameTags> outgoing_tags;
  };

  void adopt(int32_t peer, Descriptor socket, const std::optional<FrameKeys>& keys);
  bool meet(FrameSink& sink);  // what the connector has; true when there is news
  bool send_early(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency);
  bool receive(int32_t peer, FrameSink& sink);
  bool flush(Connection& connection);
  bool flush_all();                                              // true when some has all been sent
  using FrameParts = std::array<std::span<const std::byte>, 4>;  // header and payload, each with its tag
  static size_t send_now(const Connection& connection, const FrameParts& parts);   // as many bytes as fit
  static void keep(Connection& connection, const FrameParts& parts, size_t sent);  // the rest
  void watch(int32_t peer, Connection& connection);
  void drop(int32_t peer, const std::string& reason, FrameSink& sink);

  const std::chrono::milliseconds patience_;
  const int32_t rank_ = -1;  // with the connector alone, as the next
  const bool authenticates_frames_ = false;
  Clock::time_point last_look_{};
  Descriptor epoll_;
  std::unique_ptr<Connector> connector_;                  // none: all connections are there
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank; none: not met, or lost
  std::vector<bool> was_met_;                             // by rank
  std::map<int32_t, std::vector<Frame>> early_;           // taken before there is a connection
  std::vector<int32_t> unsent_;                           // peers for whom something waits, or waited
  std::vector<std::byte> arriving_;                       // where headers and small payloads are read to
};

// For the registry. It needs nothing that a machine might lack.
WireProbe probe_tcp(const std::string& library_root);
std::unique_ptr<Wire> join_tcp(const WireOptions& options, OutOfBand& out_of_band);

}  // namespace zeropg
