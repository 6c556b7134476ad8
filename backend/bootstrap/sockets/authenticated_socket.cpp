#include "backend/bootstrap/sockets/authenticated_socket.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <string>
#include <utility>

namespace zeropg {

AuthenticatedSocket::AuthenticatedSocket(Descriptor socket, Role own, const Digest& key)
    : socket_(std::move(socket)), own_(own), key_(key) {}

Digest AuthenticatedSocket::mac(Role sender, uint64_t sequence, std::string_view kind_and_body) const {
  std::string message(1, static_cast<char>(sender));
  for (int shift = 56; shift >= 0; shift -= 8) message += static_cast<char>(sequence >> shift);
  message.append(kind_and_body);
  return hmac_sha256({reinterpret_cast<const char*>(key_.data()), key_.size()}, message);
}

void AuthenticatedSocket::send(MessageKind kind, std::string_view body, std::span<const int> descriptors,
                               Clock::time_point deadline) {
  std::string payload(1, static_cast<char>(kind));
  payload.append(body.substr(0, kMaxBodyBytes));
  const Digest proof = mac(own_, sent_++, payload);
  send_packet(socket_, std::string(proof.begin(), proof.end()) + payload, descriptors, deadline);
}

Packet AuthenticatedSocket::receive(MessageKind kind, size_t max_descriptors, Clock::time_point deadline,
                                    const std::function<void()>& tick) {
  return verify(receive_packet(socket_, kMaxMessageBytes, max_descriptors, deadline, tick), kind);
}

Packet AuthenticatedSocket::verify(Packet packet, MessageKind kind) {
  Digest proof;
  const bool is_long_enough = packet.bytes.size() > proof.size();
  if (is_long_enough) std::memcpy(proof.data(), packet.bytes.data(), proof.size());
  const Role peer = own_ == Role::kLeader ? Role::kMember : Role::kLeader;
  const std::string_view payload = std::string_view(packet.bytes).substr(is_long_enough ? proof.size() : 0);
  if (!is_long_enough || !is_same_mac(proof, mac(peer, received_, payload))) {
    C10_THROW_ERROR(DistNetworkError, "a message without proof of the group's secret");
  }
  ++received_;
  const auto received_kind = static_cast<MessageKind>(payload.front());
  const std::string body(payload.substr(1));
  if (received_kind == MessageKind::kError) C10_THROW_ERROR(DistBackendError, body);
  if (received_kind != kind) {
    C10_THROW_ERROR(DistNetworkError, "a message out of order; collectives were called in another order on that rank");
  }
  packet.bytes = body;
  return packet;
}

}  // namespace zeropg
