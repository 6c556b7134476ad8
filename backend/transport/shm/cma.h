// Reads the memory of another process of this node, so that a large transfer is one copy and not two.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeropg {

// What a process tells others so that they can read its memory: its pid as it sees it, and where a token lies that
// only it has. Pids differ between namespaces and are reused, so a reader believes a pid only while the token is there.
struct CmaIdentity {
  int64_t pid = 0;
  uint64_t token_address = 0;
  std::array<uint64_t, 2> token{};

  bool operator==(const CmaIdentity&) const = default;
};
CmaIdentity own_cma_identity();  // a forked child has its own

// Whether others that may read this process's memory get these bytes too: the kernel gives out none of some devices, or
// what is secret (memfd_secret). Tries the first and the last one.
bool is_readable(std::span<const std::byte> memory);

// Whether it works depends on the very pair of processes (yama, seccomp, user namespaces, containers), so it is tried.
// Nothing that the peer says is trusted: an address that is not its own makes a read fail, and a length costs what the
// caller gave memory for. One thread at a time.
class CmaReader {
 public:
  explicit CmaReader(const CmaIdentity& peer);  // tries it

  const CmaIdentity& peer() const { return peer_; }
  bool is_usable() const { return refusal_.empty(); }
  const std::string& refusal() const { return refusal_; }  // "process_vm_readv: Operation not permitted"
  // Whether there is no such process (any more). Its memory goes before its locks: others may not know yet.
  bool is_gone() const { return error_ == ESRCH; }

  // False when it failed; what lies in `into` is then undefined, and the reader is not usable any more.
  bool read(uint64_t address, std::span<std::byte> into);
  // Whether all that was read so far came from the process that was tried: call it after the last read, since the
  // process may have died and its pid be another's.
  bool confirm();

 private:
  CmaIdentity peer_;
  int error_ = 0;
  std::string refusal_;
};

}  // namespace zeropg
