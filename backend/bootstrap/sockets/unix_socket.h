// Messages and descriptors between processes of one node: SOCK_SEQPACKET sockets in the abstract namespace, which leave
// no file behind and keep message boundaries. Every call fails with DistNetworkError, or DistBackendError where this
// process is at its limit of open files, and never blocks past `deadline`.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/platform/process/descriptor.h"

namespace zeropg {

using Clock = std::chrono::steady_clock;

// `timeout` from now; a very long one means for ever.
Clock::time_point deadline_after(std::chrono::milliseconds timeout);

// Throws DistBackendError when `error` (an errno) says that no descriptor is left, for this process or the machine.
void throw_if_out_of_descriptors(const char* what, int error);

Descriptor listen_unix(const std::string& name);
Descriptor connect_unix(const std::string& name, Clock::time_point deadline);
// Empty when nobody is waiting, or when whoever waits is another user (dropped).
Descriptor accept_unix(const Descriptor& listener);

struct Packet {
  std::string bytes;
  std::vector<Descriptor> descriptors;
};

enum class Received { kPacket, kNothingYet, kClosed };

// Packets longer than `max_bytes` or with more than `max_descriptors` descriptors come back as kClosed: no peer of ours
// sends such. With max_descriptors 0 the kernel drops any descriptor before it reaches this process.
Received try_receive(const Descriptor& socket, size_t max_bytes, size_t max_descriptors, Packet* packet);

// Calls `tick` now and then while it waits; `tick` may throw. DistNetworkError at the deadline and when the peer
// closes.
Packet receive_packet(const Descriptor& socket, size_t max_bytes, size_t max_descriptors, Clock::time_point deadline,
                      const std::function<void()>& tick);
void send_packet(const Descriptor& socket, std::string_view bytes, std::span<const int> descriptors,
                 Clock::time_point deadline);

// What a wait for `awaited` calls now and then; it may throw.
using Tick = std::function<void(const std::vector<int32_t>& awaited)>;

// poll(2) until something is ready, for at most `kTick` and not past `deadline`.
constexpr std::chrono::milliseconds kTick{50};
bool poll_until(std::span<pollfd> entries, Clock::time_point deadline);

}  // namespace zeropg
