// One collective at a time on ranks that are objects of this process, advanced in any order by one thread.
#include "backend/engine/schedule_executor.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "tests/backend/engine/collectives.h"

namespace zeropg {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, kBankBytes / 4, kBankBytes / 4 + 1, 10'001};

class ScheduleExecutorTest : public ::testing::Test {
 protected:
  void join(const std::vector<std::string>& hosts, const std::map<std::string, std::string>& algorithms = {}) {
    ranks_ = meet_on(hosts);
    for (const auto& rank : ranks_) {
      planners_.push_back(make_planner(*rank, algorithms));
      collectives_.push_back(std::make_unique<CollectiveContext>(*rank));
    }
    executors_.resize(ranks_.size());
    plans_.resize(ranks_.size());
  }
  int32_t world_size() const { return static_cast<int32_t>(ranks_.size()); }
  void begin(int32_t rank, PlannedCollective plan) {
    plans_[rank] = std::move(plan);
    label_.rank = rank;
    label_.world_size = world_size();
    labels_.push_back(label_);
    executors_[rank] = std::make_unique<ScheduleExecutor>(*collectives_[rank], plans_[rank], labels_.back());
  }
  void begin(int32_t rank, const CollectiveArgs& args) {
    calls_.push_back(args);
    begin(rank, planners_[rank]->plan(args));
  }
  Progress advance(int32_t rank) {
    if (ranks_[rank]->network() != nullptr) ranks_[rank]->network()->progress();
    return executors_[rank]->advance();
  }
  // Ranks take turns as `random_` says until all are done.
  void run_all() {
    std::vector<bool> is_done(ranks_.size());
    poll([&] {
      const size_t rank = random_() % ranks_.size();
      is_done[rank] = advance(static_cast<int32_t>(rank)) == Progress::kDone;
      return std::ranges::all_of(is_done, [](bool each) { return each; });
    });
  }
  at::Tensor pooled(int32_t rank, int64_t numel, int value) {
    const at::Tensor tensor = at::from_blob(ranks_[rank]->pool()->allocate(4 * numel), {numel}, at::kFloat);
    fill(tensor, value);
    return tensor;
  }
  uint64_t direct_calls(int32_t rank) const { return ranks_[rank]->statistics().by_name()["test"].direct_calls; }

  Contexts ranks_;
  std::vector<std::unique_ptr<Planner>> planners_;
  std::vector<std::unique_ptr<CollectiveContext>> collectives_;
  std::vector<CollectiveArgs> calls_;  // owns the tensors
  std::vector<PlannedCollective> plans_;
  std::vector<std::unique_ptr<ScheduleExecutor>> executors_;
  OperationLabel label_{.rank = 0, .world_size = 0, .title = "zeropg:test", .sequence = 1};
  std::deque<OperationLabel> labels_;
  std::mt19937 random_{7};
};

using Hosts = std::vector<std::string>;

class ScheduleExecutorOnHosts : public ScheduleExecutorTest, public ::testing::WithParamInterface<Hosts> {};

INSTANTIATE_TEST_SUITE_P(, ScheduleExecutorOnHosts,
                         ::testing::Values(Hosts{"one"}, Hosts{"one", "one", "one"}, Hosts{"one", "two", "one"}));

TEST_P(ScheduleExecutorOnHosts, ReducesSizesAlsoLargerThanABankOneAfterTheOther) {
  join(GetParam());
  for (const int64_t numel : kSizes) {
    std::vector<at::Tensor> tensors;
    for (int32_t rank = 0; rank < world_size(); ++rank) {
      tensors.push_back(filled(numel, rank));
      begin(rank, all_reduce(tensors.back()));
    }
    run_all();
    for (const at::Tensor& tensor : tensors) expect_sum_over_ranks(tensor, world_size());
  }
}

TEST_P(ScheduleExecutorOnHosts, ScattersGathersAndBroadcasts) {
  join(GetParam());
  for (const int64_t numel : kSizes) {
    std::vector<at::Tensor> blocks;
    std::vector<at::Tensor> wholes;
    for (int32_t rank = 0; rank < world_size(); ++rank) {
      blocks.push_back(at::empty({numel}, at::kFloat));
      wholes.push_back(filled(numel * world_size(), rank));
      begin(rank, reduction(OpKind::kReduceScatter, wholes[rank], blocks[rank]));
    }
    run_all();
    for (int32_t rank = 0; rank < world_size(); ++rank) {
      fill(blocks[rank], rank);
      CollectiveArgs args = reduction(OpKind::kAllGather, blocks[rank], wholes[rank]);
      args.bytes = static_cast<int64_t>(blocks[rank].nbytes());
      begin(rank, args);
    }
    run_all();
    for (const at::Tensor& whole : wholes) {
      for (int32_t rank = 0; rank < world_size(); ++rank) expect_filled(whole.narrow(0, rank * numel, numel), rank);
    }
    const int32_t root = world_size() - 1;
    for (int32_t rank = 0; rank < world_size(); ++rank) {
      CollectiveArgs args = reduction(OpKind::kBroadcast, blocks[rank], blocks[rank], root);
      if (rank != root) args.inputs.clear();
      begin(rank, args);
    }
    run_all();
    for (const at::Tensor& block : blocks) expect_filled(block, root);
  }
}

TEST_P(ScheduleExecutorOnHosts, ExchangesBlocksThatAreUnevenEmptyAndLargerThanARing) {
  join(GetParam());
  const auto bytes = [&](int32_t from, int32_t to) { return int64_t{(from * 3 + to) % 4 * 1001}; };
  std::vector<CollectiveArgs> calls(ranks_.size());
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    CollectiveArgs& args = calls[rank];
    args.op = OpKind::kAllToAll;
    for (int32_t peer = 0; peer < world_size(); ++peer) {
      args.send_bytes.push_back(bytes(rank, peer));
      args.receive_bytes.push_back(bytes(peer, rank));
      args.inputs.push_back(bytes_tensor(bytes(rank, peer)));
      args.outputs.push_back(bytes_tensor(bytes(peer, rank)));
      std::memcpy(args.inputs.back().mutable_data_ptr(), pattern(bytes(rank, peer), rank * 10 + peer).data(),
                  static_cast<size_t>(bytes(rank, peer)));
    }
    args.input_is_list = args.output_is_list = true;
    begin(rank, args);
  }
  run_all();
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    for (int32_t peer = 0; peer < world_size(); ++peer) {
      const auto expected = pattern(bytes(peer, rank), peer * 10 + rank);
      EXPECT_EQ(std::memcmp(calls[rank].outputs[peer].const_data_ptr(), expected.data(), expected.size()), 0);
    }
  }
}

TEST_F(ScheduleExecutorTest, SaysForWhomAndWhereItWaits) {
  join({"one", "one", "one"});
  for (int32_t rank : {0, 1, 2}) begin(rank, barrier());
  EXPECT_TRUE(executors_[0]->awaited().empty());  // not at the barrier yet
  EXPECT_EQ(advance(0), Progress::kBlocked);
  EXPECT_EQ(executors_[0]->awaited(), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(executors_[0]->describe_wait(), "in step 1 of 1 of barrier");
  advance(2);
  EXPECT_EQ(executors_[0]->awaited(), std::vector<int32_t>{1});
  EXPECT_EQ(advance(1), Progress::kDone);
  EXPECT_EQ(advance(0), Progress::kDone);
  EXPECT_TRUE(executors_[0]->awaited().empty());
  EXPECT_EQ(advance(0), Progress::kDone);  // and stays done
}

TEST_F(ScheduleExecutorTest, MeasuresHowLongItWaitedForWhom) {
  join({"one", "one", "one"});
  for (int32_t rank : {0, 1, 2}) begin(rank, barrier());
  advance(0);
  advance(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(advance(0), Progress::kBlocked);  // takes another look at who is missing
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  advance(1);
  EXPECT_EQ(advance(0), Progress::kDone);
  const std::vector<double>& waited = executors_[0]->waiting_seconds();
  EXPECT_GE(waited.at(1), 0.04);
  EXPECT_LT(waited.at(2), waited.at(1));
  EXPECT_EQ(waited.at(0), 0);
}

TEST_F(ScheduleExecutorTest, DifferentCallsAreTheSameErrorOnEveryRankAndTouchNoResult) {
  join({"one", "one", "one"});
  std::vector<at::Tensor> tensors;
  for (int32_t rank : {0, 1, 2}) {
    tensors.push_back(filled(rank == 1 ? 11 : 10, rank));
    begin(rank, all_reduce(tensors[rank]));
  }
  std::vector<std::string> errors;
  for (int32_t rank : {0, 1}) advance(rank);
  for (int32_t rank : {2, 0, 1}) {
    const std::string error = error_of([&] { advance(rank); });
    expect_words(error,
                 {"the ranks made different calls: ranks 0, 2: all_reduce(", "40 bytes", "rank 1: ", "44 bytes"});
    errors.push_back(error.substr(error.find("the ranks")));
    expect_filled(tensors[rank], rank);
  }
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0], errors[2]);
}

TEST_F(ScheduleExecutorTest, DifferentCallsAndGarbageFromAnotherNodeAreErrors) {
  for (const bool is_garbage : {true, false}) {
    executors_.clear();
    collectives_.clear();
    planners_.clear();
    ranks_.clear();
    join({"one", "two"});
    const at::Tensor tensor = filled(10, 5);
    begin(0, all_reduce(tensor));
    if (is_garbage) {
      const auto garbage = pattern(200);
      ASSERT_EQ(ranks_[1]->transport_to(0).try_send(0, Lane::kCollective, garbage), garbage.size());
    } else {
      begin(1, reduction(OpKind::kBroadcast, filled(10, 5), filled(10, 5)));
    }
    std::string error;
    poll([&] {
      ranks_[1]->network()->progress();
      error = error_of([&] {
        if (!is_garbage) advance(1);
        advance(0);
      });
      return error != "no error";
    });
    expect_words(error, is_garbage ? std::initializer_list<const char*>{"rank 1"}
                                   : std::initializer_list<const char*>{"all_reduce", "broadcast"});
    expect_filled(tensor, 5);
  }
}

TEST_F(ScheduleExecutorTest, ReadsTensorsInThePoolWhereTheyLieIfAllAreThere) {
  join({"one", "one"}, {{"all_reduce", "all_reduce_direct"}});
  for (const bool are_all_there : {true, false, true}) {
    for (const int64_t numel : {int64_t{1}, int64_t{5}, int64_t{10'001}}) {
      const uint64_t before = direct_calls(0);
      const at::Tensor zero = pooled(0, numel, 0);
      const at::Tensor one = are_all_there ? pooled(1, numel, 1) : filled(numel, 1);
      begin(0, all_reduce(zero));
      begin(1, all_reduce(one));
      run_all();
      expect_sum_over_ranks(zero, 2);
      expect_sum_over_ranks(one, 2);
      for (const int32_t rank : {0, 1}) EXPECT_EQ(direct_calls(rank), before + (are_all_there ? 1 : 0));
    }
  }
}

TEST_F(ScheduleExecutorTest, DoesNotBelieveTensorsOfARankThatGaveUpMeanwhile) {
  join({"one", "one"}, {{"all_reduce", "all_reduce_direct"}});
  begin(0, all_reduce(pooled(0, 1000, 0)));
  begin(1, all_reduce(pooled(1, 1000, 1)));
  advance(0);
  advance(1);
  ranks_[1]->fail({.text = "out of luck"});
  expect_words(error_of([&] { advance(0); }), {"rank 1 gave up while others worked on its tensor"});
}

// Schedules that the suite makes: what no planner says today, a planner may say tomorrow.
class HandMadeSchedule : public ScheduleExecutorTest {
 protected:
  PlannedCollective plan(int32_t rank, Schedule schedule, const at::Tensor& input, const at::Tensor& output) {
    calls_.push_back(reduction(OpKind::kAllReduce, input, output));
    PlannedCollective plan = planners_[rank]->plan(calls_.back());
    plan.schedule = std::make_shared<const Schedule>(std::move(schedule));
    plan.direct = nullptr;
    return plan;
  }
  static Region at(Space space, int64_t numel = 0) {
    return {.space = space, .bank = 0, .index = 0, .offset_bytes = 4 * numel};
  }
};

TEST_F(HandMadeSchedule, ReducesIntoSeveralPlacesInPiecesAndCopiesWithinATensor) {
  join({"one"});
  constexpr int64_t kNumel = 5'003;  // some pieces and a rest
  Schedule schedule{.algorithm = "by_hand"};
  schedule.scratch_bytes = 4 * kNumel;
  schedule.sources = {at(Space::kInput), at(Space::kInput)};
  schedule.echoes = {at(Space::kOutput, kNumel), at(Space::kScratch)};
  schedule.steps = {
      {.kind = StepKind::kReduce,
       .destination = at(Space::kOutput),
       .bytes = 4 * kNumel,
       .source_count = 2,
       .echo_count = 2},
      {.kind = StepKind::kCopy,
       .destination = at(Space::kOutput, 2 * kNumel),
       .source = at(Space::kScratch),
       .bytes = 4 * kNumel},
      {.kind = StepKind::kCopy,
       .is_streaming = true,
       .destination = at(Space::kOutput, 3 * kNumel),
       .source = at(Space::kOutput),
       .bytes = 4 * kNumel},
      {.kind = StepKind::kCopy,
       .destination = at(Space::kOutput, 1),
       .source = at(Space::kOutput),
       .bytes = 40},  // overlap
      {.kind = StepKind::kCopy, .destination = at(Space::kOutput), .source = at(Space::kOutput), .bytes = 4 * kNumel},
  };
  const at::Tensor input = filled(kNumel, 3);
  const at::Tensor output = filled(4 * kNumel, 0);
  begin(0, plan(0, schedule, input, output));
  EXPECT_EQ(advance(0), Progress::kDone);
  for (const int64_t copy : {1, 2, 3}) expect_filled(output.narrow(0, copy * kNumel, kNumel), 6, 2);
  expect_filled(output.narrow(0, 1, 8), 6, 2);
  expect_filled(input, 3);
}

TEST_F(HandMadeSchedule, SendsAndReceivesMoreThanARingHolds) {
  join({"one", "one"});
  constexpr int64_t kNumel = kMailboxBytes;  // of four bytes each
  const auto transfer = [](StepKind kind, int32_t peer) {
    Step step{.kind = kind,
              .peer = peer,
              .destination = at(Space::kOutput),
              .source = at(Space::kInput),
              .bytes = 4 * kNumel};
    return Schedule{.algorithm = "by_hand", .steps = {step}};
  };
  const at::Tensor sent = filled(kNumel, 7);
  const at::Tensor received = filled(kNumel, 0);
  begin(0, plan(0, transfer(StepKind::kSend, 1), sent, filled(kNumel, 0)));
  begin(1, plan(1, transfer(StepKind::kReceive, 0), filled(kNumel, 0), received));
  EXPECT_EQ(advance(1), Progress::kBlocked);
  EXPECT_EQ(executors_[1]->awaited(), std::vector<int32_t>{0});
  EXPECT_EQ(advance(0), Progress::kMoved);
  EXPECT_EQ(advance(0), Progress::kBlocked);
  run_all();
  expect_filled(received, 7);
}

TEST_F(HandMadeSchedule, ASendOrReceiveEndsWithItsPeer) {
  join({"one", "one"});
  const Step step{.kind = StepKind::kReceive, .peer = 1, .destination = at(Space::kOutput), .bytes = 4};
  begin(0, plan(0, {.algorithm = "by_hand", .steps = {step}}, filled(1, 0), filled(1, 0)));
  EXPECT_EQ(advance(0), Progress::kBlocked);
  ranks_[1]->depart();
  expect_words(error_of([&] { advance(0); }), {"rank 1 left"});
}

TEST_F(HandMadeSchedule, AnUnknownStepIsAnErrorAndAnEmptyScheduleIsDone) {
  join({"one"});
  const at::Tensor tensor = filled(1, 0);
  begin(0, plan(0, {.algorithm = "by_hand"}, tensor, tensor));
  EXPECT_EQ(advance(0), Progress::kDone);
  Step step;
  step.kind = static_cast<StepKind>(200);
  begin(0, plan(0, {.algorithm = "by_hand", .steps = {step}}, tensor, tensor));
  expect_words(error_of([&] { advance(0); }), {"a step that the engine does not know"});
}

}  // namespace
}  // namespace zeropg
