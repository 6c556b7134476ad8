#include "backend/bootstrap/sockets/tcp_handshake.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace zeropg {
namespace {

constexpr size_t kProofBytes = sizeof(int32_t) + sizeof(Nonce) + sizeof(Digest);
constexpr char kSeen = 'y';
constexpr Digest kCallsItself{};  // in place of a proof

// The two ranks of a connection enter its proofs by its name.
ProofContext context_of(const std::string& group, int32_t caller, int32_t listener) {
  return {group + "/" + std::to_string(caller) + ">" + std::to_string(listener), {}, {}};
}

std::string text_of(const Digest& digest) { return {digest.begin(), digest.end()}; }

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

}  // namespace

CallerHandshake::Step CallerHandshake::advance(const Descriptor& socket) {
  if (context_) return judge_answer(socket);
  if (receive_up_to(socket, sizeof(Nonce), &received_)) answer_nonce(socket);
  return Step::kContinues;
}

void CallerHandshake::answer_nonce(const Descriptor& socket) {
  ProofContext context = context_of(own_->group, own_->rank, peer_);
  std::memcpy(context.leader_nonce.data(), received_.data(), sizeof(Nonce));
  context.member_nonce = random_nonce();
  received_.clear();
  std::string bytes;
  append(&bytes, own_->rank);
  append(&bytes, context.member_nonce);
  append(&bytes, prove(own_->key, Role::kMember, context));
  context_ = context;
  send_whole(socket, bytes);
}

CallerHandshake::Step CallerHandshake::judge_answer(const Descriptor& socket) {
  bool is_whole = false;
  try {
    is_whole = receive_up_to(socket, sizeof(Digest), &received_);
  } catch (const c10::DistNetworkError& error) {
    is_refused_ = true;
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("it did not take this rank's proof of the group's secret (", error.what_without_backtrace(),
                 "); set the same ZEROPG_SECRET on every rank, or look why that one ended"));
  }
  if (!is_whole) return Step::kContinues;
  Digest answer;
  std::memcpy(answer.data(), received_.data(), sizeof answer);
  if (answer == kCallsItself) return Step::kPeerCalls;
  if (!is_same_mac(answer, prove(own_->key, Role::kLeader, *context_))) {
    is_refused_ = true;
    C10_THROW_ERROR(DistNetworkError, "it did not prove the group's secret; set the same ZEROPG_SECRET on every rank");
  }
  send_whole(socket, {&kSeen, 1});
  return Step::kProven;
}

std::string CallerHandshake::session_key() const { return text_of(zeropg::session_key(own_->key, *context_)); }

void ListenerHandshake::begin(const Descriptor& socket) { send_whole(socket, {nonce_.data(), nonce_.size()}); }

ListenerHandshake::Step ListenerHandshake::advance(const Descriptor& socket) {
  if (rank_ >= 0) return receive_up_to(socket, 1, &received_) ? Step::kSeen : Step::kContinues;
  if (!receive_up_to(socket, kProofBytes, &received_)) return Step::kContinues;
  int32_t rank = -1;
  Digest proof;
  std::memcpy(&rank, received_.data(), sizeof rank);
  context_ = context_of(own_->group, rank, own_->rank);
  context_.leader_nonce = nonce_;
  std::memcpy(context_.member_nonce.data(), received_.data() + sizeof rank, sizeof(Nonce));
  std::memcpy(proof.data(), received_.data() + sizeof rank + sizeof(Nonce), sizeof proof);
  if (rank < 0 || !is_same_mac(proof, prove(own_->key, Role::kMember, context_))) {
    C10_THROW_ERROR(DistNetworkError, "no proof");
  }
  rank_ = rank;
  received_.clear();
  return Step::kProven;
}

void ListenerHandshake::accept(const Descriptor& socket) {
  const Digest answer = prove(own_->key, Role::kLeader, context_);
  send_whole(socket, {reinterpret_cast<const char*>(answer.data()), answer.size()});
}

void ListenerHandshake::decline(const Descriptor& socket) {
  send_whole(socket, {reinterpret_cast<const char*>(kCallsItself.data()), kCallsItself.size()});
}

std::string ListenerHandshake::session_key() const { return text_of(zeropg::session_key(own_->key, context_)); }

}  // namespace zeropg
