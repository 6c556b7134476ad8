#include "backend/platform/memory/pages.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace zeropg {

void populate(std::byte* data, int64_t bytes, const char* what) {
  if (bytes == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t start = address / kSmallPageBytes * kSmallPageBytes;
  int result = 0;
  do {
    result = ::madvise(reinterpret_cast<void*>(start), address + bytes - start, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {  // an older kernel, or a sandbox that does not know it
    for (int64_t offset = 0; offset < bytes; offset += kSmallPageBytes) {
      [[maybe_unused]] const auto touched = *reinterpret_cast<volatile const std::byte*>(data + offset);
    }
    return;
  }
  C10_THROW_ERROR(DistBackendError, c10::str("no memory for ", bytes, " bytes (", std::strerror(errno), "): ", what));
}

}  // namespace zeropg
