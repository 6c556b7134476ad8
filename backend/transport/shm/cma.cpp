#include "backend/transport/shm/cma.h"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>
#include <thread>

#include "backend/platform/cpu/waiter.h"
#include "backend/platform/process/process_lock.h"

namespace zeropg {
namespace {

// The kernel copies a page at a time, and one CPU does not reach the memory's limit that way: two do.
constexpr size_t kSharedReadBytes = size_t{4} << 20;

// 0 when all was read, otherwise the error.
int read_alone(pid_t pid, uint64_t address, std::span<std::byte> into) {
  while (!into.empty()) {
    const iovec local{into.data(), into.size()};
    const iovec remote{reinterpret_cast<void*>(address), into.size()};
    const ssize_t moved = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (moved > 0) {  // when it is less than was asked for, the next call says why
      into = into.subspan(static_cast<size_t>(moved));
      address += static_cast<uint64_t>(moved);
    } else if (moved == 0 || errno != EINTR) {
      return moved == 0 ? EFAULT : errno;
    }
  }
  return 0;
}

// Without signals: they are for the threads of the program. Not joinable where no thread can be had.
template <typename Read>
std::thread start_reader(const Read& read) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread reader;
  try {
    reader = std::thread(read);
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return reader;
}

}  // namespace

// The token is the process's nonce, which peers read where it lies.
CmaIdentity own_cma_identity() {
  const std::array<uint64_t, 2>& token = process_nonce();
  return {::getpid(), reinterpret_cast<uint64_t>(token.data()), token};
}

bool is_readable(std::span<const std::byte> memory) {
  for (size_t index = 0; index < memory.size(); index += std::max<size_t>(1, memory.size() - 1)) {
    std::byte found{};
    if (read_alone(::getpid(), reinterpret_cast<uint64_t>(&memory[index]), {&found, 1}) == EFAULT) return false;
  }
  return true;
}

CmaReader::CmaReader(const CmaIdentity& peer) : peer_(peer) { confirm(); }

bool CmaReader::read(uint64_t address, std::span<std::byte> into) {
  if (!is_usable()) return false;
  const pid_t pid = static_cast<pid_t>(peer_.pid);
  const size_t half = into.size() >= kSharedReadBytes && usable_cpus() > 1 ? into.size() / 2 / 4096 * 4096 : 0;
  int other_error = 0;
  std::thread other =
      half == 0 ? std::thread() : start_reader([&, half] { other_error = read_alone(pid, address, into.first(half)); });
  const size_t own_start = other.joinable() ? half : 0;
  error_ = read_alone(pid, address + own_start, into.subspan(own_start));
  if (other.joinable()) other.join();
  if (error_ == 0) error_ = other_error;
  if (error_ != 0) refusal_ = std::string("process_vm_readv: ") + std::strerror(error_);
  return is_usable();
}

bool CmaReader::confirm() {
  std::array<uint64_t, 2> found{};
  if (read(peer_.token_address, std::as_writable_bytes(std::span(found))) && found != peer_.token) {
    refusal_ = "process_vm_readv: its pid here is another process's";
  }
  return is_usable();
}

}  // namespace zeropg
