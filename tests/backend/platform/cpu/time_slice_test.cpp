#include "backend/platform/cpu/time_slice.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <thread>

namespace zeropg {
namespace {

struct Attributes {  // the kernel's struct sched_attr
  uint32_t size = sizeof(Attributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};

Attributes own() {
  Attributes attributes;
  ::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0);
  return attributes;
}

// In a thread of its own, since what is for good has no way back.
void in_a_thread(const std::function<void()>& check) {
  if (own().runtime_ns == 0) GTEST_SKIP() << "this kernel has no slices of a thread's own";
  std::thread(check).join();
}

TEST(TimeSlice, GetsShortAndTheNicenessStays) {
  in_a_thread([] {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 3);
    const uint64_t usual_ns = own().runtime_ns;
    shorten_slice_for_good();
    shorten_slice_for_good();
    shorten_slice();
    EXPECT_LT(own().runtime_ns, usual_ns);
    EXPECT_EQ(own().nice, 3);
    EXPECT_EQ(own().policy, static_cast<uint32_t>(SCHED_OTHER));
  });
}

TEST(TimeSlice, OfAThreadThatWaitedCanBeRestored) {
  in_a_thread([] {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 3);
    const Attributes usual = own();
    const auto expect_usual = [&] {
      EXPECT_FALSE(has_short_slice());
      EXPECT_EQ(own().runtime_ns, usual.runtime_ns);
      EXPECT_EQ(own().flags, usual.flags);
      EXPECT_EQ(own().nice, 3);
    };
    const auto shorten = [&] {
      shorten_slice();
      shorten_slice();
      EXPECT_TRUE(has_short_slice());
      EXPECT_LT(own().runtime_ns, usual.runtime_ns);
    };
    restore_slice();
    expect_usual();
    shorten();
    restore_slice();
    expect_usual();
    shorten();
    std::thread(restore_slices).join();  // by another thread, when a group ends
    expect_usual();
    shorten();
    std::thread(shorten_slice).join();  // a thread that ends with a short one
    const pid_t child = ::fork();
    if (child == 0) ::_exit(own().runtime_ns == usual.runtime_ns && !has_short_slice() ? 0 : 1);
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    restore_slices();
    expect_usual();
  });
}

TEST(TimeSlice, ThatTheProgramChangesIsLeftToIt) {
  in_a_thread([] {
    Attributes chosen = own();
    chosen.runtime_ns = 5'000'000;
    shorten_slice();
    ASSERT_EQ(::syscall(SYS_sched_setattr, 0, &chosen, 0), 0);
    restore_slice();
    EXPECT_EQ(own().runtime_ns, chosen.runtime_ns);
  });
}

TEST(TimeSlice, OfChildrenIsTheUsualOneUntilTheyShortenTheirs) {
  in_a_thread([] {
    const uint64_t usual_ns = own().runtime_ns;
    shorten_slice_for_good();
    std::thread([&] { EXPECT_EQ(own().runtime_ns, usual_ns); }).join();
    const pid_t child = ::fork();
    if (child == 0) {
      const bool is_usual = own().runtime_ns == usual_ns;
      shorten_slice_for_good();
      ::_exit(is_usual && own().runtime_ns < usual_ns ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  });
}

TEST(TimeSlice, OfOtherPoliciesStaysAsItIs) {
  in_a_thread([] {
    const sched_param parameters{};
    ASSERT_EQ(::sched_setscheduler(0, SCHED_BATCH, &parameters), 0);
    const Attributes before = own();
    shorten_slice_for_good();
    shorten_slice();
    EXPECT_EQ(own().runtime_ns, before.runtime_ns);
    EXPECT_EQ(own().policy, static_cast<uint32_t>(SCHED_BATCH));
  });
}

}  // namespace
}  // namespace zeropg
