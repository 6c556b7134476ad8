// Checksums of chunks, and every way in which pieces can fail to cover a file.
#include "sharding/checkpoint/checksum.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "sharding/checkpoint/crc32c.h"

namespace zeropg {
namespace {

std::vector<std::byte> random_bytes(size_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Two writers, ranges that cut through chunks, written in another order.
TEST(ChunkChecksums, of_two_writers_are_those_of_the_chunks) {
  const std::vector<std::byte> bytes = random_bytes(1003);
  const std::span<const std::byte> all(bytes);
  ChunkChecksums first(100), second(100);
  second.add(650, all.subspan(650));
  first.add(0, all.first(3));
  first.add(3, all.subspan(3, 330));
  second.add(333, all.subspan(333, 7));
  first.add(340, all.subspan(340, 310));
  second.add(17, {});
  EXPECT_EQ(second.pieces().size(), 6u);  // 333-340 and 650-700, ..., 1000-1003
  std::vector<ChecksumPiece> pieces = first.pieces();
  pieces.insert(pieces.end(), second.pieces().begin(), second.pieces().end());
  const std::vector<uint32_t> found = join_pieces(pieces, bytes.size(), 100);
  ASSERT_EQ(found.size(), 11u);
  for (size_t chunk = 0; chunk < found.size(); ++chunk) {
    EXPECT_EQ(found[chunk], crc32c(all.subspan(chunk * 100, std::min<size_t>(100, 1003 - chunk * 100))));
  }
}

void expect_refused(const std::vector<ChecksumPiece>& pieces, const std::string& words) {
  try {
    join_pieces(pieces, 300, 100);
    ADD_FAILURE() << "accepted; expected: " << words;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(ChunkChecksums, that_do_not_cover_the_file_once_are_refused) {
  EXPECT_TRUE(join_pieces({}, 0, 100).empty());
  expect_refused({}, "bytes [0, 300) were written by no rank");
  expect_refused({{0, 100, 1}, {200, 300, 2}}, "bytes [100, 200) were written by no rank");
  expect_refused({{0, 100, 1}, {90, 100, 2}}, "bytes [90, 100) were written twice");
  expect_refused({{0, 150, 1}}, "not inside one chunk");
  expect_refused({{0, 100, 1}, {100, 200, 1}, {200, 301, 2}}, "not inside one chunk");
  expect_refused({{0, 0, 1}}, "not inside one chunk");
}

}  // namespace
}  // namespace zeropg
