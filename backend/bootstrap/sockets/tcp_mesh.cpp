#include "backend/bootstrap/sockets/tcp_mesh.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "backend/bootstrap/sockets/authentication.h"
#include "backend/diagnostics/format_ranks.h"
#include "backend/diagnostics/peer_lost.h"

namespace zeropg {
namespace {

constexpr size_t kMaxStrangers = 64;             // connections that may hang at the door beside the expected ranks
constexpr std::chrono::seconds kPatience{10};    // with one of them
constexpr std::chrono::seconds kAttempt{4};      // to reach a peer at one of its addresses, before the next is tried
constexpr std::chrono::milliseconds kPause{50};  // before a peer that refused is tried again
constexpr size_t kProofBytes = sizeof(int32_t) + sizeof(Nonce) + sizeof(Digest);
constexpr char kSeen = 'y';

// The two ranks of a connection enter its proofs by its name.
ProofContext context_of(const MeshPlan& plan, int32_t connector, int32_t listener) {
  return {plan.group + "/" + std::to_string(connector) + ">" + std::to_string(listener), {}, {}};
}

std::string connection_key(const MeshPlan& plan, const ProofContext& context) {
  const Digest key = session_key(plan.key, context);
  return {key.begin(), key.end()};
}

template <typename T>
void append(std::string* bytes, const T& field) {
  bytes->append(reinterpret_cast<const char*>(&field), sizeof field);
}

void send_whole(const Descriptor& socket, std::string_view bytes) {
  // A few bytes on a connection that nothing was sent on: they fit, or it is broken.
  if (::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) !=
      static_cast<ssize_t>(bytes.size())) {
    C10_THROW_ERROR(DistNetworkError, "the connection broke");
  }
}

// Reads up to `bytes` in all into `filled`, never more. True when they are there.
bool receive_up_to(const Descriptor& socket, size_t bytes, std::string* filled) {
  char buffer[kProofBytes];
  const size_t rest = bytes - filled->size();
  const ssize_t received = ::recv(socket.get(), buffer, std::min(rest, sizeof buffer), MSG_DONTWAIT);
  if (received == 0) C10_THROW_ERROR(DistNetworkError, "it closed the connection");
  if (received < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    C10_THROW_ERROR(DistNetworkError, std::strerror(errno));
  }
  filled->append(buffer, static_cast<size_t>(received));
  return filled->size() == bytes;
}

class Mesh {
 public:
  Mesh(const Descriptor& listener, const MeshPlan& plan) : listener_(listener), plan_(plan) {
    for (const int32_t peer : plan.to) {
      Call& call = calls_.emplace_back();
      call.peer = peer;
      call.hosts = candidates(plan.addresses.at(peer), plan.network_id);
    }
    waiting_for_ = plan.from;
    connections_.resize(plan.addresses.size());
  }

  bool is_complete() const { return calls_.empty() && waiting_for_.empty(); }
  std::vector<PeerConnection> connections() { return std::move(connections_); }
  std::vector<int32_t> missing() const;
  std::string complaint() const;
  void serve(Clock::time_point deadline);  // one round of poll

 private:
  // A connection that this rank makes.
  struct Call {
    int32_t peer = -1;
    std::vector<std::string> hosts;
    size_t next_host = 0;
    Descriptor socket;
    Clock::time_point until{};  // with a socket: of this attempt; without: when the next one begins
    bool is_connected = false;
    std::optional<ProofContext> context;  // after the listener's nonce
    std::string received;
    std::string trouble;
    size_t refusals = 0;  // of proofs, on either side
  };
  // A connection that somebody else made.
  struct Visitor {
    Descriptor socket;
    Nonce nonce{};
    Clock::time_point patience{};
    int32_t rank = -1;  // once proven
    std::string key;    // likewise
    std::string received;
  };

  void begin(Call& call);
  void give_up(Call& call, const std::string& trouble);
  bool advance(Call& call);  // true: done
  void welcome();
  bool converse(Visitor& visitor);  // false: show them out (or they are in)
  bool check_proof(Visitor& visitor);

  const Descriptor& listener_;
  const MeshPlan& plan_;
  std::vector<Call> calls_;
  std::vector<int32_t> waiting_for_;
  std::deque<Visitor> visitors_;
  std::vector<PeerConnection> connections_;
  size_t refused_ = 0;
};

void Mesh::serve(Clock::time_point deadline) {
  const auto start = Clock::now();
  auto limit = deadline;
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (Call& call : calls_) {
    if (!call.socket && start >= call.until) begin(call);
    limit = std::min(limit, call.until);
    entries.push_back({call.socket.get(), static_cast<short>(call.is_connected ? POLLIN : POLLOUT), 0});
  }
  for (const Visitor& visitor : visitors_) entries.push_back({visitor.socket.get(), POLLIN, 0});
  poll_until(entries, limit);

  const auto now = Clock::now();
  size_t entry = 1;
  std::vector<Call> open_calls;
  for (Call& call : calls_) {
    bool is_done = false;
    try {
      if (entries[entry].revents != 0) is_done = advance(call);
      if (!is_done && call.socket && now >= call.until) C10_THROW_ERROR(DistNetworkError, "no answer");
    } catch (const c10::DistNetworkError& error) {
      give_up(call, error.what_without_backtrace());
    }
    ++entry;
    if (!is_done) open_calls.push_back(std::move(call));
  }
  calls_ = std::move(open_calls);
  std::deque<Visitor> staying;
  for (Visitor& visitor : visitors_) {
    const bool stays = entries[entry].revents == 0 ? now < visitor.patience : converse(visitor);
    if (stays) staying.push_back(std::move(visitor));
    ++entry;
  }
  visitors_ = std::move(staying);
  if (entries[0].revents != 0) welcome();
}

void Mesh::begin(Call& call) {
  TORCH_CHECK_WITH(DistBackendError, !call.hosts.empty(), "rank ", call.peer,
                   " has no address but loopback, which does not lead there from here; give its machine a network"
                   " interface");
  const std::string& host = call.hosts[call.next_host++ % call.hosts.size()];
  call.until = Clock::now() + kAttempt;
  try {
    call.socket = connect_tcp(host, plan_.addresses[call.peer].port);
  } catch (const c10::DistNetworkError& error) {
    give_up(call, error.what_without_backtrace());
  }
}

void Mesh::give_up(Call& call, const std::string& trouble) {
  const std::string& host = call.hosts[(call.next_host - 1) % call.hosts.size()];
  call.trouble = host + " port " + std::to_string(plan_.addresses[call.peer].port) + ": " + trouble;
  call.socket.reset();
  call.is_connected = false;
  call.context.reset();
  call.received.clear();
  call.until = Clock::now() + kPause;
  // A wrong secret stays wrong. At one of several addresses somebody else may have answered.
  if (call.refusals >= call.hosts.size()) {
    throw PeerLost({__func__, __FILE__, __LINE__}, c10::str("rank ", call.peer, " at ", call.trouble), call.peer);
  }
}

bool Mesh::advance(Call& call) {
  if (!call.is_connected) {
    const int error = connect_error(call.socket);
    if (error != 0) C10_THROW_ERROR(DistNetworkError, std::strerror(error));
    call.is_connected = true;
    prepare_connection(call.socket);
    return false;
  }
  if (!call.context) {
    if (!receive_up_to(call.socket, sizeof(Nonce), &call.received)) return false;
    call.context = context_of(plan_, plan_.rank, call.peer);
    std::memcpy(call.context->leader_nonce.data(), call.received.data(), sizeof(Nonce));
    call.context->member_nonce = random_nonce();
    call.received.clear();
    std::string bytes;
    append(&bytes, plan_.rank);
    append(&bytes, call.context->member_nonce);
    append(&bytes, prove(plan_.key, Role::kMember, *call.context));
    send_whole(call.socket, bytes);
    return false;
  }
  bool is_whole = false;
  try {
    is_whole = receive_up_to(call.socket, sizeof(Digest), &call.received);
  } catch (const c10::DistNetworkError& error) {
    ++call.refusals;
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("it did not take this rank's proof of the group's secret (", error.what_without_backtrace(),
                 "); set the same ZEROPG_SECRET on every rank, or look why that one ended"));
  }
  if (!is_whole) return false;
  Digest proof;
  std::memcpy(proof.data(), call.received.data(), sizeof proof);
  if (!is_same_mac(proof, prove(plan_.key, Role::kLeader, *call.context))) {
    ++call.refusals;
    C10_THROW_ERROR(DistNetworkError, "it did not prove the group's secret; set the same ZEROPG_SECRET on every rank");
  }
  send_whole(call.socket, {&kSeen, 1});
  connections_[call.peer] = {std::move(call.socket), connection_key(plan_, *call.context)};
  return true;
}

void Mesh::welcome() {
  Visitor visitor;
  visitor.socket = accept_tcp(listener_);
  visitor.nonce = random_nonce();
  visitor.patience = Clock::now() + kPatience;
  if (!visitor.socket) return;
  prepare_connection(visitor.socket);
  try {
    send_whole(visitor.socket, {visitor.nonce.data(), visitor.nonce.size()});
  } catch (const c10::DistNetworkError&) {
    return;
  }
  if (visitors_.size() >= plan_.from.size() + kMaxStrangers) {  // who has proven itself stays
    const auto stranger = std::find_if(visitors_.begin(), visitors_.end(), [](const Visitor& v) { return v.rank < 0; });
    if (stranger != visitors_.end()) visitors_.erase(stranger);
  }
  visitors_.push_back(std::move(visitor));
}

bool Mesh::converse(Visitor& visitor) {
  try {
    if (visitor.rank < 0) return check_proof(visitor);
    if (!receive_up_to(visitor.socket, 1, &visitor.received)) return true;
    std::erase(waiting_for_, visitor.rank);
    connections_[visitor.rank] = {std::move(visitor.socket), std::move(visitor.key)};
  } catch (const c10::DistNetworkError&) {
    ++refused_;
  }
  return false;
}

bool Mesh::check_proof(Visitor& visitor) {
  if (!receive_up_to(visitor.socket, kProofBytes, &visitor.received)) return true;
  int32_t rank = -1;
  Digest proof;
  std::memcpy(&rank, visitor.received.data(), sizeof rank);
  ProofContext context = context_of(plan_, rank, plan_.rank);
  context.leader_nonce = visitor.nonce;
  std::memcpy(context.member_nonce.data(), visitor.received.data() + sizeof rank, sizeof(Nonce));
  std::memcpy(proof.data(), visitor.received.data() + sizeof rank + sizeof(Nonce), sizeof proof);
  const bool is_proven = is_same_mac(proof, prove(plan_.key, Role::kMember, context));
  if (!is_proven || std::find(plan_.from.begin(), plan_.from.end(), rank) == plan_.from.end()) {
    C10_THROW_ERROR(DistNetworkError, "no proof");
  }
  const Digest answer = prove(plan_.key, Role::kLeader, context);
  send_whole(visitor.socket, {reinterpret_cast<const char*>(answer.data()), answer.size()});
  visitor.rank = rank;
  visitor.key = connection_key(plan_, context);
  visitor.received.clear();
  return true;
}

std::vector<int32_t> Mesh::missing() const {
  std::vector<int32_t> ranks = waiting_for_;
  for (const Call& call : calls_) ranks.push_back(call.peer);
  return ranks;
}

std::string Mesh::complaint() const {
  std::string text;
  for (const Call& call : calls_) {
    text += c10::str(text.empty() ? "" : "; ", "rank ", call.peer, " was not reached (",
                     call.trouble.empty() ? "no answer" : call.trouble, ")");
  }
  if (!waiting_for_.empty()) {
    text += c10::str(text.empty() ? "" : "; ", format_ranks(waiting_for_), " did not connect to this rank in time");
  }
  if (refused_ > 0) {
    text += c10::str(" (", refused_,
                     " connections did not prove the group's secret: set the same ZEROPG_SECRET "
                     "everywhere)");
  }
  return text +
         "; look at what those ranks were doing and whether the network lets TCP through, choose with "
         "ZEROPG_INTERFACE, or raise the timeout";
}

}  // namespace

std::vector<PeerConnection> connect_mesh(const Descriptor& listener, const MeshPlan& plan, Clock::time_point deadline,
                                         const Tick& tick) {
  Mesh mesh(listener, plan);
  auto next_tick = Clock::now() + kTick;
  while (!mesh.is_complete()) {
    mesh.serve(deadline);
    const auto now = Clock::now();
    if (now >= next_tick || now >= deadline) {
      tick(mesh.missing());
      next_tick = now + kTick;
    }
    if (now >= deadline) C10_THROW_ERROR(DistBackendError, mesh.complaint());
  }
  return mesh.connections();
}

}  // namespace zeropg
