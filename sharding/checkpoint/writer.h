// One file that several ranks write at the same time, each its own byte ranges. Every system call's result is checked
// and reported with path, offset and errno. How the ranks agree and commit: README.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/checksum.h"
#include "sharding/checkpoint/file_error.h"

namespace zeropg {

// Where tensors are cast before they are written: one per rank and export, reused, so that an export of any size
// touches few fresh pages. Page-aligned, so that a chunk placed at (file offset modulo the block) may be written with
// O_DIRECT.
class StagingBuffer {
 public:
  StagingBuffer();
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
};

// Invariant: `descriptor_` is open for writing until close(). Not thread-safe; many writers may be open on one file.
class FileWriter {
 public:
  // Makes the file (mode 0600; it must not exist) and reserves all its space, so that a full disk shows before any data
  // is written. Holds an advisory lock until close(): by it, a later job tells a dead writer's leftovers from a live
  // file.
  static FileWriter create(const std::string& path, uint64_t bytes);
  // Opens a file that another rank has created with `bytes` bytes. FileError with ENOENT: this rank does not see it.
  static FileWriter open(const std::string& path, uint64_t bytes);

  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();

  // Writes `bytes` at `offset`; continues short writes.
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // Writes `flat` ([numel], any device and dtype) as `dtype` at `offset`: cast as Tensor::to does (to nearest, ties to
  // even) chunk by chunk in `staging`. Waits for the copy from a device; returns when the bytes are with the kernel.
  void write(uint64_t offset, const at::Tensor& flat, c10::ScalarType dtype, StagingBuffer& staging);
  // From here on the checksums of all that this writer writes are kept.
  void keep_checksums(uint64_t chunk_bytes) { checksums_.emplace(chunk_bytes); }
  // Empty without keep_checksums.
  std::vector<ChecksumPiece> checksums() const {
    return checksums_ ? checksums_->pieces() : std::vector<ChecksumPiece>();
  }
  // Data and size are on the disk when this returns.
  void sync();
  // Closes and reports what only close() can tell (network file systems). Idempotent.
  void close();

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }

 private:
  FileWriter(std::string path, uint64_t bytes, int flags);
  [[noreturn]] void fail(const char* action, int code, uint64_t offset) const;
  void check_range(uint64_t offset, uint64_t bytes) const;
  void reserve();
  void write_buffered(uint64_t offset, std::span<const std::byte> bytes);
  void write_staged(uint64_t offset, std::span<const std::byte> bytes);
  bool write_direct(uint64_t offset, std::span<const std::byte> bytes);

  std::string path_;
  uint64_t bytes_ = 0;
  int descriptor_ = -1;
  int direct_descriptor_ = -1;  // O_DIRECT; -1: not tried or not supported here
  bool is_direct_possible_ = true;
  std::optional<ChunkChecksums> checksums_;
};

}  // namespace zeropg
