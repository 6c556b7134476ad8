// Memory that processes share by passing a descriptor: named nowhere in the file system, sealed against resizing (so a
// peer cannot turn our reads into SIGBUS), gone with the last process that has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeropg {

// Pages come into being when they are touched; only their number is checked, against the memory that this process may
// use. `name` shows in /proc/<pid>/maps. Throws DistBackendError.
int create_sealed_memory(const char* name, int64_t bytes);

// A mapping of all of it, readable and writable, in big pages where the kernel has them for shared memory.
class SealedMapping {
 public:
  // Throws DistBackendError when size or seals are not as create_sealed_memory makes them. Does not own `fd`.
  SealedMapping(int fd, int64_t bytes);
  ~SealedMapping();
  SealedMapping(const SealedMapping&) = delete;
  SealedMapping& operator=(const SealedMapping&) = delete;

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace zeropg
