// Reads ranges of a file that may be damaged: whole chunks, whose checksums are verified before a byte is used.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zeropg {

// Keeps the chunk read last, so that ranges that follow each other read no chunk twice. Not thread-safe; many readers
// may be open on one file.
class FileReader {
 public:
  // checksums: CRC-32C of each chunk, as join_pieces returns them. FileError when the file cannot be opened; ValueError
  // when it has not exactly `bytes` bytes, or `checksums` does not fit to that.
  FileReader(std::string path, uint64_t bytes, uint64_t chunk_bytes, std::vector<uint32_t> checksums);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Fills `flat` ([numel], any device, any dtype that Tensor::copy_ casts to) from elements of `dtype` at `offset`.
  // Whole chunks go straight to `flat` where it is contiguous, on the CPU and of that dtype. ValueError when a chunk is
  // not what was written; what `flat` holds then is of no use.
  void read(uint64_t offset, c10::ScalarType dtype, const at::Tensor& flat);
  std::string read_bytes(uint64_t offset, uint64_t bytes);

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }

 private:
  [[noreturn]] void fail(const char* action, int code, uint64_t offset) const;
  void check_range(uint64_t offset, uint64_t bytes) const;
  // Reads a chunk, and verifies it.
  void read_chunk(uint64_t index, std::byte* place) const;
  uint64_t bytes_of_chunk(uint64_t index) const;
  // Makes the chunk that holds `offset` present; returns where the byte at `offset` lies.
  std::byte* at_offset(uint64_t offset);

  std::string path_;
  uint64_t bytes_;
  uint64_t chunk_bytes_;
  std::vector<uint32_t> checksums_;
  int descriptor_ = -1;
  std::unique_ptr<std::byte[]> chunk_;
  uint64_t present_;  // index of the chunk in `chunk_`; checksums_.size() while there is none
};

}  // namespace zeropg
