// Several writers on one file: casts, chunks, alignment, and every error with path, offset and errno.
#include "sharding/checkpoint/writer.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "backend/diagnostics/notices.h"

namespace zeropg {
namespace {

class Writer : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "zeropg_writer_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ / "file";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string content() const {
    std::ostringstream text;
    text << std::ifstream(path_, std::ios::binary).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
  std::string path_;
};

std::span<const std::byte> as_bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST_F(Writer, makes_a_private_file_of_the_full_size) {
  FileWriter writer = FileWriter::create(path_, 10);
  writer.write(2, as_bytes("abc"));
  writer.sync();
  writer.close();
  writer.close();
  EXPECT_EQ(content(), std::string("\0\0abc\0\0\0\0\0", 10));
  struct stat status {};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(Writer, says_once_that_it_goes_through_the_page_cache_and_why) {
  set_notice_bell([] {});
  StagingBuffer staging;
  const at::Tensor flat = at::arange(1'000'000, at::kFloat);
  for (const char* name : {"one", "other"}) {
    path_ = folder_ / name;
    FileWriter writer = FileWriter::create(path_, 4'000'000);
    struct rlimit before {};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const struct rlimit none { .rlim_cur = 0, .rlim_max = before.rlim_max };  // the second descriptor is refused
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    writer.write(0, flat, at::kFloat, staging);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(content(), std::string(static_cast<const char*>(flat.const_data_ptr()), 4'000'000));
  }
  const std::vector<std::string> lines = take_notices();
  set_notice_bell(nullptr);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_NE(lines[0].find((folder_ / "one").string() + "' cannot be written with O_DIRECT (Too many open files)"),
            std::string::npos)
      << lines[0];
}

TEST_F(Writer, casts_as_tensor_to_does_at_any_offset_and_length) {
  StagingBuffer staging;
  for (const auto source : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const auto target : {at::kBFloat16, at::kHalf, at::kFloat}) {
      for (const int64_t numel : {0, 1, 1001, 5'000'003}) {  // the last needs several chunks and O_DIRECT
        const at::Tensor flat = at::randn({numel}, source);
        const auto element_bytes = static_cast<uint64_t>(c10::elementSize(target));
        const uint64_t offset = 8 + 3 * element_bytes;
        FileWriter writer = FileWriter::create(path_, offset + numel * element_bytes + 5);
        writer.write(offset, flat, target, staging);
        writer.close();
        const at::Tensor expected = flat.to(target);
        const std::string bytes(static_cast<const char*>(expected.data_ptr()), expected.nbytes());
        EXPECT_TRUE(content() == std::string(offset, '\0') + bytes + std::string(5, '\0')) << source << target << numel;
        std::filesystem::remove(path_);
      }
    }
  }
}

TEST_F(Writer, neighbours_in_one_block_do_not_overwrite_each_other) {
  const at::Tensor flat = at::randn({3'000'000}, at::kFloat);
  FileWriter first = FileWriter::create(path_, 6'000'000);
  FileWriter second = FileWriter::open(path_, 6'000'000);
  StagingBuffer staging;
  second.write(2 * 1'234'567, flat.narrow(0, 1'234'567, 3'000'000 - 1'234'567), at::kHalf, staging);
  first.write(0, flat.narrow(0, 0, 1'234'567), at::kHalf, staging);
  first.sync();
  second.sync();
  const at::Tensor expected = flat.to(at::kHalf);
  EXPECT_TRUE(content() == std::string(static_cast<const char*>(expected.data_ptr()), expected.nbytes()));
}

TEST_F(Writer, a_tensor_that_requires_grad_or_is_strided_is_written) {
  StagingBuffer staging;
  const at::Tensor flat = at::arange(10, at::kFloat).requires_grad_();
  FileWriter writer = FileWriter::create(path_, 10);
  writer.write(0, flat.slice(0, 0, 10, 2), at::kBFloat16, staging);
  writer.close();
  const at::Tensor expected = flat.detach().slice(0, 0, 10, 2).to(at::kBFloat16).contiguous();
  EXPECT_EQ(content(), std::string(static_cast<const char*>(expected.data_ptr()), 10));
}

TEST_F(Writer, an_existing_file_or_link_is_never_overwritten) {
  std::ofstream(path_) << "old";
  EXPECT_THROW(FileWriter::create(path_, 1), FileError);
  std::filesystem::create_symlink(path_, folder_ / "link");
  EXPECT_THROW(FileWriter::create(folder_ / "link", 1), FileError);
  EXPECT_THROW(FileWriter::open(folder_ / "link", 3), FileError);
  EXPECT_EQ(content(), "old");
}

TEST_F(Writer, open_tells_a_missing_file_and_a_wrong_size) {
  try {
    FileWriter::open(path_, 1);
    FAIL();
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), ENOENT);
  }
  std::ofstream(path_) << "old";
  EXPECT_THROW(FileWriter::open(path_, 4), FileError);
}

TEST_F(Writer, ranges_outside_the_file_are_refused) {
  StagingBuffer staging;
  FileWriter writer = FileWriter::create(path_, 8);
  EXPECT_THROW(writer.write(7, as_bytes("ab")), c10::ValueError);
  EXPECT_THROW(writer.write(UINT64_MAX, as_bytes("ab")), c10::ValueError);
  EXPECT_THROW(writer.write(0, at::zeros({5}), at::kHalf, staging), c10::ValueError);
  EXPECT_THROW(writer.write(1, at::zeros({1}), at::kHalf, staging), c10::ValueError);
  EXPECT_THROW(writer.write(0, at::zeros({1, 1}), at::kHalf, staging), c10::ValueError);
  writer.close();
  EXPECT_THROW(writer.write(0, as_bytes("ab")), c10::Error);
}

TEST_F(Writer, a_limit_shows_when_space_is_reserved_and_leaves_no_file) {
  ::signal(SIGXFSZ, SIG_IGN);  // as Python does
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  try {
    FileWriter::create(path_, 2 << 20);
    ADD_FAILURE();
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), EFBIG);
    EXPECT_NE(std::string(error.what()).find(path_ + "' (2097152 bytes) at offset 0"), std::string::npos)
        << error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(Writer, a_failed_write_names_path_and_offset) {
  ::signal(SIGXFSZ, SIG_IGN);
  FileWriter writer = FileWriter::create(path_, 2 << 20);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  StagingBuffer staging;
  try {
    writer.write(0, at::zeros({1 << 20}), at::kHalf, staging);
    ADD_FAILURE();
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), EFBIG);
    EXPECT_NE(std::string(error.what()).find("at offset 1048576"), std::string::npos) << error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
}

}  // namespace
}  // namespace zeropg
