#include "backend/bootstrap/sockets/unix_socket.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

namespace zeropg {
namespace {

constexpr size_t kMaxDescriptors = 128;  // per packet; the kernel's limit is 253
constexpr std::chrono::hours kForEver{24 * 365 * 10};

[[noreturn]] void throw_system_error(const char* what, int error) {
  throw_if_out_of_descriptors(what, error);
  C10_THROW_ERROR(DistNetworkError, c10::str(what, ": ", std::strerror(error)));
}

socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
  TORCH_INTERNAL_ASSERT(!name.empty() && name.size() < sizeof address->sun_path);
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // sun_path[0] == 0: abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_system_error("socket", errno);
  return socket;
}

}  // namespace

void throw_if_out_of_descriptors(const char* what, int error) {
  if (error != EMFILE && error != ENFILE) return;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  C10_THROW_ERROR(DistBackendError,
                  c10::str(what, ": ", std::strerror(error), "; this process may open ", limit.rlim_cur,
                           " files (ulimit -n) and has none left: raise the limit, or find what keeps files open"));
}

Clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + std::min<std::chrono::milliseconds>(timeout, kForEver);
}

Descriptor listen_unix(const std::string& name) {
  Descriptor socket = make_socket();
  sockaddr_un address;
  const socklen_t bytes = abstract_address(name, &address);
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) throw_system_error("bind", errno);
  if (::listen(socket.get(), SOMAXCONN) != 0) throw_system_error("listen", errno);
  return socket;
}

Descriptor connect_unix(const std::string& name, Clock::time_point deadline) {
  Descriptor socket = make_socket();
  sockaddr_un address;
  const socklen_t bytes = abstract_address(name, &address);
  while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    // EAGAIN: the listener's queue is full for the moment. poll(2) cannot wait for room in it.
    if (errno == EINTR) continue;
    if (errno != EAGAIN || Clock::now() >= deadline) throw_system_error("connect", errno);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return socket;
}

Descriptor accept_unix(const Descriptor& listener) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    const bool is_passing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
    if (!is_passing) throw_system_error("accept", errno);
    return socket;
  }
  ucred peer{};
  socklen_t bytes = sizeof peer;
  const bool is_known = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0;
  if (!is_known || peer.uid != ::geteuid()) socket.reset();
  return socket;
}

Received try_receive(const Descriptor& socket, size_t max_bytes, size_t max_descriptors, Packet* packet) {
  TORCH_INTERNAL_ASSERT(max_descriptors <= kMaxDescriptors);
  packet->bytes.resize(max_bytes);
  packet->descriptors.clear();
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  iovec buffer{packet->bytes.data(), packet->bytes.size()};
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = max_descriptors > 0 ? control : nullptr;
  message.msg_controllen = max_descriptors > 0 ? CMSG_SPACE(max_descriptors * sizeof(int)) : 0;
  const ssize_t received = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0) {
    return errno == EAGAIN || errno == EINTR ? Received::kNothingYet : Received::kClosed;
  }
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      packet->descriptors.emplace_back(fd);
    }
  }
  // The kernel cuts descriptors too when this process has no room for them.
  if ((message.msg_flags & MSG_CTRUNC) != 0 && max_descriptors > 0) {
    const Descriptor probe(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    if (!probe) throw_if_out_of_descriptors("descriptors of another rank", errno);
  }
  const bool is_cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (received == 0 || is_cut || packet->descriptors.size() > max_descriptors) {
    packet->descriptors.clear();
    return Received::kClosed;
  }
  packet->bytes.resize(static_cast<size_t>(received));
  return Received::kPacket;
}

bool poll_until(std::span<pollfd> entries, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  const auto limit = std::clamp(left, std::chrono::milliseconds(0), kTick);
  return ::poll(entries.data(), entries.size(), static_cast<int>(limit.count())) > 0;
}

Packet receive_packet(const Descriptor& socket, size_t max_bytes, size_t max_descriptors, Clock::time_point deadline,
                      const std::function<void()>& tick) {
  while (true) {
    Packet packet;
    const Received received = try_receive(socket, max_bytes, max_descriptors, &packet);
    if (received == Received::kPacket) return packet;
    if (received == Received::kClosed) C10_THROW_ERROR(DistNetworkError, "the peer closed the connection");
    if (Clock::now() >= deadline) C10_THROW_ERROR(DistNetworkError, "no answer in time");
    pollfd entry{socket.get(), POLLIN, 0};
    if (!poll_until({&entry, 1}, deadline)) tick();
  }
}

void send_packet(const Descriptor& socket, std::string_view bytes, std::span<const int> descriptors,
                 Clock::time_point deadline) {
  TORCH_INTERNAL_ASSERT(descriptors.size() <= kMaxDescriptors);
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  iovec buffer{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  while (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) throw_system_error("send", errno);
    if (Clock::now() >= deadline) C10_THROW_ERROR(DistNetworkError, "the peer reads nothing");
    pollfd entry{socket.get(), POLLOUT, 0};
    poll_until({&entry, 1}, deadline);
  }
}

}  // namespace zeropg
