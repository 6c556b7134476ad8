#include "backend/platform/process/process_lock.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/platform/process/descriptor.h"

namespace zeropg {
namespace {

struct flock one_byte(short type, int64_t byte) {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  return request;
}

}  // namespace

// Without a lock, which a fork could leave held in the child. What is there is never freed: others may read it.
const std::array<uint64_t, 2>& process_nonce() {
  struct Nonce {
    pid_t owner = ::getpid();
    std::array<uint64_t, 2> value{};
  };
  static std::atomic<const Nonce*> current{nullptr};
  const Nonce* known = current.load(std::memory_order_acquire);
  while (known == nullptr || known->owner != ::getpid()) {
    auto fresh = std::make_unique<Nonce>();
    if (::getrandom(fresh->value.data(), sizeof fresh->value, 0) != sizeof fresh->value) {
      C10_THROW_ERROR(DistBackendError, c10::str("getrandom: ", std::strerror(errno)));
    }
    if (current.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel)) known = fresh.release();
  }
  return known->value;
}

struct ProcessLock::File {
  std::vector<Descriptor> descriptors;
};

namespace {

// All files with locks in this process, by device and inode. The mutex covers taking and closing, so that the last lock
// of a file cannot close its descriptors just after another thread has locked a byte of the same file.
template <typename File>
struct OpenFiles {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<File>> files;  // guarded by mutex

  static OpenFiles& instance() {
    static OpenFiles* const instance = new OpenFiles;  // outlives every static that owns a group
    return *instance;
  }
};

}  // namespace

ProcessLock::ProcessLock(int fd, int64_t byte) : fd_(fd), byte_(byte) {
  Descriptor owned(fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) C10_THROW_ERROR(DistBackendError, c10::str("fstat: ", std::strerror(errno)));

  auto& open_files = OpenFiles<File>::instance();
  const std::lock_guard guard(open_files.mutex);
  std::erase_if(open_files.files, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<File>& entry = open_files.files[{status.st_dev, status.st_ino}];
  file_ = entry.lock();
  if (!file_) entry = file_ = std::make_shared<File>();
  file_->descriptors.push_back(std::move(owned));

  struct flock request = one_byte(F_WRLCK, byte);
  if (::fcntl(fd, F_SETLK, &request) != 0 && (errno == EACCES || errno == EAGAIN)) {
    file_.reset();
    C10_THROW_ERROR(DistBackendError, c10::str("another process already is rank ", byte,
                                               " of this group; give every process a rank of its own"));
  }
}

ProcessLock::~ProcessLock() {
  const std::lock_guard guard(OpenFiles<File>::instance().mutex);
  struct flock request = one_byte(F_UNLCK, byte_);
  ::fcntl(fd_, F_SETLK, &request);
  file_.reset();
}

bool ProcessLock::is_held_elsewhere(int64_t byte) const {
  struct flock request = one_byte(F_WRLCK, byte);
  if (::fcntl(fd_, F_GETLK, &request) != 0) return true;
  return request.l_type != F_UNLCK;
}

}  // namespace zeropg
