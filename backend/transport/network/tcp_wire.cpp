#include "backend/transport/network/tcp_wire.h"

#include <c10/util/Exception.h>
#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <thread>
#include <tuple>
#include <utility>

#include "backend/platform/process/inherited_sockets.h"
#include "backend/transport/rank_state.h"

namespace zeropg {
namespace {

constexpr size_t kArrivingBytes = size_t{16} << 10;
constexpr size_t kCheapCopyBytes = size_t{32} << 10;  // less is not worth the question how much room there is
constexpr int kReadsPerTurn = 16;                     // of one connection, before others have theirs
constexpr int kEventsPerTurn = 64;
constexpr uint32_t kOfConnector = std::numeric_limits<uint32_t>::max();  // in place of a peer

std::span<const std::byte> as_bytes_of(const FrameHeader& header) { return std::as_bytes(std::span(&header, 1)); }

// Of a part of a frame; none where that is empty.
std::span<const std::byte> tag_of(std::span<const std::byte> part, FrameTags& tags, Tag* tag) {
  if (part.empty()) return {};
  tags.update(part);
  *tag = tags.next();
  return std::as_bytes(std::span(*tag));
}

Descriptor make_epoll() {
  Descriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) C10_THROW_ERROR(DistBackendError, c10::str("tcp transport: epoll_create1: ", std::strerror(errno)));
  close_in_children(epoll.get());
  return epoll;
}

void watch_for_bytes(const Descriptor& epoll, int descriptor, uint32_t mark) {
  epoll_event event{.events = EPOLLIN, .data = {.u32 = mark}};
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    C10_THROW_ERROR(DistBackendError, c10::str("tcp transport: epoll_ctl: ", std::strerror(errno)));
  }
}

void tell_departed(int32_t peer, FrameSink& sink) {
  sink.take_frame(peer, {.kind = FrameKind::kState, .value = static_cast<uint64_t>(RankState::kDeparted)}, {});
}

bool is_passing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

TcpWire::TcpWire(std::vector<Descriptor> connections, std::vector<FrameKeys> keys, std::chrono::milliseconds patience)
    : patience_(patience),
      epoll_(make_epoll()),
      connections_(connections.size()),
      was_met_(connections.size()),
      arriving_(kArrivingBytes) {
  for (size_t peer = 0; peer < connections.size(); ++peer) {
    if (!connections[peer]) continue;
    adopt(static_cast<int32_t>(peer), std::move(connections[peer]),
          keys.empty() ? std::nullopt : std::optional(keys[peer]));
  }
}

TcpWire::TcpWire(std::unique_ptr<Connector> connector, const WireOptions& options)
    : patience_(kPatience),
      rank_(options.rank),
      authenticates_frames_(options.authenticates_frames),
      epoll_(make_epoll()),
      connector_(std::move(connector)),
      connections_(static_cast<size_t>(options.world_size)),
      was_met_(static_cast<size_t>(options.world_size)),
      arriving_(kArrivingBytes) {
  watch_for_bytes(epoll_, connector_->descriptor(), kOfConnector);
}

void TcpWire::adopt(int32_t peer, Descriptor socket, const std::optional<FrameKeys>& keys) {
  const auto at = static_cast<size_t>(peer);
  connections_[at] = std::make_unique<Connection>();
  was_met_[at] = true;
  Connection& connection = *connections_[at];
  connection.socket = std::move(socket);
  if (keys) {
    connection.outgoing_tags.emplace(keys->sent);
    connection.incoming = FrameDecoder(FrameTags(keys->received));
  }
  connection.send_buffer.adopt(connection.socket.get());
  close_in_children(connection.socket.get());
  watch_for_bytes(epoll_, connection.socket.get(), static_cast<uint32_t>(peer));
}

TcpWire::~TcpWire() { close(std::chrono::milliseconds(0)); }

bool TcpWire::send(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) {
  const auto at = static_cast<size_t>(peer);
  if (connections_[at] == nullptr) return send_early(peer, header, payload, urgency);
  Connection& connection = *connections_[at];
  const bool is_clear = flush(connection);
  if (!is_clear && urgency == Urgency::kCanWait) return false;
  FrameParts parts{as_bytes_of(header), {}, payload, {}};
  std::array<Tag, 2> tags;
  if (connection.outgoing_tags) {
    parts[1] = tag_of(parts[0], *connection.outgoing_tags, &tags[0]);
    parts[3] = tag_of(parts[2], *connection.outgoing_tags, &tags[1]);
  }
  // An error is noticed by who reads: what the peer said before it went has to be heard first.
  const size_t sent = is_clear ? send_now(connection, parts) : 0;
  // A tag is spent once it is made, and costs more than a copy.
  const bool is_refused = sent == 0 && urgency == Urgency::kCanWait && !connection.outgoing_tags;
  if (!is_refused) keep(connection, parts, sent);
  const bool has_unsent = connection.waiting_sent < connection.waiting.size();
  if (has_unsent && !std::exchange(connection.is_unsent, true)) unsent_.push_back(peer);
  // Another lane may have been refused before: only the thread that hears of room takes the wish back.
  connection.wants_room |= is_refused || has_unsent;
  if (is_refused || has_unsent) connection.send_buffer.note_full(connection.socket.get());
  watch(peer, connection);
  return !is_refused;
}

bool TcpWire::has_met(int32_t peer) const { return was_met_[static_cast<size_t>(peer)]; }

// Only small frames are kept: what can wait comes again, when there is a connection.
bool TcpWire::send_early(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) {
  if (!connector_ || has_met(peer)) return false;
  connector_->call(peer);
  if (urgency == Urgency::kCanWait) return false;
  early_[peer].emplace_back(header, std::vector<std::byte>(payload.begin(), payload.end()));
  return true;
}

// Note [The first word]
// A rank that is called may leave when it has sent its proof but has not seen that its caller took it. It says no
// goodbye to who, for it, never came; and its caller has a connection that ends. So both ends say something as soon as
// they have a connection, and one that ends without a word is that of a rank that left, as where nobody listens.

bool TcpWire::meet(FrameSink& sink) {
  ConnectorNews news = connector_->advance();
  for (ConnectorNews::Made& made : news.made) {
    const std::optional<FrameKeys> keys =
        authenticates_frames_ ? std::optional(frame_keys(made.connection.key, rank_, made.peer)) : std::nullopt;
    try {
      adopt(made.peer, std::move(made.connection.socket), keys);
    } catch (const c10::DistBackendError& error) {
      drop(made.peer, error.what_without_backtrace(), sink);
      continue;
    }
    connections_[static_cast<size_t>(made.peer)]->awaits_word = true;
    send(made.peer, {.kind = FrameKind::kPong}, {}, Urgency::kMustTake);  // Note [The first word]
    for (const auto& [header, payload] : early_[made.peer]) send(made.peer, header, payload, Urgency::kMustTake);
    early_.erase(made.peer);
    sink.note_connected(made.peer);
  }
  for (const ConnectorNews::Lost& lost : news.lost) {
    was_met_[static_cast<size_t>(lost.peer)] = true;  // nobody is called twice
    early_.erase(lost.peer);
    if (lost.has_left) tell_departed(lost.peer, sink);  // it would have said goodbye to a peer that it knew
    sink.lose_peer(lost.peer, lost.reason);
  }
  return !news.made.empty() || !news.lost.empty();
}

// Who waits by looking again and again asks here: a sendmsg that is refused costs ten times as much.
size_t TcpWire::room(int32_t peer, size_t bytes) const {
  const auto& connection = connections_[static_cast<size_t>(peer)];
  if (connection == nullptr || (bytes <= kCheapCopyBytes && !connection->wants_room)) return bytes;
  std::array<uint32_t, SK_MEMINFO_VARS> memory{};
  socklen_t size = sizeof memory;
  if (::getsockopt(connection->socket.get(), SOL_SOCKET, SO_MEMINFO, memory.data(), &size) != 0) return bytes;
  const size_t limit = memory[SK_MEMINFO_SNDBUF], used = memory[SK_MEMINFO_WMEM_QUEUED];
  const size_t left = limit - std::min(used, limit);
  if (connection->wants_room && left < used / 2) return 0;  // by the kernel's rule for EPOLLOUT
  return std::min(bytes, std::max(left, kCheapCopyBytes));
}

size_t TcpWire::send_now(const Connection& connection, const FrameParts& parts) {
  iovec places[std::tuple_size_v<FrameParts>];
  msghdr message{};
  message.msg_iov = places;
  for (const std::span<const std::byte> part : parts) {
    if (!part.empty()) places[message.msg_iovlen++] = {const_cast<std::byte*>(part.data()), part.size()};
  }
  const ssize_t taken = ::sendmsg(connection.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return taken > 0 ? static_cast<size_t>(taken) : 0;
}

void TcpWire::keep(Connection& connection, const FrameParts& parts, size_t sent) {
  for (const std::span<const std::byte> part : parts) {
    const auto rest = part.subspan(std::min(sent, part.size()));
    connection.waiting.insert(connection.waiting.end(), rest.begin(), rest.end());
    sent -= part.size() - rest.size();
  }
}

// True when nothing waits any more.
bool TcpWire::flush(Connection& connection) {
  while (connection.waiting_sent < connection.waiting.size()) {
    const size_t rest = connection.waiting.size() - connection.waiting_sent;
    const ssize_t taken = ::send(connection.socket.get(), connection.waiting.data() + connection.waiting_sent, rest,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken <= 0) return false;
    connection.waiting_sent += static_cast<size_t>(taken);
  }
  connection.waiting.clear();
  connection.waiting_sent = 0;
  return true;
}

bool TcpWire::flush_all() {
  const size_t before = unsent_.size();
  std::erase_if(unsent_, [&](int32_t peer) {
    const auto& connection = connections_[static_cast<size_t>(peer)];
    if (connection == nullptr) return true;
    if (!connection->waiting.empty() && (room(peer, kMaxPayloadBytes) == 0 || !flush(*connection))) return false;
    connection->is_unsent = false;
    return true;
  });
  return unsent_.size() < before;
}

// The interest in room for more is taken up and given back as rarely as it changes: each is a system call.
void TcpWire::watch(int32_t peer, Connection& connection) {
  if (connection.wants_room == connection.is_watched) return;
  connection.is_watched = connection.wants_room;
  epoll_event event{.events = EPOLLIN | (connection.wants_room ? EPOLLOUT : 0U),
                    .data = {.u32 = static_cast<uint32_t>(peer)}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event);
}

bool TcpWire::progress(int32_t peer, FrameSink& sink) {
  bool has_moved = flush_all();  // who reads from one peer alone must not hold up what others wait for
  if (peer >= 0) {
    if (connections_[static_cast<size_t>(peer)] != nullptr) return receive(peer, sink) || has_moved;
    return (connector_ && !has_met(peer) && meet(sink)) || has_moved;
  }
  epoll_event events[kEventsPerTurn];
  const int count = ::epoll_wait(epoll_.get(), events, kEventsPerTurn, 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u32 == kOfConnector) {
      has_moved |= meet(sink);
      continue;
    }
    const auto ready = static_cast<int32_t>(events[i].data.u32);
    const auto& connection = connections_[static_cast<size_t>(ready)];
    if (connection == nullptr) continue;
    if ((events[i].events & EPOLLOUT) != 0 && flush(*connection)) {
      connection->wants_room = false;
      watch(ready, *connection);
      has_moved = true;
    }
    if ((events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) has_moved |= receive(ready, sink);
  }
  return has_moved;
}

bool TcpWire::receive(int32_t peer, FrameSink& sink) {
  Connection& connection = *connections_[static_cast<size_t>(peer)];
  bool has_moved = false;
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    // Straight to where the payload belongs, and what is behind it to where headers are looked at. Behind a long one
    // only a header is read, so that the next payload, which may be as long, goes where it belongs as well. (With tags
    // it is the payload's tag, and the next header takes another read.)
    iovec parts[2];
    int count = 0;
    const std::span<std::byte> room = connection.incoming.payload_room(peer, sink);
    if (!room.empty()) parts[count++] = {room.data(), room.size()};
    const size_t behind_room = room.size() < arriving_.size() ? arriving_.size() : sizeof(FrameHeader);
    parts[count++] = {arriving_.data(), behind_room};
    const ssize_t received = ::readv(connection.socket.get(), parts, count);
    if (received < 0 && is_passing(errno)) break;
    if (received <= 0) {
      const bool has_ended = received == 0 || errno == ECONNRESET;
      const std::string reason = received == 0 ? "it closed the connection" : std::strerror(errno);
      if (connection.awaits_word && has_ended) tell_departed(peer, sink);
      drop(peer, reason, sink);
      return true;
    }
    has_moved = true;
    connection.awaits_word = false;
    sink.note_sign_of_life(peer);
    const size_t to_payload = std::min<size_t>(static_cast<size_t>(received), room.size());
    const size_t behind = static_cast<size_t>(received) - to_payload;
    try {
      if (to_payload > 0) connection.incoming.take_payload(peer, to_payload, sink);
      connection.incoming.take(peer, std::span<const std::byte>(arriving_).first(behind), sink);
    } catch (const c10::DistNetworkError& error) {
      drop(peer, error.what_without_backtrace(), sink);
      return true;
    }
    if (behind < behind_room || sink.has_enough()) break;  // that was all, or all that is wanted
  }
  return has_moved;
}

// Not TCP_USER_TIMEOUT, under which the kernel also breaks the connection to a process that is stopped, while its
// system answers that there is no room.
void TcpWire::lose_unreachable(FrameSink& sink) {
  constexpr int kLooks = 30;  // within the patience
  const auto now = Clock::now();
  if (now - last_look_ < patience_ / kLooks) return;
  last_look_ = now;
  for (size_t peer = 0; peer < connections_.size(); ++peer) {
    if (connections_[peer] == nullptr) continue;
    Connection& connection = *connections_[peer];
    tcp_info info{};
    socklen_t bytes = sizeof info;
    const bool is_known = ::getsockopt(connection.socket.get(), IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0;
    const auto last_answer = now - std::chrono::milliseconds(info.tcpi_last_ack_recv);
    if (!is_known || info.tcpi_unacked == 0) {
      connection.silent_since = {};
    } else if (connection.silent_since == Clock::time_point{} || connection.silent_since < last_answer) {
      connection.silent_since = now;
    } else if (now - connection.silent_since >= patience_) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience_);
      drop(static_cast<int32_t>(peer), c10::str("its machine has acknowledged nothing for ", seconds.count(), " s"),
           sink);
    }
  }
}

std::optional<Delivery> TcpWire::delivery_to(int32_t peer) const {
  const auto& connection = connections_[static_cast<size_t>(peer)];
  return connection != nullptr ? delivery_of(connection->socket.get()) : std::nullopt;
}

void TcpWire::drop(int32_t peer, const std::string& reason, FrameSink& sink) {
  std::unique_ptr<Connection>& connection = connections_[static_cast<size_t>(peer)];
  forget_in_children(connection->socket.get());
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->socket.get(), nullptr);
  connection.reset();
  sink.lose_peer(peer, reason);
}

// What is still on its way when a socket with unread bytes is closed may be thrown away on both sides. So the end is
// said first, and the socket is closed when the peer's system has everything. The patience is with a peer that takes
// nothing, not with a slow one.
void TcpWire::close(std::chrono::milliseconds patience) {
  if (!epoll_) return;
  connector_.reset();  // nobody is met any more
  auto deadline = Clock::now() + patience;
  size_t least_left = std::numeric_limits<size_t>::max();
  bool is_pending = true;
  while (is_pending) {
    is_pending = false;
    const bool is_late = Clock::now() >= deadline;
    size_t left = 0;
    for (std::unique_ptr<Connection>& each : connections_) {
      if (each == nullptr) continue;
      Connection& connection = *each;
      const bool is_flushed = flush(connection);
      if (is_flushed && !connection.has_said_end) {
        ::shutdown(connection.socket.get(), SHUT_WR);
        connection.has_said_end = true;
      }
      while (::recv(connection.socket.get(), arriving_.data(), arriving_.size(), MSG_DONTWAIT) > 0) {
      }
      int unacknowledged = 0;
      const bool is_known = ::ioctl(connection.socket.get(), SIOCOUTQ, &unacknowledged) == 0;
      const bool is_taken = is_flushed && is_known && unacknowledged == 0;
      if (is_late || is_taken || has_ended(connection.socket.get())) {
        forget_in_children(connection.socket.get());
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.socket.get(), nullptr);
        each.reset();
      } else {
        is_pending = true;
        left += connection.waiting.size() - connection.waiting_sent + static_cast<size_t>(unacknowledged);
      }
    }
    if (left < least_left) {
      least_left = left;
      deadline = Clock::now() + patience;
    }
    if (is_pending) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  forget_in_children(epoll_.get());
  epoll_.reset();
}

WireProbe probe_tcp(const std::string&) { return {.is_viable = true, .obstacle = ""}; }

std::unique_ptr<Wire> join_tcp(const WireOptions& options, OutOfBand& out_of_band) {
  if (options.connects_on_demand) return std::make_unique<TcpWire>(out_of_band.connect_on_demand(), options);
  std::vector<Descriptor> sockets;
  std::vector<FrameKeys> keys;
  for (PeerConnection& connection : out_of_band.connect_to_peers()) {
    const auto peer = static_cast<int32_t>(sockets.size());
    sockets.push_back(std::move(connection.socket));
    if (options.authenticates_frames) keys.push_back(frame_keys(connection.key, options.rank, peer));
  }
  return std::make_unique<TcpWire>(std::move(sockets), std::move(keys));
}

}  // namespace zeropg
