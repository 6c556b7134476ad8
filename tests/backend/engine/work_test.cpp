// What a caller holds while an operation runs, with a host that runs nothing or what the suite says.
#include "backend/engine/work.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <stdexcept>

#include "backend/engine/completed_work.h"
#include "backend/group/retired_works.h"
#include "backend/platform/process/signal_check.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;
using ZeroWorkPtr = c10::intrusive_ptr<ZeroWork>;

ZeroWorkPtr make_work(ZeroWork::Tensors tensors = {},
                      std::shared_ptr<OperationHost> host = std::make_shared<IdleHost>(),
                      OperationTimeout timeout = {.timeout = kLongTimeout}) {
  const OperationLabel label{.rank = 3, .world_size = 8, .title = "zeropg:all_reduce", .sequence = 41, .bytes = 64};
  return c10::make_intrusive<ZeroWork>(label, c10d::OpType::ALLREDUCE, std::move(tensors), std::move(timeout),
                                       std::move(host));
}

std::exception_ptr make_error(const char* text) { return std::make_exception_ptr(std::runtime_error(text)); }

at::Tensor ones(int64_t numel) {
  const at::Tensor tensor = at::empty({numel}, at::kFloat);
  std::fill_n(tensor.mutable_data_ptr<float>(), numel, 1.0F);
  return tensor;
}

TEST(ZeroWork, IsCompleteWhenItIsToldSo) {
  const ZeroWorkPtr work = make_work();
  EXPECT_FALSE(work->isCompleted());
  EXPECT_FALSE(work->is_complete());
  expect_words(error_of([&] { work->getDuration(); }), {"all_reduce #41", "no duration before it is complete"});
  work->complete(nullptr);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->is_complete());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->wait());
  EXPECT_GE(work->getDuration(), 0);
  EXPECT_EQ(work->getSequencenumber(), 41U);
}

TEST(ZeroWork, KeysAreNeverTheSame) { EXPECT_NE(make_work()->completion_key(), make_work()->completion_key()); }

TEST(ZeroWork, RaisesItsErrorAtEveryWait) {
  const ZeroWorkPtr work = make_work();
  work->complete(make_error("out of luck"));
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_THROW(work->wait(), std::runtime_error);
  EXPECT_THROW(work->wait(milliseconds(1)), std::runtime_error);
}

TEST(ZeroWork, AWaitThatIsTooShortNamesWhoIsLateAndChangesNothing) {
  ZeroWork::Tensors tensors;
  tensors.outputs = {ones(3)};
  const ZeroWorkPtr work = make_work(std::move(tensors));
  expect_words(error_of([&] { work->wait(milliseconds(5)); }),
               {"[zeropg rank 3/8] all_reduce #41 (64 bytes)", "not complete after the 5 ms", ", waiting for rank 7",
                "wait again with more time"});
  EXPECT_FALSE(work->isCompleted());
  EXPECT_EQ(work->result().size(), 1U);
  work->complete(nullptr);
  EXPECT_TRUE(work->wait(milliseconds(5)));
}

TEST(ZeroWork, ItsHostRunsTheOperationInTheThreadThatWaits) {
  struct Host final : OperationHost {
    void help(const ZeroWork& work, std::chrono::steady_clock::time_point until) override {
      helper = std::this_thread::get_id();
      given = until;
      const_cast<ZeroWork&>(work).complete(nullptr);
    }
    std::string who_is_late() override { return ""; }
    void forget(const ZeroWork& work) override { forgotten = &work; }
    std::thread::id helper;
    const ZeroWork* forgotten = nullptr;
    std::chrono::steady_clock::time_point given;
  };
  const auto host = std::make_shared<Host>();
  EXPECT_TRUE(make_work({}, host)->wait());
  EXPECT_EQ(host->helper, std::this_thread::get_id());
  EXPECT_EQ(host->given, std::chrono::steady_clock::time_point::max());
  make_work({}, host)->wait(milliseconds::max());  // does not wrap around into the past
  EXPECT_GT(host->given, std::chrono::steady_clock::now() + std::chrono::hours(24));
  host->helper = {};
  const ZeroWorkPtr done = make_work({}, host);
  done->complete(nullptr);
  done->wait();
  EXPECT_EQ(host->helper, std::thread::id());
  EXPECT_EQ(host->forgotten, done.get());
}

TEST(ZeroWork, SeveralThreadsWaitForIt) {
  ZeroWork::Tensors tensors;
  const at::Tensor output = ones(3);
  tensors.outputs = {output};
  const ZeroWorkPtr work = make_work(std::move(tensors));
  std::thread completer([&] {
    std::this_thread::sleep_for(milliseconds(10));
    work->complete(nullptr);
  });
  on_every_rank(4, [&](int32_t) { EXPECT_TRUE(work->wait()); });
  completer.join();
  EXPECT_EQ(work->result().size(), 1U);
}

TEST(ZeroWork, ASignalHandlersExceptionEndsTheWaitAndNotTheWork) {
  set_signal_check([] { throw std::runtime_error("interrupted"); });
  const ZeroWorkPtr work = make_work();
  EXPECT_THROW(work->wait(), std::runtime_error);
  set_signal_check(nullptr);
  EXPECT_FALSE(work->isCompleted());
  work->complete(nullptr);
  EXPECT_TRUE(work->wait());
}

TEST(ZeroWork, LetsGoOfAllButItsOutputsForWhoWaitsAndNotBefore) {
  for (const bool has_failed : {false, true}) {
    ZeroWork::Tensors tensors;
    const at::Tensor output = ones(3);
    const at::Tensor held = ones(4);
    tensors.outputs = {output};
    tensors.held = {held};
    const ZeroWorkPtr work = make_work(std::move(tensors));
    work->complete(has_failed ? make_error("out of luck") : nullptr);
    EXPECT_EQ(held.use_count(), 2U);
    try {
      work->wait();
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(held.use_count(), 1U);
    ASSERT_EQ(work->result().size(), 1U);
    EXPECT_EQ(work->result()[0].data_ptr(), output.data_ptr());
  }
}

TEST(ZeroWork, GivesResultsThatItsCallerDropped) {
  ZeroWork::Tensors tensors;
  tensors.outputs = {ones(3), ones(4)};
  const ZeroWorkPtr work = make_work(std::move(tensors));
  work->complete(nullptr);
  work->wait();
  ASSERT_EQ(work->result().size(), 2U);
  EXPECT_EQ(work->result()[1].numel(), 4);
  EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 2U);
}

TEST(RetiredWorks, GivesUpAWorkThatSomebodyHasWaitedFor) {
  RetiredWorks retired;
  const ZeroWorkPtr kept = make_work();
  const ZeroWorkPtr removed = make_work();
  retired.add(kept, [&] { kept->complete(nullptr); });
  retired.add(removed, [&] { removed->complete(nullptr); });
  EXPECT_TRUE(kept->is_complete());
  retired.remove(*removed);
  retired.remove(*make_work());  // not there
  EXPECT_EQ(removed.use_count(), 1U);
  EXPECT_EQ(kept.use_count(), 2U);
  retired.release();
  EXPECT_EQ(kept.use_count(), 1U);
}

TEST(ZeroWork, CopiesBackBeforeItIsComplete) {
  const at::Tensor strided = at::empty_strided({3}, {2}, at::kFloat);
  ZeroWork::Tensors tensors;
  tensors.copies_back = {{strided, ones(3)}};
  const ZeroWorkPtr work = make_work(std::move(tensors));
  work->complete(nullptr);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(strided.const_data_ptr<float>()[2 * i], 1.0F);
}

TEST(ZeroWork, FailsWhereCopyingBackDoesAndCopiesNothingAfterAnError) {
  for (const bool has_failed : {false, true}) {
    const at::Tensor destination = ones(2);
    ZeroWork::Tensors tensors;
    tensors.copies_back = {{destination, ones(3)}};
    const ZeroWorkPtr work = make_work(std::move(tensors));
    work->complete(has_failed ? make_error("out of luck") : nullptr);
    EXPECT_FALSE(work->isSuccess());
    EXPECT_EQ(error_of([&] {
                try {
                  work->wait();
                } catch (const std::runtime_error&) {
                }
              }) == "no error",
              has_failed);
  }
}

TEST(ZeroWork, EndsTheExtensionsOfItsTimeout) {
  Timeouts timeouts(milliseconds(1'000));
  timeouts.extend(milliseconds(500));
  const ZeroWorkPtr work = make_work({}, std::make_shared<IdleHost>(), timeouts.next(milliseconds(0)));
  EXPECT_EQ(work->timeout(), milliseconds(1'500));
  EXPECT_EQ(timeouts.next(milliseconds(0)).timeout, milliseconds(1'500));
  work->complete(nullptr);
  EXPECT_EQ(timeouts.next(milliseconds(0)).timeout, milliseconds(1'000));
}

TEST(ZeroWork, ItsFutureEndsWhereTheCallerRunsWhatCompletes) {
  for (const bool has_failed : {false, true}) {
    ZeroWork::Tensors tensors;
    const at::Tensor output = ones(3);
    tensors.outputs = {output};
    const ZeroWorkPtr work = make_work(std::move(tensors));
    bool has_run = false;
    const auto future = work->getFuture();
    EXPECT_EQ(work->getFuture(), future);
    future->addCallback([&](c10::ivalue::Future&) { has_run = true; });
    const std::function<void()> complete_future = work->complete(has_failed ? make_error("out of luck") : nullptr);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(has_run);
    complete_future();
    EXPECT_TRUE(has_run);
    EXPECT_EQ(future->hasError(), has_failed);
    if (!has_failed) {
      EXPECT_EQ(at::Tensor(future->value().toTensorVector().at(0)).data_ptr(), output.data_ptr());
    }
    EXPECT_EQ(work->getFuture(), future);
  }
}

TEST(ZeroWork, AFutureThatIsAskedForLateIsCompleteAtOnce) {
  for (const bool has_failed : {false, true}) {
    const ZeroWorkPtr work = make_work();
    EXPECT_EQ(work->complete(has_failed ? make_error("out of luck") : nullptr), nullptr);
    EXPECT_TRUE(work->getFuture()->completed());
    EXPECT_EQ(work->getFuture()->hasError(), has_failed);
  }
}

TEST(CombinedWork, IsCompleteWithTheLastAndFailsAsTheFirstThatFails) {
  const std::vector<ZeroWorkPtr> works{make_work(), make_work(), make_work()};
  const auto all = combine({works.begin(), works.end()});
  works[1]->complete(make_error("the second"));
  works[2]->complete(make_error("the third"));
  EXPECT_FALSE(all->isCompleted());
  EXPECT_FALSE(all->isSuccess());
  works[0]->complete(nullptr);
  EXPECT_TRUE(all->isCompleted());
  try {
    all->wait();
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the second");
  }
}

TEST(CombinedWork, HasTheErrorOfTheFirstThatFailedWithoutAWait) {
  const std::vector<ZeroWorkPtr> works{make_work(), make_work()};
  const auto all = combine({works.begin(), works.end()});
  EXPECT_EQ(all->exception(), nullptr);
  works[0]->complete(nullptr);
  EXPECT_EQ(all->exception(), nullptr);
  works[1]->complete(make_error("out of luck"));
  EXPECT_FALSE(all->isSuccess());
  EXPECT_EQ(all->exception(), works[1]->exception());
  EXPECT_NE(all->exception(), nullptr);
}

TEST(CombinedWork, GivesTheResultsInOrderAlsoInItsFuture) {
  std::vector<at::Tensor> outputs{ones(1), ones(2), ones(3)};
  std::vector<ZeroWorkPtr> works;
  for (const at::Tensor& output : outputs) {
    ZeroWork::Tensors tensors;
    tensors.outputs = {output};
    works.push_back(make_work(std::move(tensors)));
  }
  const auto all = combine({works.begin(), works.end()});
  const auto future = all->getFuture();
  for (size_t i : {2, 0, 1}) works[i]->complete(nullptr)();
  future->wait();
  const std::vector<at::Tensor> in_future = future->value().toTensorVector();
  ASSERT_EQ(in_future.size(), 3U);
  ASSERT_EQ(all->result().size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(in_future[i].data_ptr(), outputs[i].data_ptr());
    EXPECT_EQ(all->result()[i].data_ptr(), outputs[i].data_ptr());
  }
}

TEST(CombinedWork, OfNothingIsComplete) {
  const auto nothing = combine({});
  EXPECT_TRUE(nothing->isCompleted() && nothing->isSuccess() && nothing->wait());
  EXPECT_TRUE(nothing->getFuture()->completed());
}

TEST(CompletedWork, IsComplete) {
  const at::Tensor output = ones(3);
  CompletedWork work(0, c10d::OpType::ALLREDUCE, {output});
  EXPECT_TRUE(work.isCompleted() && work.isSuccess() && work.wait());
  EXPECT_EQ(work.result().at(0).data_ptr(), output.data_ptr());
  EXPECT_TRUE(work.getFuture()->completed());
}

}  // namespace
}  // namespace zeropg
