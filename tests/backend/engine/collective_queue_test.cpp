// The queue of a group's collectives: order, failures, deadlines, and who runs it.
#include "backend/engine/collective_queue.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/backend/engine/collectives.h"
#include "tests/backend/running_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;
using Calls = std::vector<CollectiveArgs>;
using WorkPtr = c10::intrusive_ptr<ZeroWork>;

constexpr milliseconds kShort{100};
constexpr int64_t kLargeNumel = 50'001;  // too large to begin in the thread that calls

struct Submission {
  const char* title = "zeropg:test";
  std::chrono::milliseconds timeout = kLongTimeout;
  bool is_synchronous = false;
};

std::unique_ptr<CollectiveJob> make_job(Planner& planner, GroupContext& group, const Calls& calls,
                                        const Submission& how, std::shared_ptr<OperationHost> host) {
  auto job = std::make_unique<CollectiveJob>();
  ZeroWork::Tensors tensors;
  for (const CollectiveArgs& args : calls) {
    job->collectives.push_back(planner.plan(args));
    tensors.held.insert(tensors.held.end(), args.inputs.begin(), args.inputs.end());
    tensors.held.insert(tensors.held.end(), args.outputs.begin(), args.outputs.end());
  }
  const OperationLabel label{.rank = group.rank(), .world_size = group.world_size(), .title = how.title, .sequence = 1};
  job->work = c10::make_intrusive<ZeroWork>(label, c10d::OpType::ALLREDUCE, std::move(tensors),
                                            OperationTimeout{.timeout = how.timeout}, std::move(host));
  return job;
}

// Ranks whose queues move only when the suite says so.
class CollectiveQueueTest : public ::testing::Test {
 protected:
  void join(int32_t world_size, const std::shared_ptr<const Hooks>& hooks = std::make_shared<Hooks>()) {
    ranks_ = meet(world_size, small_group(), hooks);
    for (const auto& rank : ranks_) {
      planners_.push_back(make_planner(*rank));
      queues_.push_back(std::make_unique<CollectiveQueue>(rank, ProgressEngine::of_this_process()));
    }
  }
  WorkPtr submit(int32_t rank, const Calls& calls, const Submission& how = {}) {
    auto job = make_job(*planners_[rank], *ranks_[rank], calls, how, host_);
    const WorkPtr work = job->work;
    queues_[rank]->submit(std::move(job), how.is_synchronous);
    return work;
  }
  void advance_all() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (const auto& queue : queues_) has_moved |= queue->advance_on_engine_thread() == Activity::kMoved;
    }
  }
  static std::string error(const WorkPtr& work) {
    return work->is_complete() ? error_of([&] { work->wait(); }) : "not complete";
  }
  // Looks at deadlines and peers, as the engine does now and then, until the work has ended.
  std::string error_after_checks(int32_t rank, const WorkPtr& work) {
    poll([&] {
      queues_[rank]->advance_on_engine_thread();
      queues_[rank]->check_on_engine_thread();
      return work->is_complete();
    });
    return error(work);
  }
  std::vector<int32_t> missing_at(uint64_t barrier) const {
    return ranks_[0]->topology().own_ranks(ranks_[0]->arena().missing(barrier));
  }

  Contexts ranks_;
  std::vector<std::unique_ptr<Planner>> planners_;
  std::vector<std::unique_ptr<CollectiveQueue>> queues_;
  const std::shared_ptr<IdleHost> host_ = std::make_shared<IdleHost>();
};

TEST_F(CollectiveQueueTest, RunsCallsOfAllSizesInTheirOrder) {
  join(3);
  std::vector<std::vector<WorkPtr>> works(3);
  std::vector<std::vector<at::Tensor>> tensors(3);
  for (const int32_t rank : {0, 1, 2}) {
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1025}, kLargeNumel, int64_t{3}}) {
      tensors[rank].push_back(filled(numel, rank));
      works[rank].push_back(submit(rank, {all_reduce(tensors[rank].back())}));
    }
    advance_all();
  }
  for (const int32_t rank : {0, 1, 2}) {
    for (size_t i = 0; i < works[rank].size(); ++i) {
      EXPECT_EQ(error(works[rank][i]), "no error");
      expect_sum_over_ranks(tensors[rank][i], 3);
    }
    EXPECT_EQ(ranks_[rank]->statistics().by_name().at("test").calls, works[rank].size());
  }
}

TEST_F(CollectiveQueueTest, BeginsInTheCallingThreadWhatIsSmallWithAllThatIsBeforeIt) {
  join(2);
  submit(0, {all_reduce(filled(7, 0))});
  EXPECT_EQ(missing_at(1), std::vector<int32_t>{1});
  submit(1, {all_reduce(filled(7, 1))});
  advance_all();
  uint64_t large = 1;  // its first barrier
  while (missing_at(large).empty()) ++large;
  submit(0, {all_reduce(filled(kLargeNumel, 0))});
  submit(0, {barrier()});
  EXPECT_EQ(missing_at(large), (std::vector<int32_t>{0, 1}));
  queues_[0]->advance_on_engine_thread();
  EXPECT_EQ(missing_at(large), std::vector<int32_t>{1});
}

TEST_F(CollectiveQueueTest, LeavesASynchronousCallToWhoWaitsForIt) {
  join(2);
  const WorkPtr zero = submit(0, {barrier()}, {.is_synchronous = true});
  const WorkPtr one = submit(1, {barrier()}, {.is_synchronous = true});
  EXPECT_EQ(missing_at(1), (std::vector<int32_t>{0, 1}));
  on_every_rank(2, [&](int32_t rank) {
    queues_[rank]->help(rank == 0 ? *zero : *one, std::chrono::steady_clock::time_point::max());
  });
  EXPECT_TRUE(zero->is_complete() && one->is_complete());
}

TEST_F(CollectiveQueueTest, AHelperReturnsWhenItsTimeIsOver) {
  join(2);
  const WorkPtr work = submit(0, {barrier()});
  queues_[0]->help(*work, std::chrono::steady_clock::now() + milliseconds(20));
  EXPECT_FALSE(work->is_complete());
  submit(1, {barrier()});
  advance_all();
  EXPECT_TRUE(work->is_complete());
}

TEST_F(CollectiveQueueTest, AJobOfSeveralCollectivesEndsOnceAndCountsTheWaitsOfAll) {
  join(2);
  std::vector<at::Tensor> tensors;
  std::vector<WorkPtr> works;
  for (const int32_t rank : {0, 1}) {
    tensors.push_back(filled(5, rank));
    works.push_back(submit(rank, {barrier(), all_reduce(tensors[rank]), barrier()}));
    if (rank == 0) std::this_thread::sleep_for(milliseconds(30));
  }
  advance_all();
  for (const int32_t rank : {0, 1}) {
    EXPECT_EQ(error(works[rank]), "no error");
    expect_sum_over_ranks(tensors[rank], 2);
    EXPECT_EQ(ranks_[rank]->statistics().by_name().at("test").calls, 1U);
  }
  const OperationStatistics statistics = ranks_[0]->statistics().by_name().at("test");
  EXPECT_GE(statistics.waiting_seconds.at(1), 0.03);
  EXPECT_GE(statistics.seconds, statistics.waiting_seconds.at(1));
}

TEST_F(CollectiveQueueTest, DifferentCallsEndTheQueueOnEveryRank) {
  join(3);
  std::vector<std::vector<WorkPtr>> works(3);
  for (const int32_t rank : {0, 1, 2}) {
    works[rank].push_back(submit(rank, {rank == 1 ? all_reduce(filled(3, 0)) : barrier()}));
    if (rank != 2) works[rank].push_back(submit(rank, {barrier()}));  // it fails at its first call
  }
  advance_all();
  for (const int32_t rank : {0, 1, 2}) {
    const std::string text = error_of([&] { submit(rank, {barrier()}); });
    expect_words(text, {"different calls", "ranks 0, 2: barrier", "rank 1: all_reduce(", "12 bytes"});
    for (const WorkPtr& work : works[rank]) EXPECT_EQ(error(work), text);
    EXPECT_EQ(ranks_[rank]->failure().kind, FailureKind::kHere);
    EXPECT_TRUE(queues_[rank]->wait_until_idle(milliseconds(0)));
  }
}

TEST_F(CollectiveQueueTest, ADeadlineNamesWhoIsLateAndReachesThePeers) {
  join(3);
  const WorkPtr late = submit(0, {barrier()}, {.timeout = kShort});
  const WorkPtr behind = submit(0, {barrier()});
  const WorkPtr waiting = submit(2, {barrier()});
  const std::string text = error_after_checks(0, late);
  expect_words(text, {"[zeropg rank 0/3] test #1: timed out after 100 ms in step 1 of 1 of barrier", "rank 1"});
  EXPECT_EQ(error(behind), text);
  EXPECT_EQ(ranks_[0]->failure().kind, FailureKind::kTimeout);
  expect_words(error_after_checks(2, waiting), {"[zeropg rank 2/3] test #1: rank 0 failed: ", "timed out"});
  EXPECT_EQ(ranks_[2]->failure().kind, FailureKind::kPeer);
  expect_words(error_of([&] {
                 submit(1, {barrier()});
                 advance_all();
                 ranks_[1]->throw_if_failed();
               }),
               {"[zeropg rank 1/3] test #1: rank 0 failed: "});
}

TEST_F(CollectiveQueueTest, AMonitoredBarrierSaysItInGloosWords) {
  join(2);
  const WorkPtr work = submit(0, {barrier()}, {.title = kMonitoredBarrierTitle, .timeout = kShort});
  expect_words(error_after_checks(0, work), {"Rank 1 failed to pass monitoredBarrier in 100 ms"});
}

TEST_F(CollectiveQueueTest, ADeadlineCountsFromWhereTheCallIsAtTheHead) {
  join(2);
  const WorkPtr first = submit(0, {barrier()});
  const WorkPtr second = submit(0, {barrier()}, {.timeout = kShort});
  std::this_thread::sleep_for(2 * kShort);
  queues_[0]->check_on_engine_thread();
  EXPECT_FALSE(first->is_complete());
  submit(1, {barrier()});
  advance_all();
  queues_[0]->check_on_engine_thread();
  EXPECT_EQ(error(first), "no error");
  EXPECT_EQ(error(second), "not complete");
  expect_words(error_after_checks(0, second), {"timed out after 100 ms"});
}

TEST_F(CollectiveQueueTest, APeerMayLeaveOnceItHasDoneItsPartAndNotBefore) {
  join(2);
  const WorkPtr done = submit(0, {barrier()});
  submit(1, {barrier()});
  ranks_[1]->depart();
  queues_[0]->check_on_engine_thread();
  advance_all();
  EXPECT_EQ(error(done), "no error");
  const WorkPtr waiting = submit(0, {barrier()});
  expect_words(error_after_checks(0, waiting), {"rank 1 left the group"});
}

TEST_F(CollectiveQueueTest, DamagedMemoryIsBlamedOnItsRankThoughAnotherHasLeft) {
  join(3);
  auto job = make_job(*planners_[0], *ranks_[0], {all_reduce(filled(1, 0))}, {}, host_);
  const Step step{.kind = StepKind::kReceive, .peer = 1, .destination = {.space = Space::kOutput}, .bytes = 4};
  job->collectives[0].schedule = std::make_shared<Schedule>(Schedule{.algorithm = "by_hand", .steps = {step}});
  const WorkPtr work = job->work;
  ranks_[2]->depart();
  ranks_[1]->arena().mailbox_counters(1, 0, static_cast<int32_t>(Lane::kCollective)).sent = ~uint64_t{0};
  queues_[0]->submit(std::move(job), /*is_synchronous=*/false);
  expect_words(error(work), {"the counters of rank 1", "make no sense"});
}

TEST_F(CollectiveQueueTest, AGroupThatFailsWhileAThreadWaitsEndsItsWorks) {
  join(2);
  const WorkPtr work = submit(0, {barrier()});
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(10));
    ranks_[0]->fail({.text = "the end"});
  });
  queues_[0]->help(*work, std::chrono::steady_clock::time_point::max());
  aborter.join();
  EXPECT_EQ(error(work), "the end");
}

TEST_F(CollectiveQueueTest, IsIdleOnceEveryWorkIsComplete) {
  const auto hooks = std::make_shared<Hooks>();
  hooks->set_completion(1, [](uint64_t, float) { std::this_thread::sleep_for(milliseconds(30)); });
  join(2, hooks);
  EXPECT_TRUE(queues_[0]->wait_until_idle(milliseconds(0)));
  const WorkPtr work = submit(0, {barrier()});
  EXPECT_FALSE(queues_[0]->wait_until_idle(milliseconds(1)));
  submit(1, {barrier()});
  std::thread runner([&] { queues_[0]->advance_on_engine_thread(); });
  EXPECT_TRUE(queues_[0]->wait_until_idle(kLongTimeout));
  EXPECT_TRUE(work->is_complete());
  runner.join();
}

WorkPtr submit(RunningRanks& ranks, int32_t rank, const CollectiveArgs& call, const Submission& how = {}) {
  auto job =
      make_job(*make_planner(ranks[rank]->group()), ranks[rank]->group(), {call}, how, ranks[rank]->collectives());
  const WorkPtr work = job->work;
  ranks[rank]->collectives()->submit(std::move(job), how.is_synchronous);
  return work;
}

TEST(CollectiveQueueOnTheEngine, RunsAndLetsGoOfWhatNobodyWaitsFor) {
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"one", "one"}, {"one", "two"}}) {
    RunningRanks group(hosts);
    std::vector<at::Tensor> tensors;
    for (const int32_t rank : {0, 1}) {
      tensors.push_back(filled(kLargeNumel, rank));
      submit(group, rank, all_reduce(tensors[rank]));
    }
    for (const int32_t rank : {0, 1}) {
      ASSERT_TRUE(group[rank]->wait_until_idle(kLongTimeout));
      expect_sum_over_ranks(tensors[rank], 2);
      submit(group, rank, barrier());  // the next call
      EXPECT_EQ(tensors[rank].use_count(), 1U);
    }
  }
}

TEST(CollectiveQueueOnTheEngine, AWaitWithTooLittleTimeRaisesAndTheCallGoesOn) {
  RunningRanks group({"one", "one"});
  const at::Tensor zero = filled(5, 0);
  const at::Tensor one = filled(5, 1);
  const WorkPtr work = submit(group, 0, all_reduce(zero));
  expect_words(error_of([&] { work->wait(milliseconds(20)); }), {"not complete after the 20 ms", "waiting for rank 1"});
  submit(group, 1, all_reduce(one));
  EXPECT_TRUE(work->wait());
  expect_sum_over_ranks(zero, 2);
}

TEST(CollectiveQueueOnTheEngine, TwoGroupsUsedInDifferentOrdersDoNotWaitForEachOther) {
  RunningRanks groups[] = {RunningRanks({"one", "one"}), RunningRanks({"one", "one"})};
  on_every_rank(2, [&](int32_t rank) {
    for (int round = 0; round < 30; ++round) {
      const at::Tensor tensors[] = {filled(1025, rank), filled(3, rank)};
      const WorkPtr first = submit(groups[rank], rank, all_reduce(tensors[rank]));
      const WorkPtr second = submit(groups[1 - rank], rank, all_reduce(tensors[1 - rank]));
      EXPECT_TRUE(first->wait() && second->wait());
      for (const at::Tensor& tensor : tensors) expect_sum_over_ranks(tensor, 2);
    }
  });
}

TEST(CollectiveQueueOnTheEngine, ThreadsThatWaitForDifferentWorksShareTheQueue) {
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"one", "one"}, {"one", "two"}}) {
    RunningRanks group(hosts);
    on_every_rank(2, [&](int32_t rank) {
      for (int round = 0; round < 10; ++round) {
        std::vector<at::Tensor> tensors;
        std::vector<WorkPtr> works;
        for (int i = 0; i < 9; ++i) {
          tensors.push_back(filled(int64_t{3} << (i % 3 * 6), rank + i));
          works.push_back(submit(group, rank, all_reduce(tensors.back())));
        }
        on_every_rank(3, [&](int32_t waiter) {
          for (size_t i = 0; i < 3; ++i) works[waiter + 3 * (2 - i)]->wait();
        });
        for (int i = 0; i < 9; ++i) expect_filled(tensors[i], 1 + 2 * i, 2);
        submit(group, rank, barrier(), {.is_synchronous = true})->wait();
      }
    });
  }
}

}  // namespace
}  // namespace zeropg
