#include "backend/group/hooks.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace zeropg {
namespace {

TEST(Hooks, CompletionReachesEveryHookUntilItIsRemoved) {
  Hooks hooks;
  std::vector<uint64_t> keys;
  hooks.set_completion(1, [&](uint64_t key, float) { keys.push_back(key); });
  hooks.set_completion(2, [&](uint64_t key, float) { keys.push_back(10 * key); });
  hooks.notify_complete(3, 0.5F);
  hooks.set_completion(2, nullptr);
  hooks.notify_complete(4, 0.5F);
  EXPECT_EQ(keys, (std::vector<uint64_t>{3, 30, 4}));
}

TEST(Hooks, AHookMayRemoveItself) {
  Hooks hooks;
  int calls = 0;
  hooks.set_completion(1, [&](uint64_t, float) {
    ++calls;
    hooks.set_completion(1, nullptr);
  });
  hooks.notify_complete(1, 0);
  hooks.notify_complete(2, 0);
  EXPECT_EQ(calls, 1);
}

TEST(Hooks, AnAbortHookThatThrowsDoesNotStopTheNext) {
  Hooks hooks;
  EXPECT_FALSE(hooks.has_abort());
  int calls = 0;
  hooks.set_abort(1, [] { throw std::runtime_error("no disk"); });
  hooks.set_abort(2, [&] { ++calls; });
  EXPECT_TRUE(hooks.has_abort());
  hooks.run_abort();
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace zeropg
