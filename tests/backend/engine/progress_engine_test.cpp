// The progress thread with channels that only count what it does.
#include "backend/engine/progress_engine.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <set>
#include <utility>

#include "backend/platform/process/descriptor.h"
#include "tests/backend/child_process.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

ProgressEngine& engine() { return ProgressEngine::of_this_process(); }

int count_engine_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    count += name == "zeropg-engine" ? 1 : 0;
  }
  return count;
}

// A thread that was joined is listed for a moment more.
void expect_no_engine_thread() {
  poll([] { return count_engine_threads() == 0; });
}

// In the engine for as long as it lives.
class CountingChannel final : public Channel {
 public:
  explicit CountingChannel(std::function<void()> body = {}, int32_t ranks = 1, int descriptor = -1)
      : body_(std::move(body)), ranks_(ranks), descriptor_(descriptor) {
    engine().add({this});
  }
  ~CountingChannel() override { leave(); }
  void leave(bool waits_for_callbacks = true) {
    if (!std::exchange(is_removed_, true)) engine().remove({this}, waits_for_callbacks);
  }

  Activity advance_on_engine_thread() override {
    EXPECT_FALSE(is_gone);
    ++advances;
    if (body_) body_();
    int left = work;
    while (left > 0 && !work.compare_exchange_weak(left, left - 1)) {
    }
    return left > 0 ? Activity::kMoved : is_blocked ? Activity::kBlocked : Activity::kIdle;
  }
  void check_on_engine_thread() override {
    EXPECT_FALSE(is_gone);
    ++checks;
  }
  void set_sleeping(bool is_sleeping) override { (is_sleeping ? sleeps : awakenings)++; }
  Sleep sleep() const override { return {.descriptor = descriptor_, .limit = milliseconds(longest_sleep)}; }
  bool arm() override {
    ++arms;
    return unready.exchange(0) == 0;
  }
  int32_t local_world_size() const override { return ranks_; }

  std::atomic<int> work{0};
  std::atomic<int> advances{0}, checks{0}, sleeps{0}, awakenings{0}, arms{0}, unready{0};
  std::atomic<int64_t> longest_sleep{Sleep::kForGood.count()};
  std::atomic<bool> is_blocked{false};
  std::atomic<bool> is_gone{false};

 private:
  const std::function<void()> body_;
  const int32_t ranks_;
  const int descriptor_;
  bool is_removed_ = false;
};

TEST(ProgressEngine, AdvancesWhatIsThereWheneverItIsWoken) {
  CountingChannel channel;
  for (int round = 0; round < 20; ++round) {
    channel.work = 3;
    round % 2 == 0 ? engine().wake() : engine().wake_soon();
    poll([&] { return channel.work == 0; });
  }
}

TEST(ProgressEngine, SleepsWhenThereIsNothingToDo) {
  CountingChannel channel;
  poll([&] {  // naps come to an end
    const int before = channel.advances;
    std::this_thread::sleep_for(milliseconds(60));
    return channel.advances == before;
  });
  EXPECT_GT(channel.sleeps, 0);
  channel.work = 1;
  engine().wake();
  poll([&] { return channel.work == 0; });
}

TEST(ProgressEngine, LooksAgainAtAChannelThatSaysForHowLongItMaySleep) {
  CountingChannel channel;
  channel.longest_sleep = 5;
  engine().wake();
  poll([&] {  // after all naps
    const int before = channel.advances;
    std::this_thread::sleep_for(milliseconds(200));
    return channel.advances >= before + 3 && channel.advances <= before + 100;
  });
  CountingChannel other;
  other.is_blocked = true;  // for whose sake the thread would sleep longer
  engine().wake();
  poll([&] {
    const int before = channel.advances;
    std::this_thread::sleep_for(milliseconds(200));
    return channel.advances >= before + 10;
  });
}

TEST(ProgressEngine, LooksAtDeadlinesWhileAChannelWaitsAlsoThoseOfOthersThatMove) {
  CountingChannel blocked;
  CountingChannel busy;
  blocked.is_blocked = true;
  busy.work = 1 << 30;
  engine().wake();
  poll([&] { return blocked.checks >= 3 && busy.checks >= 3; });
  busy.work = 0;
  const int before = blocked.checks;
  poll([&] { return blocked.checks >= before + 3; });
}

TEST(ProgressEngine, AdvancesAllChannelsOnOneThread) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto note_thread = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  };
  CountingChannel one(note_thread);
  CountingChannel other(note_thread);
  one.work = 5;
  other.work = 5;
  engine().wake();
  poll([&] { return one.work == 0 && other.work == 0; });
  const std::lock_guard<std::mutex> lock(mutex);
  EXPECT_EQ(threads.size(), 1U);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
}

TEST(ProgressEngine, EndsWithItsLastChannelAndStartsAgain) {
  expect_no_engine_thread();
  EXPECT_EQ(engine().callbacks(), nullptr);
  for (int round = 0; round < 3; ++round) {
    CountingChannel one({}, 2);
    {
      CountingChannel other({}, 5);
      poll([] { return count_engine_threads() == 1; });  // it names itself
      EXPECT_EQ(engine().ranks_on_node(), 5);
    }
    one.work = 1;
    engine().wake();
    poll([&] { return one.work == 0; });
    EXPECT_NE(engine().callbacks(), nullptr);
    one.leave();
    expect_no_engine_thread();
    EXPECT_EQ(engine().callbacks(), nullptr);
    EXPECT_EQ(engine().ranks_on_node(), 1);
  }
}

TEST(ProgressEngine, DoesNotTouchAChannelThatWasRemoved) {
  CountingChannel busy;
  busy.work = 1 << 30;
  engine().wake();
  for (int round = 0; round < 50; ++round) {
    CountingChannel channel;
    channel.work = 1 << 30;
    channel.leave();
    channel.is_gone = true;
    EXPECT_GT(channel.awakenings, 0);  // peers need not ring for it any more
    std::this_thread::yield();
  }
}

TEST(ProgressEngine, LetsAPassEndBeforeAChannelIsRemoved) {
  std::promise<void> has_begun;
  std::atomic<bool> has_ended{false};
  CountingChannel channel([&, is_first = std::make_shared<bool>(true)] {
    if (!std::exchange(*is_first, false)) return;
    has_begun.set_value();
    std::this_thread::sleep_for(milliseconds(50));
    has_ended = true;
  });
  engine().wake();
  has_begun.get_future().wait();
  channel.leave();
  EXPECT_TRUE(has_ended);
}

TEST(ProgressEngine, WakesForADescriptorAndForOneThatCouldNotBeArmed) {
  const Descriptor event(::eventfd(0, EFD_NONBLOCK));
  CountingChannel channel({}, 1, event.get());
  poll([&] { return channel.arms > 0; });
  channel.unready = 1;
  channel.work = 1;
  engine().wake();
  poll([&] { return channel.work == 0 && channel.unready == 0; });
  std::this_thread::sleep_for(milliseconds(50));
  channel.work = 1;
  ::eventfd_write(event.get(), 1);
  poll([&] { return channel.work == 0; });
}

TEST(ProgressEngine, RunsTheCallbacksBeforeItEndsOrLetsThemEndByThemselves) {
  std::atomic<bool> has_run{false};
  CountingChannel channel;
  engine().callbacks()->post([&] {
    std::this_thread::sleep_for(milliseconds(30));
    has_run = true;
  });
  channel.leave(/*waits_for_callbacks=*/true);
  EXPECT_TRUE(has_run);
  const auto release = std::make_shared<std::promise<void>>();
  const auto is_over = std::make_shared<std::promise<void>>();
  CountingChannel another;
  engine().callbacks()->post([release, is_over] {
    release->get_future().wait();
    is_over->set_value();
  });
  another.leave(/*waits_for_callbacks=*/false);
  release->set_value();
  is_over->get_future().wait();
}

TEST(ProgressEngine, ACallbackThatItWaitsForMayMakeAndDropAGroup) {
  CountingChannel channel;
  std::promise<void> has_begun;
  engine().callbacks()->post([&] {
    has_begun.set_value();
    std::this_thread::sleep_for(milliseconds(30));
    CountingChannel of_callback;
    of_callback.work = 1;
    engine().wake();
    poll([&] { return of_callback.work == 0; });
  });
  has_begun.get_future().wait();
  channel.leave(/*waits_for_callbacks=*/true);
  expect_no_engine_thread();
}

TEST(ProgressEngine, ChannelsComeAndGoFromManyThreads) {
  on_every_rank(4, [](int32_t) {
    for (int round = 0; round < 30; ++round) {
      CountingChannel channel;
      channel.work = 2;
      engine().wake_soon();
      poll([&] { return channel.work == 0; });
    }
  });
  expect_no_engine_thread();
}

TEST(ProgressEngine, AForkedChildHasOneOfItsOwn) {
  CountingChannel of_parent;
  of_parent.work = 1;
  engine().wake();
  poll([&] { return of_parent.work == 0; });
  const ProgressEngine* parents = &engine();
  ChildProcess child([&] {
    if (&engine() == parents || engine().callbacks() != nullptr) return false;
#ifndef __SANITIZE_THREAD__  // which takes the child's first thread for the parent's, whose stack it reuses
    CountingChannel own;
    own.work = 1;
    engine().wake();
    poll([&] { return own.work == 0; });
#endif
    return true;
  });
  EXPECT_TRUE(child.succeeded());
  EXPECT_EQ(&engine(), parents);
}

}  // namespace
}  // namespace zeropg
