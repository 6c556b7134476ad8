#include "backend/bootstrap/node_admission.h"

#include <c10/util/Exception.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "backend/diagnostics/format_ranks.h"

namespace zeropg {
namespace {

constexpr size_t kMaxStrangers = 64;           // connections that may hang at the door beside the expected ranks
constexpr std::chrono::seconds kPatience{10};  // with one of them
constexpr size_t kProofBytes = sizeof(Nonce) + sizeof(Digest);

std::string_view as_view(const Nonce& nonce) { return {nonce.data(), nonce.size()}; }
std::string as_string(const Digest& digest) { return {digest.begin(), digest.end()}; }

// A doorbell that blocks on write could stop us; whoever proves the secret may still be confused.
bool is_doorbell(const Descriptor& fd) {
  const int flags = ::fcntl(fd.get(), F_GETFL);
  return flags >= 0 && (flags & O_NONBLOCK) != 0 && (flags & O_ACCMODE) == O_RDWR;
}

class Door {
 public:
  Door(const MeetingPlace& place, const std::vector<int32_t>& ranks) : place_(place), members_(ranks.size()) {
    for (size_t i = 0; i < ranks.size(); ++i) members_[i].rank = ranks[i];
  }

  bool is_everybody_in() const { return joined_ == members_.size(); }
  std::vector<Member> members() { return std::move(members_); }
  std::vector<int32_t> missing() const;
  std::string complaint() const;

  // One round of poll over the listener and all that wait at the door.
  bool serve(const Descriptor& listener, Clock::time_point deadline);

 private:
  struct Visitor {
    Descriptor socket;
    ProofContext context;
    Clock::time_point patience;
    std::optional<AuthenticatedSocket> proven;
    const Descriptor& current_socket() const { return proven ? proven->socket() : socket; }
  };

  void welcome(const Descriptor& listener);
  bool converse(Visitor& visitor);  // false: show them out (or they are in)
  bool check_proof(Visitor& visitor);
  void let_in(Visitor& visitor, Packet packet);

  const MeetingPlace& place_;
  std::vector<Member> members_;
  size_t joined_ = 0;
  size_t refused_ = 0;
  std::deque<Visitor> visitors_;
};

bool Door::serve(const Descriptor& listener, Clock::time_point deadline) {
  std::vector<pollfd> entries{{listener.get(), POLLIN, 0}};
  for (const Visitor& visitor : visitors_) entries.push_back({visitor.current_socket().get(), POLLIN, 0});
  const bool is_ready = poll_until(entries, deadline);
  const auto now = Clock::now();
  std::deque<Visitor> staying;
  for (size_t i = 0; i < visitors_.size(); ++i) {
    const bool stays = entries[i + 1].revents == 0 ? now < visitors_[i].patience : converse(visitors_[i]);
    if (stays) staying.push_back(std::move(visitors_[i]));
  }
  visitors_ = std::move(staying);
  if (entries[0].revents != 0) welcome(listener);
  return is_ready;
}

void Door::welcome(const Descriptor& listener) {
  Visitor visitor{accept_unix(listener), {place_.name, random_nonce(), {}}, Clock::now() + kPatience, std::nullopt};
  if (!visitor.socket) return;
  try {
    send_packet(visitor.socket, as_view(visitor.context.leader_nonce), {}, Clock::now());
  } catch (const c10::DistNetworkError&) {
    return;
  }
  if (visitors_.size() >= members_.size() + kMaxStrangers) {  // who has proven itself stays
    const auto stranger = std::find_if(visitors_.begin(), visitors_.end(), [](const Visitor& v) { return !v.proven; });
    if (stranger != visitors_.end()) visitors_.erase(stranger);
  }
  visitors_.push_back(std::move(visitor));
}

bool Door::converse(Visitor& visitor) {
  try {
    if (!visitor.proven) return check_proof(visitor);
    Packet packet;
    const Received received = try_receive(visitor.current_socket(), AuthenticatedSocket::kMaxMessageBytes, 1, &packet);
    if (received == Received::kPacket) let_in(visitor, std::move(packet));
    return received == Received::kNothingYet;
  } catch (const c10::DistNetworkError&) {
    ++refused_;
    return false;
  }
}

bool Door::check_proof(Visitor& visitor) {
  Packet packet;
  // Room for one byte more than a proof has, so that a longer packet is recognised. No descriptors before the proof.
  const Received received = try_receive(visitor.socket, kProofBytes + 1, 0, &packet);
  if (received == Received::kNothingYet) return true;
  Digest proof;
  const bool is_complete = received == Received::kPacket && packet.bytes.size() == kProofBytes;
  if (is_complete) {
    std::memcpy(visitor.context.member_nonce.data(), packet.bytes.data(), sizeof(Nonce));
    std::memcpy(proof.data(), packet.bytes.data() + sizeof(Nonce), sizeof(Digest));
  }
  if (!is_complete || !is_same_mac(proof, prove(place_.key, Role::kMember, visitor.context))) {
    ++refused_;
    return false;
  }
  send_packet(visitor.socket, as_string(prove(place_.key, Role::kLeader, visitor.context)), {}, Clock::now());
  const Digest key = session_key(place_.key, visitor.context);
  visitor.proven.emplace(std::move(visitor.socket), Role::kLeader, key);
  return true;
}

void Door::let_in(Visitor& visitor, Packet packet) {
  packet = visitor.proven->verify(std::move(packet), MessageKind::kHello);
  int32_t rank = -1;
  if (packet.bytes.size() == sizeof rank) std::memcpy(&rank, packet.bytes.data(), sizeof rank);
  const auto member = std::find_if(members_.begin(), members_.end(), [&](const Member& m) { return m.rank == rank; });
  const bool is_expected = member != members_.end() && !member->connection.socket();
  if (!is_expected || packet.descriptors.size() != 1 || !is_doorbell(packet.descriptors[0])) {
    ++refused_;
    return;
  }
  member->connection = std::move(*visitor.proven);
  member->doorbell = std::move(packet.descriptors[0]);
  ++joined_;
}

std::vector<int32_t> Door::missing() const {
  std::vector<int32_t> missing;
  for (const Member& member : members_) {
    if (!member.connection.socket()) missing.push_back(member.rank);
  }
  return missing;
}

std::string Door::complaint() const {
  std::string text = format_ranks(missing()) + " did not connect to the node's leader in time";
  if (refused_ > 0) {
    text += " (" + std::to_string(refused_) +
            " connections did not prove the group's secret: set the same ZEROPG_SECRET everywhere)";
  }
  return text + "; look at what those ranks were doing, or raise the timeout";
}

}  // namespace

std::vector<Member> admit_members(const Descriptor& listener, const MeetingPlace& place,
                                  const std::vector<int32_t>& ranks, Clock::time_point deadline, const Tick& tick) {
  Door door(place, ranks);
  auto next_tick = Clock::now() + kTick;
  while (!door.is_everybody_in()) {
    door.serve(listener, deadline);
    const auto now = Clock::now();
    if (now >= next_tick || now >= deadline) {
      tick(door.missing());
      next_tick = now + kTick;
    }
    if (now >= deadline) C10_THROW_ERROR(DistBackendError, door.complaint());
  }
  return door.members();
}

AuthenticatedSocket join_leader(const MeetingPlace& place, int32_t rank, int doorbell, Clock::time_point deadline,
                                const std::function<void()>& tick) {
  Descriptor socket = connect_unix(place.name, deadline);
  ProofContext context{place.name, {}, random_nonce()};
  const Packet challenge = receive_packet(socket, sizeof(Nonce) + 1, 0, deadline, tick);
  if (challenge.bytes.size() != sizeof(Nonce)) C10_THROW_ERROR(DistNetworkError, "not a zeropg leader");
  std::memcpy(context.leader_nonce.data(), challenge.bytes.data(), sizeof(Nonce));
  const Digest proof = prove(place.key, Role::kMember, context);
  send_packet(socket, std::string(as_view(context.member_nonce)) + as_string(proof), {}, deadline);

  Packet answer;
  try {
    answer = receive_packet(socket, sizeof(Digest) + 1, 0, deadline, tick);
  } catch (const c10::DistNetworkError& error) {
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("the leader did not take this rank's proof of the group's secret (", error.what_without_backtrace(),
                 "); set the same ZEROPG_SECRET on every rank, or look why that one ended"));
  }
  Digest leader_proof{};
  if (answer.bytes.size() == sizeof(Digest)) std::memcpy(leader_proof.data(), answer.bytes.data(), sizeof(Digest));
  if (!is_same_mac(leader_proof, prove(place.key, Role::kLeader, context))) {
    C10_THROW_ERROR(DistNetworkError,
                    "the leader did not prove the group's secret; set the same ZEROPG_SECRET on "
                    "every rank");
  }
  AuthenticatedSocket connection(std::move(socket), Role::kMember, session_key(place.key, context));
  const std::string hello(reinterpret_cast<const char*>(&rank), sizeof rank);
  connection.send(MessageKind::kHello, hello, {&doorbell, 1}, deadline);
  return connection;
}

}  // namespace zeropg
