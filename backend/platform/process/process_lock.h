// Tells whether the process behind a rank still exists, without pids (they differ between namespaces and are reused).
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace zeropg {

// 128 random bits that name this process, for as long as it lives in one place; a forked child gets new ones.
const std::array<uint64_t, 2>& process_nonce();

// A write lock on one byte of a shared descriptor. The kernel releases it when the process ends, in whatever way.
//
// Note [POSIX locks]
// Classic POSIX record locks, not open-file-description locks: the latter are inherited by fork, so a data loader's
// workers would keep a killed rank "alive" for as long as they live. The price is the POSIX trap: closing *any*
// descriptor of the file drops all locks of the process on it. Several ranks may live in one process (threads), so all
// descriptors of one file are kept in one entry per process and closed together when its last ProcessLock goes; nobody
// else may close a descriptor of that file in this process meanwhile. A POSIX lock never conflicts with the own
// process, so ranks of the same process recognise each other by process_nonce() instead.
class ProcessLock {
 public:
  // Takes ownership of `fd`. Throws DistBackendError when another process holds the byte.
  ProcessLock(int fd, int64_t byte);
  ~ProcessLock();
  ProcessLock(const ProcessLock&) = delete;
  ProcessLock& operator=(const ProcessLock&) = delete;

  // Whether another process holds the lock on `byte`. True also when the kernel cannot tell.
  bool is_held_elsewhere(int64_t byte) const;

 private:
  struct File;
  std::shared_ptr<File> file_;  // shared by all locks of this process on the same file
  int fd_ = -1;                 // open as long as file_ lives
  int64_t byte_ = 0;
};

}  // namespace zeropg
