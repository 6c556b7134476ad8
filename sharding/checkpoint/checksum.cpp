#include "sharding/checkpoint/checksum.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "sharding/checkpoint/crc32c.h"

namespace zeropg {

ChunkChecksums::ChunkChecksums(uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
  TORCH_CHECK_VALUE(chunk_bytes > 0, "chunk_bytes is 0; expected a positive number");
}

void ChunkChecksums::add(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t count = std::min<uint64_t>(bytes.size(), chunk_bytes_ - offset % chunk_bytes_);
    const bool continues = offset % chunk_bytes_ != 0 && !pieces_.empty() && pieces_.back().stop == offset;
    if (!continues) pieces_.push_back({offset, offset, 0});
    ChecksumPiece& piece = pieces_.back();
    piece.crc = crc32c(bytes.first(count), piece.crc);
    piece.stop += count;
    offset += count;
    bytes = bytes.subspan(count);
  }
}

std::vector<uint32_t> join_pieces(std::vector<ChecksumPiece> pieces, uint64_t file_bytes, uint64_t chunk_bytes) {
  TORCH_CHECK_VALUE(chunk_bytes > 0, "chunk_bytes is 0; expected a positive number");
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.start < b.start; });
  std::vector<uint32_t> checksums;
  uint64_t end = 0;
  for (const ChecksumPiece& piece : pieces) {
    TORCH_CHECK_VALUE(piece.start == end, "bytes [", std::min(end, piece.start), ", ", std::max(end, piece.start),
                      ") were written ", piece.start < end ? "twice" : "by no rank");
    TORCH_CHECK_VALUE(piece.start < piece.stop && piece.stop <= file_bytes &&
                          piece.start / chunk_bytes == (piece.stop - 1) / chunk_bytes,
                      "the piece [", piece.start, ", ", piece.stop, ") is not inside one chunk of the file");
    if (piece.start % chunk_bytes == 0) {
      checksums.push_back(piece.crc);
    } else {
      checksums.back() = join_crc32c(checksums.back(), piece.crc, piece.stop - piece.start);
    }
    end = piece.stop;
  }
  TORCH_CHECK_VALUE(end == file_bytes, "bytes [", end, ", ", file_bytes, ") were written by no rank");
  return checksums;
}

}  // namespace zeropg
