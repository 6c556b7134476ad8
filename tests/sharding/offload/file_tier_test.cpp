#include "sharding/offload/file_tier.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/sharding/offload/tier_suite.h"

namespace zeropg {
namespace {

// A fresh directory on a real disk (the build's) or on another file system.
class Directory {
 public:
  explicit Directory(const std::string& parent) {
    std::string path = parent + "/tier-test-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make " + path);
    path_ = path;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string disk() { return std::filesystem::current_path().string(); }

// A tier whose directory is gone as soon as it is made: the file needs no name.
std::unique_ptr<Tier> on(const std::string& parent, int64_t threads = 3) {
  const Directory directory(parent);
  return make_file_tier({.directory = directory.path(), .threads = threads, .rank = 3, .world_size = 8});
}

INSTANTIATE_TEST_SUITE_P(Disk, TierSuite, ::testing::Values([] { return on(disk()); }));
INSTANTIATE_TEST_SUITE_P(OneThread, TierSuite, ::testing::Values([] { return on(disk(), 1); }));
INSTANTIATE_TEST_SUITE_P(Memory, TierSuite, ::testing::Values([] { return on("/dev/shm"); }));

template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const TierError& error) {
    return error.what();
  }
  return "no error";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is missing in: " << text;
  }
}

// The tier's own descriptor: the one open file that has no name and lies in `directory`.
std::string swap_file_of_this_process(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.starts_with(directory) && target.ends_with("(deleted)")) return entry.path().string();
  }
  return "";
}

TEST(FileTier, the_file_has_no_name_and_nobody_else_may_read_it) {
  const Directory directory(disk());
  const auto tier = make_file_tier({.directory = directory.path()});
  tier->allocate(1 << 20, "a test");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  struct stat facts = {};
  ASSERT_EQ(::stat(swap_file_of_this_process(directory.path()).c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600U);
  EXPECT_GE(facts.st_blocks * 512, 1 << 20) << "the space was not reserved";
}

TEST(FileTier, two_jobs_in_one_directory_do_not_meet) {
  const Directory directory(disk());
  const auto first = make_file_tier({.directory = directory.path()});
  const auto second = make_file_tier({.directory = directory.path()});
  const TierExtent a = first->allocate(kPageBytes, "a test");
  const TierExtent b = second->allocate(kPageBytes, "a test");
  const AlignedBuffer ones = pattern(kPageBytes, 1);
  const AlignedBuffer twos = pattern(kPageBytes, 2);
  first->write(a, 0, ones.part(0, kPageBytes)).wait();
  second->write(b, 0, twos.part(0, kPageBytes)).wait();
  AlignedBuffer read(kPageBytes);
  first->read(a, 0, read.part(0, kPageBytes)).wait();
  EXPECT_EQ(std::memcmp(read.data(), ones.data(), kPageBytes), 0);
}

TEST(FileTier, a_killed_process_leaves_nothing) {
  const Directory directory(disk());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto tier = make_file_tier({.directory = directory.path()});
    tier->allocate(64 << 20, "a test");
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(FileTier, a_forked_child_may_let_it_go) {
  std::unique_ptr<Tier> tier = on(disk());
  const TierExtent extent = tier->allocate(kPageBytes, "a test");
  const AlignedBuffer written = pattern(kPageBytes, 1);
  tier->write(extent, 0, written.part(0, kPageBytes)).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    tier->free(extent);
    tier.reset();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  AlignedBuffer read(kPageBytes);
  tier->read(extent, 0, read.part(0, kPageBytes)).wait();
  EXPECT_EQ(std::memcmp(read.data(), written.data(), kPageBytes), 0);
}

TEST(FileTier, a_missing_directory_is_named_with_rank_and_remedy) {
  expect_words(error_of([] { make_file_tier({.directory = "/no/such/place", .rank = 3, .world_size = 8}); }),
               {"[zeropg rank 3/8] offload: making a swap file in /no/such/place failed", "No such file",
                "name an existing directory"});
}

TEST(FileTier, a_file_instead_of_a_directory_is_refused) {
  const Directory directory(disk());
  std::ofstream(directory.path() + "/file") << "text";
  expect_words(error_of([&] { make_file_tier({.directory = directory.path() + "/file"}); }), {"Not a directory"});
}

TEST(FileTier, a_file_system_that_cannot_be_written_is_refused) {
  expect_words(error_of([] { make_file_tier({.directory = "/proc"}); }), {"making a swap file in /proc failed"});
}

TEST(FileTier, a_size_limit_is_an_error_of_allocate) {
  ::signal(SIGXFSZ, SIG_IGN);  // as Python does
  const auto tier = on(disk());
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = error_of([&] { tier->allocate(4 << 20, "exp_avg of unit 'h.0'"); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  expect_words(text, {"reserving 4194304 bytes for exp_avg of unit 'h.0'", "File too large", "ulimit -f"});
  EXPECT_EQ(tier->reserved_bytes(), 0U);
  EXPECT_EQ(tier->allocate(4 << 20, "a test").bytes, 4U << 20);
}

// A swap file that somebody changes behind the tier's back.
class Meddled : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 8 * kPageBytes;

  void SetUp() override {
    extent_ = tier_->allocate(kBytes, "a test");
    tier_->write(extent_, 0, written_.part(0, kBytes)).wait();
    other_ = ::open(swap_file_of_this_process(directory_.path()).c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(other_, 0);
  }
  void TearDown() override { ::close(other_); }

  std::string read() {
    AlignedBuffer buffer(kBytes);
    return error_of([&] { tier_->read(extent_, 0, buffer.part(0, kBytes)).wait(); });
  }

  Directory directory_{disk()};
  std::unique_ptr<Tier> tier_ = make_file_tier({.directory = directory_.path(), .rank = 1, .world_size = 2});
  TierExtent extent_;
  AlignedBuffer written_ = pattern(kBytes, 1);
  int other_ = -1;
};

TEST_F(Meddled, nothing_is_wrong_at_first) { EXPECT_EQ(read(), "no error"); }

TEST_F(Meddled, a_file_that_was_cut_is_a_short_read) {
  ASSERT_EQ(::ftruncate(other_, kBytes / 2), 0);
  expect_words(read(), {"[zeropg rank 1/2] offload: reading 32768 bytes at offset 0 (it ended after 16384",
                        "resume from a checkpoint"});
}

TEST_F(Meddled, a_hole_is_noticed) {
  ASSERT_EQ(::fallocate(other_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kPageBytes, kPageBytes), 0);
  expect_words(read(), {"they are not what was written", "check the disk"});
}

TEST_F(Meddled, a_flipped_bit_is_noticed) {
  const char byte = static_cast<char>(written_.data()[5000]) ^ 0x10;
  ASSERT_EQ(::pwrite(other_, &byte, 1, 5000), 1);
  expect_words(read(), {"they are not what was written"});
}

TEST_F(Meddled, an_error_of_one_transfer_is_not_one_of_the_next) {
  ASSERT_EQ(::ftruncate(other_, 0), 0);
  EXPECT_NE(read(), "no error");
  ASSERT_EQ(::ftruncate(other_, kBytes), 0);
  tier_->write(extent_, 0, written_.part(0, kBytes)).wait();
  EXPECT_EQ(read(), "no error");
}

TEST(FileTier, describes_how_it_reaches_the_disk) {
  const Directory directory(disk());
  const std::string text = make_file_tier({.directory = directory.path(), .threads = 2})->describe();
  expect_words(text, {directory.path(), "2 threads"});
}

TEST(FileTier, threads_out_of_range_are_refused) {
  EXPECT_THROW(make_file_tier({.directory = disk(), .threads = 0}), c10::ValueError);
}

}  // namespace
}  // namespace zeropg
