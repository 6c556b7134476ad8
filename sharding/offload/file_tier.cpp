#include "sharding/offload/file_tier.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>

#include "backend/diagnostics/notices.h"
#include "sharding/checkpoint/crc32c.h"
#include "sharding/offload/aligned_buffer.h"
#include "sharding/offload/transfer_queue.h"

namespace zeropg {
namespace {

// Note [No name]
// The file has no name in the directory: O_TMPFILE, or unlinked as soon as it is made. So two jobs cannot meet in one
// file, whatever directory they share, nobody can open it by accident, and the kernel gives the space back when the
// process ends in whatever way, SIGKILL included. `lsof +L1` shows such files.

template <class Call>
auto without_interruption(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) {
    result = call();
  }
  return result;
}

class FileTier final : public Tier {
 public:
  explicit FileTier(const FileTierOptions& options)
      : Tier("file", kPageBytes),
        options_(options),
        descriptor_(open_nameless()),
        is_direct_((::fcntl(descriptor_.number, F_GETFL) & O_DIRECT) != 0),
        queue_(std::make_unique<TransferQueue>(options.threads)) {}

  ~FileTier() override {
    if (is_forked()) static_cast<void>(queue_.release());  // its threads and their locks are the parent's
  }

  std::byte* address(const TierExtent&) override { return nullptr; }

  std::string describe() const override {
    return c10::str(options_.directory, " (",
                    is_direct_ ? "O_DIRECT" : "through the page cache: this file system refuses O_DIRECT", ", ",
                    options_.threads, " threads)");
  }

 private:
  struct Descriptor {
    int number;
    ~Descriptor() { ::close(number); }
  };
  struct Written {
    uint64_t bytes;
    uint32_t crc;
  };

  [[noreturn]] void fail(const std::string& operation, int code, const char* remedy) const {
    throw TierError(c10::str("[zeropg rank ", options_.rank, "/", options_.world_size, "] offload: ", operation, " in ",
                             options_.directory, " failed: ", std::system_category().message(code), " (errno ", code,
                             "); ", remedy),
                    code);
  }

  // A child of fork (a data loader's worker) shares the file: what it let go or wrote would be lost to the parent.
  bool is_forked() const { return ::getpid() != process_; }

  void check_process() const {
    TORCH_CHECK(
        !is_forked(), "[zeropg rank ", options_.rank, "/", options_.world_size,
        "] offload: this process was forked from the one that trains; the model's swap file is of no use here.");
  }

  int open_nameless() const {
    for (const int direct : {O_DIRECT, 0}) {
      int number = without_interruption(
          [&] { return ::open(options_.directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | direct, 0600); });
      if (number < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {  // no such files here (NFS, old kernels)
        number = open_and_unlink(direct);
      }
      if (number >= 0) return number;
      if (errno != EINVAL || direct == 0) break;
    }
    fail("making a swap file", errno, "name an existing directory on a local disk that this user may write to.");
  }

  int open_and_unlink(int direct) const {
    std::string path = options_.directory + "/zeropg-offload-XXXXXX";
    const int number = without_interruption([&] { return ::mkostemp(path.data(), O_CLOEXEC | direct); });  // mode 0600
    if (number >= 0) ::unlink(path.c_str());
    return number;
  }

  TierExtent reserve(uint64_t bytes, std::string_view what) override {
    check_process();
    const std::lock_guard lock(mutex_);
    for (auto [offset, size] : free_) {
      if (size >= bytes) {
        reserve_on_disk(offset, bytes, what);
        free_.erase(offset);
        if (size > bytes) free_[offset + bytes] = size - bytes;
        return {offset, bytes};
      }
    }
    reserve_on_disk(end_, bytes, what);
    end_ += bytes;
    return {end_ - bytes, bytes};
  }

  // A reserved range reads as zeros: it is beyond the end so far, or a hole that release() has made.
  void reserve_on_disk(uint64_t offset, uint64_t bytes, std::string_view what) {
    const auto start = static_cast<off_t>(offset);
    const auto length = static_cast<off_t>(bytes);
    if (without_interruption([&] { return ::fallocate(descriptor_.number, 0, start, length); }) == 0) return;
    int code = errno;
    if (code == EOPNOTSUPP) {  // nothing can be reserved here; at least the size and today's free space are checked
      struct statvfs space = {};
      if (::fstatvfs(descriptor_.number, &space) == 0 && space.f_bavail * space.f_frsize < bytes) {
        code = ENOSPC;
      } else if (offset + bytes <= end_ || ::ftruncate(descriptor_.number, start + length) == 0) {
        return;
      } else {
        code = errno;
      }
    }
    // What was reserved of it before the disk was full goes back.
    const bool is_at_end = offset >= end_;
    if (is_at_end && ::ftruncate(descriptor_.number, static_cast<off_t>(end_)) != 0) code = errno;
    fail(c10::str("reserving ", bytes, " bytes for ", what), code,
         "free space there (each rank needs its own), raise the file size limit (ulimit -f), or choose another "
         "directory in offload_optimizer.");
  }

  void release(const TierExtent& extent) override {
    if (is_forked()) return;
    const std::lock_guard lock(mutex_);
    written_.erase(written_.lower_bound(extent.offset), written_.lower_bound(extent.offset + extent.bytes));
    const int failed = without_interruption([&] {
      return ::fallocate(descriptor_.number, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(extent.offset), static_cast<off_t>(extent.bytes));
    });
    if (failed != 0) return;  // it would not read as zeros, so it is not used again
    auto place = free_.emplace(extent.offset, extent.bytes).first;
    if (const auto after = std::next(place); after != free_.end() && place->first + place->second == after->first) {
      place->second += after->second;
      free_.erase(after);
    }
    if (place != free_.begin()) {
      if (const auto before = std::prev(place); before->first + before->second == place->first) {
        before->second += place->second;
        free_.erase(place);
      }
    }
  }

  Transfer start_read(uint64_t offset, std::span<std::byte> buffer) override {
    check_process();
    return Transfer(queue_->run(offset, buffer.size(), false, [this, offset, buffer] {
      move("reading", offset, buffer.size(), [&](uint64_t done) {
        return ::pread(descriptor_.number, buffer.data() + done, buffer.size() - done,
                       static_cast<off_t>(offset + done));
      });
      verify(offset, buffer);
    }));
  }

  Transfer start_write(uint64_t offset, std::span<const std::byte> buffer) override {
    check_process();
    return Transfer(queue_->run(offset, buffer.size(), true, [this, offset, buffer] {
      remember(offset, buffer);
      move("writing", offset, buffer.size(), [&](uint64_t done) {
        return ::pwrite(descriptor_.number, buffer.data() + done, buffer.size() - done,
                        static_cast<off_t>(offset + done));
      });
    }));
  }

  // Repeats `call(done)` until all bytes have gone.
  template <class Call>
  void move(const char* action, uint64_t offset, uint64_t bytes, Call call) {
    const auto where = [&] { return c10::str(action, " ", bytes, " bytes at offset ", offset); };
    for (uint64_t done = 0; done < bytes;) {
      const bool was_direct = is_direct_;
      const ssize_t moved = without_interruption([&] { return call(done); });
      const int code = errno;
      if (moved < 0 && code == EINVAL && was_direct && give_up_direct()) continue;
      if (moved < 0) {
        fail(where(), code, "look at the system's log (dmesg) and the disk's free space; resume from a checkpoint.");
      }
      if (moved == 0) {
        fail(c10::str(where(), " (it ended after ", done, ", as if the file had been cut)"), EIO,
             "nothing else may touch the disk's swap files; resume from a checkpoint.");
      }
      done += static_cast<uint64_t>(moved);
    }
  }

  // Some file systems take O_DIRECT at open and refuse it at the first transfer, or after one that came up short.
  bool give_up_direct() {
    const int flags = ::fcntl(descriptor_.number, F_GETFL);
    if (::fcntl(descriptor_.number, F_SETFL, flags & ~O_DIRECT) != 0) return false;
    if (is_direct_.exchange(false)) {  // after F_SETFL: who reads false must not meet O_DIRECT. Others may be here too
      notice("O_DIRECT " + options_.directory,
             c10::str("[zeropg rank ", options_.rank, "/", options_.world_size, "] offload: ", options_.directory,
                      " refuses O_DIRECT, so swapping goes through the page cache, which is slower and takes memory."));
    }
    return true;
  }

  void remember(uint64_t offset, std::span<const std::byte> bytes) {
    const uint32_t crc = crc32c(bytes);
    const std::lock_guard lock(mutex_);
    auto first = written_.lower_bound(offset);
    if (first != written_.begin()) {
      if (const auto before = std::prev(first); before->first + before->second.bytes > offset) first = before;
    }
    written_.erase(first, written_.lower_bound(offset + bytes.size()));
    written_[offset] = {bytes.size(), crc};
  }

  void verify(uint64_t offset, std::span<const std::byte> bytes) {
    uint32_t expected = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto found = written_.find(offset);
      if (found == written_.end() || found->second.bytes != bytes.size()) return;
      expected = found->second.crc;
    }
    if (crc32c(bytes) != expected) {
      fail(c10::str("reading ", bytes.size(), " bytes at offset ", offset, " (they are not what was written)"), EIO,
           "the disk or another program has changed them; check the disk and resume from a checkpoint.");
    }
  }

  const FileTierOptions options_;
  const Descriptor descriptor_;
  std::atomic<bool> is_direct_;
  std::mutex mutex_;
  uint64_t end_ = 0;                     // of what has been reserved; guarded by mutex_
  std::map<uint64_t, uint64_t> free_;    // holes before it: offset -> bytes; guarded by mutex_
  std::map<uint64_t, Written> written_;  // last writes that nothing has overwritten; guarded by mutex_
  const pid_t process_ = ::getpid();
  std::unique_ptr<TransferQueue> queue_;  // last: its threads use all of the above
};

}  // namespace

std::unique_ptr<Tier> make_file_tier(const FileTierOptions& options) {
  TORCH_CHECK_VALUE(options.threads >= 1 && options.threads <= 64, "[zeropg] offload: threads is ", options.threads,
                    ", expected 1 to 64");
  return std::make_unique<FileTier>(options);
}

}  // namespace zeropg
