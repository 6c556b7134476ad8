// What a writer wrote is read in any ranges; what was changed since is noticed.
#include "sharding/checkpoint/reader.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "sharding/checkpoint/checksum.h"
#include "sharding/checkpoint/crc32c.h"
#include "sharding/checkpoint/writer.h"

namespace zeropg {
namespace {

constexpr uint64_t kChunk = 1024;

class Reader : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "zeropg_reader_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ / "file";
    values_ = at::rand({1501}, at::kFloat);
    FileWriter writer = FileWriter::create(path_, bytes());
    writer.keep_checksums(kChunk);
    StagingBuffer staging;
    writer.write(2000, values_.slice(0, 500), at::kFloat, staging);
    writer.write(0, values_.slice(0, 0, 500), at::kFloat, staging);
    checksums_ = join_pieces(writer.checksums(), bytes(), kChunk);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  uint64_t bytes() const { return static_cast<uint64_t>(values_.numel()) * 4; }
  FileReader reader() const { return {path_, bytes(), kChunk, checksums_}; }

  template <typename Error, typename Action>
  static void expect_error(Action action, const std::string& words) {
    try {
      action();
      ADD_FAILURE() << "nothing was thrown; expected: " << words;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }

  std::filesystem::path folder_;
  std::string path_;
  at::Tensor values_;
  std::vector<uint32_t> checksums_;
};

TEST_F(Reader, reads_any_range_in_any_dtype) {
  FileReader file = reader();
  for (const auto& [start, stop] : {std::pair{0, 1501}, {255, 257}, {300, 300}, {1500, 1501}, {1, 1400}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      at::Tensor found = at::empty({stop - start}, dtype);
      file.read(static_cast<uint64_t>(start) * 4, at::kFloat, found);
      EXPECT_TRUE(found.equal(values_.slice(0, start, stop).to(dtype)));
    }
  }
  const std::string raw = file.read_bytes(1000, 3000);
  EXPECT_EQ(0, std::memcmp(raw.data(), values_.const_data_ptr<float>() + 250, 3000));
}

// Whole chunks go straight to where they belong; parts of one, before and behind, do not.
TEST_F(Reader, reads_whole_chunks_into_place) {
  FileReader file = reader();
  for (const auto& [start, stop] : {std::pair{0, 1501}, {256, 512}, {200, 1300}, {1024, 1501}, {1200, 1501}}) {
    at::Tensor flat = at::full({stop - start + 2}, -1, at::kFloat);
    file.read(start * 4, at::kFloat, flat.slice(0, 1, stop - start + 1));
    EXPECT_TRUE(at::equal(flat.slice(0, 1, stop - start + 1), values_.slice(0, start, stop)));
    EXPECT_TRUE(flat[0].item<float>() == -1 && flat[-1].item<float>() == -1);
  }
}

TEST_F(Reader, refuses_ranges_that_the_file_does_not_have) {
  FileReader file = reader();
  expect_error<c10::ValueError>([&] { file.read(4, at::kFloat, at::empty({1501})); }, "is outside");
  expect_error<c10::ValueError>([&] { file.read(0, at::kFloat, at::empty({1502})); }, "too few");
  expect_error<c10::ValueError>([&] { file.read(2, at::kFloat, at::empty({1})); }, "not aligned");
  expect_error<c10::ValueError>([&] { file.read_bytes(~uint64_t{0}, 2); }, "is outside");
  expect_error<c10::ValueError>([&] { file.read_bytes(0, ~uint64_t{0}); }, "is outside");
}

TEST_F(Reader, notices_a_flipped_bit_in_its_own_chunk_only) {
  {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(3000);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(3000);
    file.put(byte);
  }
  FileReader file = reader();
  at::Tensor part = at::empty({100});
  file.read(0, at::kFloat, part);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error<c10::ValueError>([&] { file.read(2100, at::kFloat, part); }, "is damaged: bytes [2048, 3072)");
  }
  file.read(4096, at::kFloat, part);
}

TEST_F(Reader, notices_another_size) {
  std::filesystem::resize_file(path_, bytes() - 1);
  expect_error<c10::ValueError>([&] { reader(); }, "has 6003 bytes, expected 6004: it was cut off");
  std::filesystem::resize_file(path_, bytes() + 1);
  expect_error<c10::ValueError>([&] { reader(); }, "it was changed");
  std::filesystem::resize_file(path_, bytes());
  FileReader file = reader();
  std::filesystem::resize_file(path_, 5500);
  expect_error<c10::ValueError>([&] { file.read_bytes(6000, 4); }, "ends at byte 5500");
  checksums_.pop_back();
  expect_error<c10::ValueError>([&] { reader(); }, "expected one checksum per 1024 bytes");
  std::filesystem::remove(path_);
  checksums_.push_back(0);
  expect_error<FileError>([&] { reader(); }, "could not open");
}

}  // namespace
}  // namespace zeropg
