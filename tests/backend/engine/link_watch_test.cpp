// Links that a group follows, over loopback. What it makes of links that change is in tests/lab/test_links.py.
#include "backend/engine/link_watch.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/backend/engine/collectives.h"
#include "tests/backend/running_ranks.h"

namespace zeropg {
namespace {

constexpr int32_t kNodes = 3;
constexpr int64_t kNumel = 300'000;  // large, and at these speeds a window of its own
const LinkModel kWrong{.node_bytes_per_us = {10, 10, 2.5}, .is_followed = true};

class LinkWatchTest : public ::testing::Test {
 protected:
  LinkWatchTest() : ranks_({"a", "b", "c"}) {
    for (int32_t rank = 0; rank < kNodes; ++rank) {
      planners_.push_back(make_planner(ranks_[rank]->group(), {{"all_reduce", "all_reduce_hierarchical"}}));
      planners_.back()->set_links({}, kWrong);
      ranks_[rank]->collectives()->watch_links(planners_.back());
    }
  }

  void run(int32_t rank, const CollectiveArgs& args) {
    auto job = std::make_unique<CollectiveJob>();
    job->collectives.push_back(planners_[rank]->plan(args));
    ZeroWork::Tensors tensors;
    tensors.held = args.inputs;
    const OperationLabel label{.rank = rank, .world_size = kNodes, .title = "zeropg:test", .sequence = 1};
    const auto work =
        c10::make_intrusive<ZeroWork>(label, c10d::OpType::ALLREDUCE, std::move(tensors),
                                      OperationTimeout{.timeout = kLongTimeout}, ranks_[rank]->collectives());
    job->work = work;
    ranks_[rank]->collectives()->submit(std::move(job), /*is_synchronous=*/true);
    work->wait();
  }

  RunningRanks ranks_;
  std::vector<std::shared_ptr<Planner>> planners_;
};

TEST_F(LinkWatchTest, AllRanksFindTheSameAtTheSamePlace) {
  constexpr int32_t kMost = 100;
  std::array<int32_t, kNodes> operations{};
  on_every_rank(kNodes, [&](int32_t rank) {
    while (planners_[rank]->links() == kWrong && ++operations[rank] < kMost) {
      const at::Tensor tensor = filled(kNumel, rank);
      run(rank, all_reduce(tensor));
      expect_sum_over_ranks(tensor, kNodes);
    }
  });
  EXPECT_GT(operations[0], static_cast<int32_t>(kFollowedWindows));
  EXPECT_LT(operations[0], kMost);
  for (int32_t rank = 1; rank < kNodes; ++rank) {
    EXPECT_EQ(operations[rank], operations[0]);
    EXPECT_EQ(planners_[rank]->links(), planners_[0]->links());
  }
}

TEST_F(LinkWatchTest, ARankThatCallsSomethingElseSeesWhatTheOthersRun) {
  std::array<std::string, kNodes> errors;
  on_every_rank(kNodes, [&](int32_t rank) {
    const at::Tensor tensor = filled(kNumel, rank);
    run(rank, all_reduce(tensor));
    errors[rank] =
        error_of([&] { run(rank, rank == 2 ? reduction(OpKind::kBroadcast, tensor, tensor) : all_reduce(tensor)); });
  });
  expect_words(errors[2], {"the ranks made different calls", "broadcast(", "about links"});
  for (const int32_t rank : {0, 1}) EXPECT_NE(errors[rank], "no error");
}

}  // namespace
}  // namespace zeropg
