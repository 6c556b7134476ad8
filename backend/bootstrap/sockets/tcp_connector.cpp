#include "backend/bootstrap/sockets/tcp_connector.h"

#include <c10/util/Exception.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend/platform/process/inherited_sockets.h"

namespace zeropg {
namespace {

constexpr size_t kMaxStrangers = 64;  // connections that may hang at the door beside the expected ranks
constexpr std::chrono::milliseconds kPatience{10'000};  // with one of them
constexpr std::chrono::milliseconds kAttempt{4'000};    // to reach a peer at one of its addresses, before the next
constexpr std::chrono::milliseconds kDoorPause{200};    // where no descriptor is left for who is at the door
constexpr int kMostWelcomes = 64;                       // before calls have their turn
constexpr std::chrono::milliseconds kPause{50};         // before a peer that refused is tried again

std::string trouble_at(const std::string& host, uint16_t port, const std::string& what) {
  return host + " port " + std::to_string(port) + ": " + what;
}

// Closes a socket that no child may keep.
void hang_up(Descriptor& socket) {
  if (socket) forget_in_children(socket.get());
  socket.reset();
}

}  // namespace

// Note [Two that call each other]
// Either rank may call first, so both may at once; one connection has to remain, the same for both. As soon as a rank
// has sent its proof, its call stands against that of a lower rank: it declines that one, which then waits. Before, or
// if the other rank is the higher one, it accepts the other's call and drops its own. A rank that has declined has sent
// its own proof, which the lower one accepts as soon as it comes; and one that has accepted has sent none, or sent it
// to a higher rank, which declines it or has sent none itself. So never do both drop their own.
//
// What is dropped is called again after a while, if the other call comes to nothing.

TcpConnector::TcpConnector(Descriptor listener, ConnectorPlan plan)
    : plan_(std::move(plan)),
      listener_(std::move(listener)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      is_caller_(plan_.addresses.size()),
      is_settled_(plan_.addresses.size()) {
  throw_if_out_of_descriptors("tcp: the door", epoll_ && timer_ ? 0 : errno);
  TORCH_CHECK_WITH(DistBackendError, epoll_ && timer_, "tcp: epoll or timerfd: ", std::strerror(errno));
  for (const int32_t caller : plan_.callers) is_caller_.at(static_cast<size_t>(caller)) = true;
  for (const Descriptor* each : {&listener_, &epoll_, &timer_}) close_in_children(each->get());
  watch(listener_, EPOLLIN, EPOLL_CTL_ADD);
  watch(timer_, EPOLLIN, EPOLL_CTL_ADD);
}

TcpConnector::~TcpConnector() {
  for (auto& [peer, call] : calls_) hang_up(call.socket);
  for (Visitor& visitor : visitors_) hang_up(visitor.socket);
  for (Descriptor* each : {&listener_, &epoll_, &timer_}) hang_up(*each);
}

void TcpConnector::watch(const Descriptor& socket, uint32_t events, int operation) {
  epoll_event event{.events = events, .data = {.u32 = 0}};
  if (::epoll_ctl(epoll_.get(), operation, socket.get(), &event) != 0) {
    C10_THROW_ERROR(DistNetworkError, c10::str("epoll_ctl: ", std::strerror(errno)));
  }
}

void TcpConnector::call(int32_t peer) {
  const auto at = static_cast<size_t>(peer);
  if (is_settled_.at(at)) return;
  if (calls_.contains(peer)) return;
  Call call;
  call.hosts = candidates(plan_.addresses[at], plan_.network_id);
  call.answers.resize(call.hosts.size());
  const auto now = Clock::now();
  call.lost_at = lasts() ? now + plan_.patience : Clock::time_point::max();
  call.until = is_proven_visitor(peer) ? now + kAttempt : now;
  calls_.emplace(peer, std::move(call));
  set_timer();
}

ConnectorNews TcpConnector::advance() {
  epoll_event event;
  if (::epoll_wait(epoll_.get(), &event, 1, 0) == 0) return {};
  uint64_t expirations = 0;
  while (::read(timer_.get(), &expirations, sizeof expirations) > 0) {
  }
  // What is ready, of all: there are few at a time.
  std::vector<pollfd> entries;
  for (const auto& [peer, call] : calls_) {
    entries.push_back({call.socket.get(), static_cast<short>(call.is_connected ? POLLIN : POLLOUT), 0});
  }
  for (const Visitor& visitor : visitors_) entries.push_back({visitor.socket.get(), POLLIN, 0});
  ::poll(entries.data(), entries.size(), 0);

  size_t entry = 0;
  std::vector<std::pair<int32_t, bool>> turns;
  for (const auto& [peer, call] : calls_) turns.emplace_back(peer, entries[entry++].revents != 0);
  std::vector<Visitor> staying;
  for (Visitor& visitor : visitors_) {
    if (stays(visitor, entries[entry++].revents != 0)) {
      staying.push_back(std::move(visitor));
    } else {
      hang_up(visitor.socket);
    }
  }
  visitors_ = std::move(staying);
  for (const auto& [peer, is_ready] : turns) {
    if (!is_settled_[static_cast<size_t>(peer)]) advance(peer, calls_.at(peer), is_ready);
  }
  welcome_all();
  std::erase_if(calls_, [&](const auto& each) { return is_settled_[static_cast<size_t>(each.first)]; });
  set_timer();
  return std::exchange(news_, {});
}

void TcpConnector::set_timer() {
  auto next = Clock::time_point::max();
  for (const auto& [peer, call] : calls_) next = std::min(next, call.until);
  for (const Visitor& visitor : visitors_) {
    if (visitor.handshake.rank() < 0) next = std::min(next, visitor.patience);
  }
  if (door_opens_ != Clock::time_point{}) next = std::min(next, door_opens_);
  itimerspec when{};  // zero: never
  if (next != Clock::time_point::max()) {
    const auto left = std::max(std::chrono::nanoseconds(next - Clock::now()), std::chrono::nanoseconds(1));
    when.it_value = {.tv_sec = left.count() / 1'000'000'000, .tv_nsec = left.count() % 1'000'000'000};
  }
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

// --- calls ---

void TcpConnector::advance(int32_t peer, Call& call, bool is_ready) {
  const auto now = Clock::now();
  try {
    if (!call.socket && now >= call.until) {
      begin(peer, call);
    } else if (is_ready) {
      converse(peer, call);
    }
    if (!call.socket || now < call.until) return;
    if (call.is_connected && call.hosts.size() == 1) {  // there is nowhere else to look for it
      call.until = now + kAttempt;
      call.trouble = trouble_at(call.hosts[0], plan_.addresses[static_cast<size_t>(peer)].port, "no answer");
      return;
    }
    if (call.is_connected && lasts()) call.lost_at = now + plan_.patience;
    C10_THROW_ERROR(DistNetworkError, "no answer");
  } catch (const c10::DistNetworkError& error) {
    give_up(peer, call, error.what_without_backtrace());
  } catch (const c10::DistBackendError& error) {
    if (!lasts()) throw;
    give_up(peer, call, error.what_without_backtrace());
  }
}

void TcpConnector::begin(int32_t peer, Call& call) {
  if (call.hosts.empty()) {
    lose(peer, "it has no address but loopback, which does not lead there from here");
    return;
  }
  const size_t at = call.next_host++ % call.hosts.size();
  const std::string& host = call.hosts[at];
  call.answers[at] = Answer::kNone;
  call.until = Clock::now() + kAttempt;
  call.socket = connect_tcp(host, plan_.addresses[static_cast<size_t>(peer)].port);
  close_in_children(call.socket.get());
  watch(call.socket, EPOLLOUT, EPOLL_CTL_ADD);
}

void TcpConnector::converse(int32_t peer, Call& call) {
  if (!call.is_connected) {
    const int error = connect_error(call.socket);
    if (error == ECONNREFUSED) call.answers[(call.next_host - 1) % call.hosts.size()] = Answer::kClosed;
    if (error != 0) C10_THROW_ERROR(DistNetworkError, std::strerror(error));
    call.is_connected = true;
    call.handshake.emplace(plan_.own, peer);
    prepare_connection(call.socket);
    watch(call.socket, EPOLLIN, EPOLL_CTL_MOD);
    return;
  }
  switch (call.handshake->advance(call.socket)) {
    case CallerHandshake::Step::kContinues:
      return;
    case CallerHandshake::Step::kPeerCalls:
      suspend(call, kAttempt);
      return;
    case CallerHandshake::Step::kProven:
      make(peer, std::move(call.socket), call.handshake->session_key());
  }
}

void TcpConnector::suspend(Call& call, std::chrono::milliseconds pause) {
  hang_up(call.socket);
  call.is_connected = false;
  call.handshake.reset();
  call.until = Clock::now() + pause;
}

void TcpConnector::give_up(int32_t peer, Call& call, const std::string& trouble) {
  const size_t at = (call.next_host - 1) % call.hosts.size();
  call.trouble = trouble_at(call.hosts[at], plan_.addresses[static_cast<size_t>(peer)].port, trouble);
  if (call.handshake && call.handshake->is_refused()) call.answers[at] = Answer::kRefused;
  suspend(call, kPause);
  const auto answered = [&](Answer answer) { return std::count(call.answers.begin(), call.answers.end(), answer); };
  const auto hosts = std::ssize(call.hosts);
  // A wrong secret stays wrong. At one of several addresses somebody else may have answered; and a peer refuses once
  // more whose own call this rank is about to take.
  const bool is_refused = answered(Answer::kRefused) == hosts && !is_proven_visitor(peer);
  if (lasts() && answered(Answer::kClosed) == hosts) {
    lose(peer, call.trouble, /*has_left=*/true);
  } else if (is_refused || Clock::now() >= call.lost_at) {
    lose(peer, call.trouble);
  }
}

std::string TcpConnector::trouble_with(int32_t peer) const {
  const auto found = calls_.find(peer);
  return found == calls_.end() ? "" : found->second.trouble;
}

// --- visitors ---

void TcpConnector::welcome_all() {
  if (Clock::now() < door_opens_) return;
  if (door_opens_ != Clock::time_point{}) watch_door(true);
  for (int i = 0; i < kMostWelcomes && welcome(); ++i) {
  }
}

bool TcpConnector::welcome() {
  Visitor visitor{{}, ListenerHandshake(plan_.own), Clock::now() + kPatience};
  try {
    visitor.socket = accept_tcp(listener_);
  } catch (const c10::DistBackendError&) {
    if (!lasts()) throw;
    watch_door(false);  // for a while: who is there would wake this rank again and again
  }
  if (!visitor.socket) return false;
  close_in_children(visitor.socket.get());
  prepare_connection(visitor.socket);
  try {
    visitor.handshake.begin(visitor.socket);
    watch(visitor.socket, EPOLLIN, EPOLL_CTL_ADD);
  } catch (const c10::DistNetworkError&) {
    hang_up(visitor.socket);
    return true;
  }
  if (visitors_.size() >= plan_.callers.size() + kMaxStrangers) {  // who has proven itself stays
    const auto stranger =
        std::find_if(visitors_.begin(), visitors_.end(), [](const Visitor& each) { return each.handshake.rank() < 0; });
    if (stranger != visitors_.end()) {
      hang_up(stranger->socket);
      visitors_.erase(stranger);
    }
  }
  visitors_.push_back(std::move(visitor));
  return true;
}

void TcpConnector::watch_door(bool watches) {
  door_opens_ = watches ? Clock::time_point{} : Clock::now() + kDoorPause;
  watch(listener_, watches ? EPOLLIN : 0U, EPOLL_CTL_MOD);
}

bool TcpConnector::stays(Visitor& visitor, bool is_ready) {
  // Who has proven itself and says nothing may be stopped, and would believe in this connection when it goes on.
  if (!is_ready) return visitor.handshake.rank() >= 0 || Clock::now() < visitor.patience;
  try {
    return converse(visitor);
  } catch (const c10::DistNetworkError&) {
    if (visitor.handshake.rank() < 0) ++refused_;
    return false;
  }
}

bool TcpConnector::converse(Visitor& visitor) {
  switch (visitor.handshake.advance(visitor.socket)) {
    case ListenerHandshake::Step::kContinues:
      return true;
    case ListenerHandshake::Step::kProven:
      return hear_proof(visitor);
    case ListenerHandshake::Step::kSeen:
      make(visitor.handshake.rank(), std::move(visitor.socket), visitor.handshake.session_key());
  }
  return false;
}

bool TcpConnector::hear_proof(Visitor& visitor) {
  const int32_t rank = visitor.handshake.rank();
  const auto at = static_cast<size_t>(rank);
  if (at >= is_caller_.size() || is_settled_[at] || !is_caller_[at]) C10_THROW_ERROR(DistNetworkError, "not expected");
  const auto own = calls_.find(rank);
  if (own != calls_.end()) {  // Note [Two that call each other]
    Call& call = own->second;
    if (rank < plan_.own.rank && call.handshake && call.handshake->has_proved()) {
      visitor.handshake.decline(visitor.socket);
      return false;
    }
    suspend(call, kAttempt);
  }
  visitor.handshake.accept(visitor.socket);
  return true;
}

bool TcpConnector::is_proven_visitor(int32_t peer) const {
  return std::any_of(visitors_.begin(), visitors_.end(),
                     [&](const Visitor& visitor) { return visitor.handshake.rank() == peer; });
}

void TcpConnector::make(int32_t peer, Descriptor socket, std::string key) {
  const auto at = static_cast<size_t>(peer);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  forget_in_children(socket.get());
  if (is_settled_[at]) return;  // two of its calls came through, or it was lost meanwhile
  is_settled_[at] = true;
  const auto own = calls_.find(peer);
  if (own != calls_.end()) hang_up(own->second.socket);
  news_.made.push_back({peer, {std::move(socket), std::move(key)}});
}

void TcpConnector::lose(int32_t peer, std::string reason, bool has_left) {
  const auto at = static_cast<size_t>(peer);
  is_settled_[at] = true;
  news_.lost.push_back({peer, std::move(reason), has_left});
}

}  // namespace zeropg
