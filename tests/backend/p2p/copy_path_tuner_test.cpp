#include "backend/p2p/copy_path_tuner.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace zeropg {
namespace {

constexpr uint64_t kBytes = 16 << 20;

// How often each path was taken for `messages` messages that take so long.
std::vector<int> run(CopyPathTuner& choice, int messages, double read_seconds, double receive_seconds,
                     uint64_t bytes = kBytes) {
  std::vector<int> taken(2);
  for (int i = 0; i < messages; ++i) {
    const Path path = choice.next(bytes);
    ++taken[static_cast<size_t>(path)];
    choice.note(path, bytes, path == Path::kRead ? read_seconds : receive_seconds);
  }
  return taken;
}

TEST(CopyPathTuner, TriesBothFirst) {
  CopyPathTuner choice;
  EXPECT_EQ(run(choice, 2 * CopyPathTuner::kTrials, 1, 100), std::vector<int>(2, CopyPathTuner::kTrials));
}

TEST(CopyPathTuner, TakesTheFasterOneAndTriesTheOtherNowAndThen) {
  for (const bool is_read_faster : {true, false}) {
    CopyPathTuner choice;
    run(choice, 2 * CopyPathTuner::kTrials, 1, 1);
    const auto taken = run(choice, 10 * CopyPathTuner::kRetryEvery, is_read_faster ? 1 : 2, is_read_faster ? 2 : 1);
    EXPECT_GE(taken[is_read_faster ? 1 : 0], 10);
    EXPECT_LE(taken[is_read_faster ? 1 : 0], 10 + CopyPathTuner::kTrials);
  }
}

TEST(CopyPathTuner, ForgetsWhatWas) {
  CopyPathTuner choice;
  run(choice, 100, 1, 2);
  run(choice, 10, 3, 2);
  EXPECT_GE(run(choice, 100, 3, 2)[1], 90);
}

TEST(CopyPathTuner, IsNotMovedByOneSlowMessage) {
  CopyPathTuner choice;
  run(choice, 2 * CopyPathTuner::kTrials, 1, 2);
  choice.note(Path::kRead, kBytes, 50);
  EXPECT_GE(run(choice, CopyPathTuner::kRetryEvery, 1, 2)[0], CopyPathTuner::kRetryEvery - 1);
}

TEST(CopyPathTuner, LearnsForEachSizeByItself) {
  CopyPathTuner choice;
  run(choice, 100, 1, 2, 512 << 10);
  EXPECT_GE(run(choice, 100, 1, 2, 512 << 10)[0], 90);
  EXPECT_GE(run(choice, 100, 2, 1, 64 << 20)[1], 90);
  EXPECT_GE(run(choice, 100, 1, 2, 512 << 10)[0], 90);
}

TEST(CopyPathTuner, LearnsForAllSizesOfAClassAtOnce) {
  const std::vector<std::pair<uint64_t, uint64_t>> classes{{0, 512 << 10},
                                                           {(512 << 10) + 1, 2 << 20},
                                                           {(2 << 20) + 1, 8 << 20},
                                                           {(8 << 20) + 1, 32 << 20},
                                                           {(32 << 20) + 1, 128 << 20},
                                                           {(128 << 20) + 1, ~uint64_t{0}}};
  CopyPathTuner choice;
  for (const auto& [smallest, largest] : classes) {
    EXPECT_EQ(run(choice, 2 * CopyPathTuner::kTrials, 1e-9, 1e9, smallest),
              std::vector<int>(2, CopyPathTuner::kTrials));
    EXPECT_EQ(choice.next(largest), Path::kRead) << largest;
  }
}

TEST(CopyPathTuner, GoesOnTryingAPathThatIsNeverMeasured) {
  CopyPathTuner choice;
  for (int i = 0; i < CopyPathTuner::kTrials; ++i) choice.note(Path::kRead, kBytes, 1);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(choice.next(kBytes), Path::kReceive);
}

TEST(CopyPathTuner, TakesAnySize) {
  CopyPathTuner choice;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    run(choice, 10, 1, 1, bytes);
  }
}

}  // namespace
}  // namespace zeropg
