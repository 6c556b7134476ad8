#include "backend/platform/memory/sealed_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "backend/platform/cpu/cgroup.h"
#include "backend/platform/process/descriptor.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace zeropg {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string system_error(const char* call) { return c10::str(call, ": ", std::strerror(errno)); }

}  // namespace

int create_sealed_memory(const char* name, int64_t bytes) {
  TORCH_INTERNAL_ASSERT(bytes > 0);
  const int64_t limit = memory_limit_bytes();
  if (bytes > limit) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("shared memory of ", bytes, " bytes (", name, ") exceeds the ", limit,
                             " bytes that this machine or control group allows; use smaller buffers"));
  }
  Descriptor fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) C10_THROW_ERROR(DistBackendError, system_error("memfd_create"));
  if (::ftruncate(fd.get(), bytes) != 0) C10_THROW_ERROR(DistBackendError, system_error("ftruncate"));
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) C10_THROW_ERROR(DistBackendError, system_error("F_ADD_SEALS"));
  return fd.release();
}

SealedMapping::SealedMapping(int fd, int64_t bytes) : bytes_(bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) C10_THROW_ERROR(DistBackendError, system_error("fstat"));
  if (status.st_size != bytes) {
    C10_THROW_ERROR(DistBackendError, c10::str("shared memory has ", status.st_size, " bytes, expected ", bytes,
                                               "; give every rank the same options"));
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    C10_THROW_ERROR(DistBackendError, "shared memory is not sealed against resizing; its creator is not zeropg");
  }
  void* base = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) C10_THROW_ERROR(DistBackendError, system_error("mmap"));
  ::madvise(base, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // refused where shmem has no big pages: harmless
  data_ = static_cast<std::byte*>(base);
}

SealedMapping::~SealedMapping() { ::munmap(data_, static_cast<size_t>(bytes_)); }

}  // namespace zeropg
