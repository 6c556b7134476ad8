// CRC-32C of a file in chunks of fixed size, made by many writers: each takes the checksums of the bytes that it
// writes, and those of a chunk's parts are joined without reading the file again. Any reader can check any chunk alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zeropg {

// Bytes [start, stop) of a file, inside one chunk.
struct ChecksumPiece {
  uint64_t start = 0;
  uint64_t stop = 0;
  uint32_t crc = 0;
};

// What one writer wrote. Not thread-safe.
class ChunkChecksums {
 public:
  explicit ChunkChecksums(uint64_t chunk_bytes);
  // Takes note of bytes written at `offset`. Writes that follow each other become one piece per chunk.
  void add(uint64_t offset, std::span<const std::byte> bytes);
  const std::vector<ChecksumPiece>& pieces() const { return pieces_; }

 private:
  uint64_t chunk_bytes_;
  std::vector<ChecksumPiece> pieces_;
};

// One checksum per chunk of a file, the last chunk perhaps shorter, from the pieces of all writers in any order.
// ValueError, naming the offset, when they do not cover every byte exactly once.
std::vector<uint32_t> join_pieces(std::vector<ChecksumPiece> pieces, uint64_t file_bytes, uint64_t chunk_bytes);

}  // namespace zeropg
