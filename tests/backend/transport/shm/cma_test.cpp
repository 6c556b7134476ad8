#include "backend/transport/shm/cma.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

namespace zeropg {
namespace {

// A child with memory to read, which lives as long as this object.
class Neighbour {
 public:
  Neighbour() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      data_ = std::vector<uint8_t>(9'000'001, 7);
      const Answer answer{own_cma_identity(), reinterpret_cast<uint64_t>(data_.data())};
      const bool is_said = ::write(ends[1], &answer, sizeof answer) == sizeof answer;
      if (is_said) ::pause();
      ::_exit(0);
    }
    EXPECT_EQ(::read(ends[0], &answer_, sizeof answer_), static_cast<ssize_t>(sizeof answer_));
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Neighbour() { end(); }
  void end() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    pid_ = -1;
  }
  const CmaIdentity& identity() const { return answer_.identity; }
  uint64_t address() const { return answer_.address; }

 private:
  struct Answer {
    CmaIdentity identity;
    uint64_t address;
  };
  pid_t pid_ = -1;
  std::vector<uint8_t> data_;
  Answer answer_{};
};

TEST(Cma, ReadsAnotherProcess) {
  Neighbour neighbour;
  EXPECT_NE(neighbour.identity(), own_cma_identity());
  CmaReader reader(neighbour.identity());
  if (!reader.is_usable()) GTEST_SKIP() << reader.refusal();
  std::vector<std::byte> bytes(9'000'001);
  EXPECT_TRUE(reader.read(neighbour.address(), bytes));
  EXPECT_TRUE(reader.confirm());
  EXPECT_EQ(bytes, std::vector<std::byte>(9'000'001, std::byte{7}));
}

TEST(Cma, ReadsItsOwnProcess) {
  CmaReader reader(own_cma_identity());
  if (!reader.is_usable()) GTEST_SKIP() << reader.refusal();
  const std::array<char, 4> from{'a', 'b', 'c', 'd'};
  std::array<char, 4> to{};
  EXPECT_TRUE(reader.read(reinterpret_cast<uint64_t>(from.data()), std::as_writable_bytes(std::span(to))));
  EXPECT_EQ(to, from);
}

TEST(Cma, RefusesAProcessWithoutTheToken) {
  Neighbour neighbour;
  CmaIdentity wrong = neighbour.identity();
  wrong.token[1] += 1;
  EXPECT_FALSE(CmaReader(wrong).is_usable());
  wrong = neighbour.identity();
  wrong.token_address = 16;
  EXPECT_FALSE(CmaReader(wrong).is_usable());
}

TEST(Cma, SaysThatTheProcessIsGone) {
  Neighbour neighbour;
  CmaReader reader(neighbour.identity());
  if (!reader.is_usable()) GTEST_SKIP() << reader.refusal();
  EXPECT_FALSE(reader.is_gone());
  neighbour.end();
  EXPECT_FALSE(reader.confirm());
  EXPECT_TRUE(reader.is_gone());
  std::array<std::byte, 4> bytes{};
  EXPECT_FALSE(reader.read(neighbour.address(), bytes));
  EXPECT_NE(reader.refusal().find("process_vm_readv: No such process"), std::string::npos);
}

TEST(Cma, AnAddressThatIsNotThePeersMakesAReadFail) {
  Neighbour neighbour;
  CmaReader reader(neighbour.identity());
  if (!reader.is_usable()) GTEST_SKIP() << reader.refusal();
  std::array<std::byte, 4> bytes{};
  EXPECT_FALSE(reader.read(~uint64_t{0} - 64, bytes));
  EXPECT_FALSE(reader.is_usable());
  EXPECT_FALSE(reader.is_gone());
}

}  // namespace
}  // namespace zeropg
