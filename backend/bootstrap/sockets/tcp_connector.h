// Makes a rank's TCP connections with ranks of other nodes: calls those that are asked for, and lets in those that
// call, if they prove the group's secret.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backend/bootstrap/sockets/tcp_handshake.h"
#include "backend/bootstrap/sockets/tcp_socket.h"
#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

struct ConnectorPlan {
  RankIdentity own;
  std::string network_id;             // of this process, see TcpAddress
  std::vector<TcpAddress> addresses;  // by rank; of those that are called
  std::vector<int32_t> callers;       // ranks that may call this one
  // How long a peer is called in vain before it is lost; for ever while its system lets the call in and the process
  // says nothing, as one that is stopped does. Zero, while a group is made: for ever, but for one that refuses this
  // rank's proof; and that no descriptor is left is an exception instead.
  std::chrono::milliseconds patience{};
};

// Listens as long as it lives.
class TcpConnector final : public Connector {
 public:
  TcpConnector(Descriptor listener, ConnectorPlan plan);
  ~TcpConnector() override;
  TcpConnector(const TcpConnector&) = delete;
  TcpConnector& operator=(const TcpConnector&) = delete;

  int descriptor() const override { return epoll_.get(); }
  void call(int32_t peer) override;
  ConnectorNews advance() override;

  // Of a peer that is called in vain: where, and what was in the way; empty: there was no answer yet.
  std::string trouble_with(int32_t peer) const;
  // Connections that did not prove the group's secret.
  size_t refused() const { return refused_; }

 private:
  enum class Answer : uint8_t { kNone, kClosed, kRefused };
  // A connection that this rank makes.
  struct Call {
    std::vector<std::string> hosts;
    size_t next_host = 0;
    Descriptor socket;
    Clock::time_point until{};  // with a socket: of this attempt; without: when the next one begins
    Clock::time_point lost_at{};
    bool is_connected = false;
    std::optional<CallerHandshake> handshake;
    std::string trouble;
    std::vector<Answer> answers;  // by host, of the last attempt
  };
  // A connection that somebody else makes.
  struct Visitor {
    Descriptor socket;
    ListenerHandshake handshake;
    Clock::time_point patience{};
  };

  bool lasts() const { return plan_.patience.count() > 0; }  // beyond the making of the group
  void begin(int32_t peer, Call& call);
  void advance(int32_t peer, Call& call, bool is_ready);
  void converse(int32_t peer, Call& call);
  void give_up(int32_t peer, Call& call, const std::string& trouble);
  void suspend(Call& call, std::chrono::milliseconds pause);
  void welcome_all();
  bool welcome();  // false: nobody is at the door, or there is no descriptor for it
  void watch_door(bool watches);
  bool stays(Visitor& visitor, bool is_ready);  // false: show them out (or they are in)
  bool converse(Visitor& visitor);
  bool hear_proof(Visitor& visitor);
  bool is_proven_visitor(int32_t peer) const;
  void make(int32_t peer, Descriptor socket, std::string key);
  void lose(int32_t peer, std::string reason, bool has_left = false);
  void set_timer();
  void watch(const Descriptor& socket, uint32_t events, int operation);

  const ConnectorPlan plan_;
  Descriptor listener_;
  Descriptor epoll_;
  Descriptor timer_;
  std::map<int32_t, Call> calls_;  // by peer
  std::vector<Visitor> visitors_;
  std::vector<bool> is_caller_;   // by rank
  std::vector<bool> is_settled_;  // by rank: made or lost
  ConnectorNews news_;
  size_t refused_ = 0;
  Clock::time_point door_opens_{};  // zero: it is watched
};

}  // namespace zeropg
