#include "sharding/checkpoint/writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "backend/diagnostics/notices.h"

namespace zeropg {
namespace {

// O_DIRECT wants offset, length and address in multiples of the device's block; 4 KiB is enough for all common ones.
constexpr uint64_t kBlockBytes = 4096;
// 4 MiB per pwrite reaches the device's speed with one thread (measured: 3.0 GB/s against 0.4 buffered).
constexpr uint64_t kStagingBytes = uint64_t{4} << 20;
// Below this a direct write's latency costs more than the page cache does.
constexpr uint64_t kDirectMinimumBytes = uint64_t{1} << 20;
// The kernel never transfers more in one call (man 2 write).
constexpr uint64_t kMaxTransferBytes = 0x7ffff000;

template <typename Call>
auto retry_interrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

StagingBuffer::StagingBuffer()
    : data_(static_cast<std::byte*>(::operator new (kStagingBytes + kBlockBytes, std::align_val_t{kBlockBytes}))) {}

StagingBuffer::~StagingBuffer() { ::operator delete (data_, std::align_val_t{kBlockBytes}); }

FileWriter::FileWriter(std::string path, uint64_t bytes, int flags) : path_(std::move(path)), bytes_(bytes) {
  // O_NOFOLLOW: a link planted under the temporary name must not lead elsewhere.
  descriptor_ =
      retry_interrupted([&] { return ::open(path_.c_str(), flags | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600); });
  if (descriptor_ < 0) fail(flags & O_CREAT ? "create" : "open", errno, 0);
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(other.bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      direct_descriptor_(std::exchange(other.direct_descriptor_, -1)),
      is_direct_possible_(other.is_direct_possible_),
      checksums_(std::move(other.checksums_)) {}

FileWriter::~FileWriter() {
  if (direct_descriptor_ >= 0) ::close(direct_descriptor_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

FileWriter FileWriter::create(const std::string& path, uint64_t bytes) {
  FileWriter writer(path, bytes, O_CREAT | O_EXCL);
  // Only a mark: a file system without locks costs the clean-up of leftovers, nothing else.
  (void)::flock(writer.descriptor_, LOCK_EX | LOCK_NB);
  try {
    writer.reserve();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  return writer;
}

FileWriter FileWriter::open(const std::string& path, uint64_t bytes) {
  FileWriter writer(path, bytes, 0);
  struct stat status {};
  if (::fstat(writer.descriptor_, &status) != 0) writer.fail("stat", errno, 0);
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    throw FileError(c10::str("'", path, "' has ", status.st_size, " bytes, rank 0 made it with ", bytes), ESTALE);
  }
  return writer;
}

void FileWriter::fail(const char* action, int code, uint64_t offset) const {
  throw FileError(c10::str("could not ", action, " '", path_, "' (", bytes_, " bytes) at offset ", offset, ": ",
                           std::strerror(code), " (errno ", code, ")"),
                  code);
}

void FileWriter::reserve() {
  const auto size = static_cast<off_t>(bytes_);
  if (bytes_ > 0 && retry_interrupted([&] { return ::fallocate(descriptor_, 0, 0, size); }) == 0) return;
  if (bytes_ > 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) fail("reserve space for", errno, 0);
  // No fallocate here (posix_fallocate would write every block): a sparse file and a look at the free space.
  if (retry_interrupted([&] { return ::ftruncate(descriptor_, size); }) != 0) fail("reserve space for", errno, 0);
  struct statvfs space {};
  if (::fstatvfs(descriptor_, &space) == 0 && space.f_blocks > 0 && space.f_bavail < bytes_ / space.f_frsize) {
    fail("reserve space for", ENOSPC, 0);
  }
}

void FileWriter::check_range(uint64_t offset, uint64_t bytes) const {
  TORCH_CHECK(descriptor_ >= 0, "'", path_, "' is closed");
  TORCH_CHECK_VALUE(offset <= bytes_ && bytes <= bytes_ - offset, "the range [", offset, ", ", offset + bytes,
                    ") is outside '", path_, "', which has ", bytes_, " bytes");
}

void FileWriter::write(uint64_t offset, std::span<const std::byte> bytes) {
  check_range(offset, bytes.size());
  write_buffered(offset, bytes);
  if (checksums_) checksums_->add(offset, bytes);
}

void FileWriter::write_buffered(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t request = std::min<uint64_t>(bytes.size(), kMaxTransferBytes);
    const ssize_t written =
        retry_interrupted([&] { return ::pwrite(descriptor_, bytes.data(), request, static_cast<off_t>(offset)); });
    if (written < 0) fail("write", errno, offset);
    // A file system that accepts nothing and gives no reason would loop for ever.
    if (written == 0) fail("write", ENOSPC, offset);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void FileWriter::write(uint64_t offset, const at::Tensor& flat, c10::ScalarType dtype, StagingBuffer& staging) {
  TORCH_CHECK_VALUE(flat.dim() == 1, "expected a flat tensor, got ", flat.dim(), " dimensions");
  const uint64_t element_bytes = c10::elementSize(dtype);
  const auto numel = static_cast<uint64_t>(flat.numel());
  check_range(offset, numel * element_bytes);
  TORCH_CHECK_VALUE(offset % element_bytes == 0, "offset ", offset, " is not aligned to elements of ", element_bytes);
  const at::NoGradGuard no_grad;
  for (uint64_t done = 0; done < numel;) {
    const uint64_t at_byte = offset + done * element_bytes;
    // Chunks end at multiples of kStagingBytes of the file, so that all but the ends of a range can go out directly.
    const uint64_t room = kStagingBytes - at_byte % kStagingBytes;
    const uint64_t count = std::min(numel - done, room / element_bytes);
    std::byte* chunk = staging.data() + at_byte % kBlockBytes;
    at::Tensor staged = at::from_blob(chunk, {static_cast<int64_t>(count)}, at::TensorOptions().dtype(dtype));
    staged.copy_(flat.narrow(0, static_cast<int64_t>(done), static_cast<int64_t>(count)));
    write_staged(at_byte, {chunk, count * element_bytes});
    if (checksums_) checksums_->add(at_byte, {chunk, count * element_bytes});
    done += count;
  }
}

void FileWriter::write_staged(uint64_t offset, std::span<const std::byte> bytes) {
  const uint64_t head = std::min<uint64_t>((kBlockBytes - offset % kBlockBytes) % kBlockBytes, bytes.size());
  const uint64_t body = (bytes.size() - head) / kBlockBytes * kBlockBytes;
  if (body < kDirectMinimumBytes || !write_direct(offset + head, bytes.subspan(head, body))) {
    return write_buffered(offset, bytes);
  }
  // Blocks that this range shares with its neighbours, perhaps another rank's, go through the page cache.
  write_buffered(offset, bytes.first(head));
  write_buffered(offset + head + body, bytes.subspan(head + body));
}

bool FileWriter::write_direct(uint64_t offset, std::span<const std::byte> bytes) {
  if (!is_direct_possible_) return false;
  if (direct_descriptor_ < 0) {
    direct_descriptor_ =
        retry_interrupted([&] { return ::open(path_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC | O_NOFOLLOW); });
  }
  if (direct_descriptor_ >= 0) {
    const ssize_t written = retry_interrupted(
        [&] { return ::pwrite(direct_descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written >= 0) {
      // A short direct write ends anywhere, so the rest may be unaligned: the page cache takes it.
      write_buffered(offset + static_cast<uint64_t>(written), bytes.subspan(static_cast<size_t>(written)));
      return true;
    }
    if (errno != EINVAL && errno != EOPNOTSUPP) fail("write", errno, offset);
  }
  is_direct_possible_ = false;  // e.g. a file system without O_DIRECT: the page cache is slower and as right
  notice("O_DIRECT checkpoint",
         c10::str("[zeropg] checkpoint: '", path_, "' cannot be written with O_DIRECT (", std::strerror(errno),
                  "), so checkpoints go through the page cache, which is slower and takes "
                  "memory; `python -m zeropg doctor --path` looks for a better folder."));
  return false;
}

void FileWriter::sync() {
  TORCH_CHECK(descriptor_ >= 0, "'", path_, "' is closed");
  if (retry_interrupted([&] { return ::fsync(descriptor_); }) != 0) fail("fsync", errno, 0);
}

void FileWriter::close() {
  if (direct_descriptor_ >= 0) ::close(std::exchange(direct_descriptor_, -1));
  // Not retried: Linux has freed the descriptor even when it says EINTR.
  if (descriptor_ >= 0 && ::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("close", errno, 0);
}

}  // namespace zeropg
