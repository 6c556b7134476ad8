#include "sharding/checkpoint/reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "sharding/checkpoint/crc32c.h"
#include "sharding/checkpoint/file_error.h"

namespace zeropg {
namespace {

constexpr uint64_t kAtOnce = 128 << 10;  // stays in a core's cache until its checksum is made

std::string hexadecimal(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

}  // namespace

FileReader::FileReader(std::string path, uint64_t bytes, uint64_t chunk_bytes, std::vector<uint32_t> checksums)
    : path_(std::move(path)), bytes_(bytes), chunk_bytes_(chunk_bytes), checksums_(std::move(checksums)) {
  TORCH_CHECK_VALUE(chunk_bytes > 0 && checksums_.size() == bytes / chunk_bytes + (bytes % chunk_bytes != 0),
                    "expected one checksum per ", chunk_bytes, " bytes of '", path_, "', got ", checksums_.size(),
                    " for ", bytes, " bytes");
  present_ = checksums_.size();
  do {
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail("open", errno, 0);
  struct stat status {};
  const bool is_known = ::fstat(descriptor_, &status) == 0;
  if (!is_known || static_cast<uint64_t>(status.st_size) != bytes) {
    const int code = errno;
    ::close(std::exchange(descriptor_, -1));
    if (!is_known) fail("stat", code, 0);
    TORCH_CHECK_VALUE(false, "'", path_, "' has ", status.st_size, " bytes, expected ", bytes, ": it was ",
                      static_cast<uint64_t>(status.st_size) < bytes ? "cut off" : "changed", " after it was written");
  }
}

FileReader::~FileReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileReader::fail(const char* action, int code, uint64_t offset) const {
  throw FileError(c10::str("could not ", action, " '", path_, "' (", bytes_, " bytes) at offset ", offset, ": ",
                           std::strerror(code), " (errno ", code, ")"),
                  code);
}

void FileReader::check_range(uint64_t offset, uint64_t bytes) const {
  TORCH_CHECK_VALUE(offset <= bytes_ && bytes <= bytes_ - offset, "the range [", offset, ", ", offset + bytes,
                    ") is outside '", path_, "', which has ", bytes_, " bytes");
}

uint64_t FileReader::bytes_of_chunk(uint64_t index) const {
  return std::min(chunk_bytes_, bytes_ - index * chunk_bytes_);
}

void FileReader::read_chunk(uint64_t index, std::byte* place) const {
  const uint64_t start = index * chunk_bytes_;
  const uint64_t count = bytes_of_chunk(index);
  uint32_t found = 0;
  for (uint64_t done = 0; done < count;) {
    const ssize_t got =
        ::pread(descriptor_, place + done, std::min(kAtOnce, count - done), static_cast<off_t>(start + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", errno, start + done);
    TORCH_CHECK_VALUE(got > 0, "'", path_, "' ends at byte ", start + done, ", expected ", bytes_, " bytes");
    found = crc32c({place + done, static_cast<size_t>(got)}, found);
    done += static_cast<uint64_t>(got);
  }
  TORCH_CHECK_VALUE(found == checksums_[index], "'", path_, "' is damaged: bytes [", start, ", ", start + count,
                    ") have the CRC-32C ", hexadecimal(found), ", expected ", hexadecimal(checksums_[index]));
}

std::byte* FileReader::at_offset(uint64_t offset) {
  const uint64_t index = offset / chunk_bytes_;
  if (index != present_) {
    // Both are bounded by the size that the file really has.
    if (chunk_ == nullptr) chunk_ = std::make_unique_for_overwrite<std::byte[]>(std::min(chunk_bytes_, bytes_));
    present_ = checksums_.size();
    read_chunk(index, chunk_.get());
    present_ = index;
  }
  return chunk_.get() + (offset - index * chunk_bytes_);
}

void FileReader::read(uint64_t offset, c10::ScalarType dtype, const at::Tensor& flat) {
  TORCH_CHECK_VALUE(flat.dim() == 1, "expected a flat tensor, got ", flat.dim(), " dimensions");
  const uint64_t element_bytes = c10::elementSize(dtype);
  const auto numel = static_cast<uint64_t>(flat.numel());
  TORCH_CHECK_VALUE(numel <= bytes_ / element_bytes, "'", path_, "' has ", bytes_, " bytes, too few for ", numel,
                    " elements of ", element_bytes);
  check_range(offset, numel * element_bytes);
  // Then no element lies in two chunks.
  TORCH_CHECK_VALUE(offset % element_bytes == 0 && chunk_bytes_ % element_bytes == 0, "offset ", offset,
                    " or chunks of ", chunk_bytes_, " bytes are not aligned to elements of ", element_bytes);
  const at::NoGradGuard no_grad;
  const bool takes_chunks = flat.device().is_cpu() && flat.scalar_type() == dtype && flat.is_contiguous();
  for (uint64_t done = 0; done < numel;) {
    const uint64_t at_byte = offset + done * element_bytes;
    const uint64_t count = std::min(numel - done, (chunk_bytes_ - at_byte % chunk_bytes_) / element_bytes);
    const uint64_t index = at_byte / chunk_bytes_;
    if (takes_chunks && index != present_ && count * element_bytes == bytes_of_chunk(index)) {
      read_chunk(index, static_cast<std::byte*>(flat.mutable_data_ptr()) + done * element_bytes);
      done += count;
      continue;
    }
    const at::Tensor part =
        at::from_blob(at_offset(at_byte), {static_cast<int64_t>(count)}, at::TensorOptions().dtype(dtype));
    flat.narrow(0, static_cast<int64_t>(done), static_cast<int64_t>(count)).copy_(part);
    done += count;
  }
}

std::string FileReader::read_bytes(uint64_t offset, uint64_t bytes) {
  check_range(offset, bytes);
  std::string result;
  result.reserve(bytes);
  while (result.size() < bytes) {
    const uint64_t at_byte = offset + result.size();
    const uint64_t count = std::min(bytes - result.size(), chunk_bytes_ - at_byte % chunk_bytes_);
    result.append(reinterpret_cast<const char*>(at_offset(at_byte)), count);
  }
  return result;
}

}  // namespace zeropg
