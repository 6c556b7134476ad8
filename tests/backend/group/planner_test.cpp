// From a call's arguments to a plan, without any group.
#include "backend/group/planner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/platform/process/descriptor.h"
#include "compression/registry/registry.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

PlannerOptions options_of(int32_t world_size) {
  return {.rank = 0,
          .world_size = world_size,
          .bank_bytes = 1 << 18,
          .mailbox_bytes = 1 << 16,
          .window_bytes = 1 << 20,
          .cma = false,
          .algorithms = {}};
}

PlannerOptions with_algorithm(PlannerOptions options, const std::string& op, const std::string& name) {
  options.algorithms[op] = name;
  return options;
}

CollectiveArgs all_reduce(const at::Tensor& input, const at::Tensor& output) {
  CollectiveArgs args;
  args.op = OpKind::kAllReduce;
  args.inputs = {input};
  args.outputs = {output};
  args.dtype = input.scalar_type();
  args.bytes = static_cast<int64_t>(input.nbytes());
  return args;
}

CollectiveArgs all_reduce(int64_t numel, at::ScalarType dtype = at::kFloat) {
  const at::Tensor tensor = at::empty({numel}, dtype);
  return all_reduce(tensor, tensor);
}

CollectiveArgs all_to_all(std::vector<int64_t> sent, std::vector<int64_t> received) {
  CollectiveArgs args;
  args.op = OpKind::kAllToAll;
  args.dtype = at::kByte;
  args.inputs = {bytes_tensor(std::accumulate(sent.begin(), sent.end(), int64_t{0}))};
  args.outputs = {bytes_tensor(std::accumulate(received.begin(), received.end(), int64_t{0}))};
  args.send_bytes = std::move(sent);
  args.receive_bytes = std::move(received);
  return args;
}

TEST(Planner, PlansWithTheTensorsOfTheCall) {
  Planner planner(options_of(2));
  const CollectiveArgs args = all_reduce(at::empty({5}), at::empty({5}));
  const PlannedCollective plan = planner.plan(args);
  EXPECT_EQ(plan.inputs, std::vector{static_cast<std::byte*>(args.inputs[0].data_ptr())});
  EXPECT_EQ(plan.outputs, std::vector{static_cast<std::byte*>(args.outputs[0].data_ptr())});
  EXPECT_EQ(plan.dtype, DType::kFloat32);
  EXPECT_EQ(plan.spec.element_bytes, 4);
  EXPECT_EQ(plan.spec.bytes, 20);
  EXPECT_GT(plan.copied_bytes, 0);
  EXPECT_FALSE(plan.schedule->steps.empty());
}

TEST(Planner, PlansEverySizeAlsoNone) {
  Planner planner(options_of(3));
  EXPECT_EQ(planner.plan(all_reduce(0)).copied_bytes, 0);
  int64_t before = 0;
  for (const int64_t numel : {1, 7, 1000, 100'003}) {
    const int64_t copied = planner.plan(all_reduce(numel)).copied_bytes;
    EXPECT_GE(copied, 4 * numel);
    EXPECT_GT(copied, before);
    before = copied;
  }
}

TEST(Planner, KeepsASchedule) {
  Planner planner(options_of(4));
  const auto schedule = planner.plan(all_reduce(100)).schedule;
  EXPECT_EQ(planner.plan(all_reduce(100)).schedule, schedule);
  EXPECT_EQ(planner.plan(all_reduce(100, at::kInt)).schedule, schedule);  // as many bytes, added as they are
}

TEST(Planner, KeepsSchedulesApartThatDifferInAnything) {
  Planner planner(options_of(4));
  std::vector<CollectiveArgs> calls(10, all_reduce(100));
  calls[1] = all_reduce(101);
  calls[2] = all_reduce(200, at::kHalf);  // as many bytes, but sums are kept in wider floats
  calls[3].op = OpKind::kReduce;
  calls[4].op = OpKind::kReduce;
  calls[4].root = 1;
  calls[5].op = OpKind::kBroadcast;
  calls[6].op = OpKind::kAllGather;
  calls[7].op = OpKind::kAllGather;
  calls[7].output_is_list = true;
  calls[8] = all_to_all({4, 2, 3, 4}, {4, 3, 2, 1});
  calls[9] = all_to_all({4, 3, 2, 1}, {4, 2, 3, 4});
  std::vector<std::shared_ptr<const Schedule>> schedules;
  for (const CollectiveArgs& call : calls) schedules.push_back(planner.plan(call).schedule);
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(std::ranges::count(schedules, schedules[i]), 1) << i;
    EXPECT_EQ(planner.plan(calls[i]).schedule, schedules[i]) << i;
  }
}

TEST(Planner, KeepsSchedulesOfCodecsApartByWhatTheyDo) {
  Planner planner(options_of(4));
  CollectiveArgs plain = all_reduce(1000);
  CollectiveArgs with_codec = plain;
  with_codec.compression.codec = make_compressor("fp16", {});
  CollectiveArgs with_its_like = plain;
  with_its_like.compression.codec = make_compressor("fp16", {});
  CollectiveArgs with_another = plain;
  with_another.compression.codec = make_compressor("block_quant", {});
  const auto schedule = planner.plan(with_codec).schedule;
  EXPECT_EQ(schedule->algorithm, "all_reduce_compressed");
  EXPECT_EQ(planner.plan(with_its_like).schedule, schedule);
  EXPECT_NE(planner.plan(with_another).schedule, schedule);
  EXPECT_NE(planner.plan(plain).schedule->algorithm, schedule->algorithm);
}

TEST(Planner, DropsItsCacheBeforeThatGrowsWithoutBounds) {
  PlannerOptions options = options_of(24);
  Planner planner(options);
  const auto plan = [&](int64_t bytes) {
    std::vector<int64_t> counts(24, bytes);
    counts[0] = 1;
    return planner.plan(all_to_all(counts, counts)).schedule;
  };
  const std::weak_ptr<const Schedule> first = plan(1'000'000);
  EXPECT_FALSE(first.expired());
  size_t bytes = 0;
  for (int64_t more = 1; !first.expired() && bytes < size_t{200} << 20; ++more) bytes += memory_bytes(*plan(more));
  EXPECT_TRUE(first.expired());
  EXPECT_LT(bytes, size_t{80} << 20);
}

// A plan takes as much room for a gigabyte as for some megabytes, and is kept.
TEST(Planner, KeepsAScheduleOfAnySize) {
  Planner planner(options_of(8));
  const auto some = planner.plan(all_reduce(int64_t{16} << 20, at::kByte)).schedule;
  const CollectiveArgs huge = all_reduce(int64_t{1} << 30, at::kByte);
  const auto schedule = planner.plan(huge).schedule;
  EXPECT_EQ(memory_bytes(*schedule), memory_bytes(*some));
  EXPECT_EQ(planner.plan(huge).schedule, schedule);
}

// As rank 0 of that many nodes of 8 ranks sees it.
TEST(Planner, PlansAGigabyteForThousandsOfRanksInLittleRoom) {
  const CollectiveArgs huge = all_reduce(int64_t{1} << 30, at::kByte);
  for (const auto& [node_count, most_bytes] : {std::pair{128, size_t{1} << 20}, std::pair{1250, size_t{4} << 20}}) {
    Planner planner(options_of(8 * node_count));
    std::vector<std::vector<int32_t>> nodes(node_count, std::vector<int32_t>(8));
    for (int32_t node = 0; node < node_count; ++node) std::iota(nodes[node].begin(), nodes[node].end(), 8 * node);
    planner.set_nodes(nodes);
    const auto schedule = planner.plan(huge).schedule;
    EXPECT_LE(memory_bytes(*schedule), most_bytes);
    EXPECT_EQ(planner.plan(huge).schedule, schedule);
  }
}

TEST(Planner, RunsWhatIsForcedForItsOperation) {
  Planner planner(with_algorithm(options_of(4), "all_reduce", "all_reduce_staged"));
  EXPECT_EQ(planner.plan(all_reduce(1)).schedule->algorithm, "all_reduce_staged");
  EXPECT_EQ(Planner(options_of(4)).plan(all_reduce(1)).schedule->algorithm, "all_reduce_one_shot");
  CollectiveArgs barrier;
  EXPECT_EQ(planner.plan(barrier).schedule->algorithm, "barrier");
}

TEST(Planner, RefusesToForceWhatDoesNotExist) {
  const auto error = [](const std::string& op, const std::string& name) {
    return error_of([&] { Planner planner(with_algorithm(options_of(2), op, name)); });
  };
  expect_words(error("all_reduce", "all_reduce_rign"),
               {"algorithms[all_reduce] is 'all_reduce_rign'", "all_reduce_one_shot, all_reduce_staged"});
  expect_words(error("all_reduce", "broadcast_staged"), {"is 'broadcast_staged', expected one of"});
  expect_words(error("allreduce", "all_reduce_staged"), {"names the operation 'allreduce', which does not exist"});
  EXPECT_THROW(Planner(with_algorithm(options_of(2), "all_reduce", "")), c10::ValueError);
}

TEST(Planner, SaysAtTheCallThatAForcedAlgorithmCannotServeIt) {
  Planner planner(with_algorithm(options_of(4), "all_reduce", "all_reduce_hierarchical"));
  const auto plan = [&] { planner.plan(all_reduce(1)); };
  EXPECT_THROW(plan(), c10::ValueError);
  expect_words(error_of(plan), {"[zeropg rank 0/4] all_reduce: all_reduce_hierarchical does not support",
                                "force another one, or none"});
}

TEST(Planner, RefusesAnAllToAllThatDisagreesWithItself) {
  Planner planner(options_of(2));
  EXPECT_THROW(planner.plan(all_to_all({1, 2}, {3, 2})), c10::ValueError);
  EXPECT_NO_THROW(planner.plan(all_to_all({1, 2}, {1, 7})));
}

TEST(Planner, MultipliesByWhatAnAverageDividesByAndByAPremulSumsFactor) {
  Planner planner(options_of(4));
  CollectiveArgs args = all_reduce(10);
  args.factor = 0.5;
  args.reduce_op = ReduceOp::kPremulSum;
  EXPECT_EQ(planner.plan(args).factor, 0.5);
  args.reduce_op = ReduceOp::kAverage;
  EXPECT_EQ(planner.plan(args).factor, 4.0);
}

TEST(Planner, PlansOverTheNodesThatItIsTold) {
  Planner planner(options_of(4));
  planner.set_nodes({{0, 1}, {2, 3}});
  EXPECT_TRUE(planner.plan(all_reduce(10)).schedule->algorithm.starts_with("all_reduce_hierarchical"));
}

TEST(Planner, FollowsLinksWithSharesAndWithNothingElse) {
  Planner planner(options_of(4));
  planner.set_nodes({{0}, {1}, {2}, {3}});
  planner.set_links({}, {.node_bytes_per_us = std::vector<double>(4, 25), .is_followed = true});
  const PlannedCollective before = planner.plan(all_reduce(1 << 20));
  PlannedCollective planned_early = before;
  PlannedCollective small = planner.plan(all_reduce(1));
  const auto small_before = small.schedule;
  EXPECT_TRUE(before.has_shares);
  EXPECT_TRUE(before.spec.node_shares.empty());

  const LinkModel dropped{.node_bytes_per_us = {25, 25, 25, 6}, .is_followed = true};
  planner.follow_links(dropped);
  EXPECT_EQ(planner.links(), dropped);
  const PlannedCollective after = planner.plan(all_reduce(1 << 20));
  ASSERT_EQ(after.spec.node_shares.size(), 4U);
  EXPECT_EQ(after.spec.node_shares[3], 0);
  EXPECT_EQ(after.schedule->algorithm, before.schedule->algorithm);
  EXPECT_NE(after.call.algorithm, before.call.algorithm) << "ranks with other links would not notice it";
  planner.refresh(planned_early);
  EXPECT_EQ(planned_early.schedule, after.schedule);
  EXPECT_EQ(planned_early.call.algorithm, after.call.algorithm);
  EXPECT_EQ(planned_early.inputs, before.inputs);
  EXPECT_EQ(planned_early.copied_bytes, before.copied_bytes);
  planner.refresh(small);
  EXPECT_EQ(small.schedule->algorithm, small_before->algorithm);

  planner.follow_links({.node_bytes_per_us = std::vector<double>(4, 20), .is_followed = true});
  planner.refresh(planned_early);
  EXPECT_EQ(planned_early.call.algorithm, before.call.algorithm);
}

TEST(Planner, LeavesTheSharesOfWhatTravelsEncodedAsTheyWere) {
  Planner planner(options_of(4));
  planner.set_nodes({{0}, {1}, {2}, {3}});
  planner.set_links({}, {.node_bytes_per_us = {25, 25, 12, 25}, .is_followed = true});
  CollectiveArgs args = all_reduce(1 << 20);
  args.compression.codec = make_compressor("fp16", {});
  const PlannedCollective before = planner.plan(args);
  planner.follow_links({.node_bytes_per_us = std::vector<double>(4, 25), .is_followed = true});
  const PlannedCollective after = planner.plan(args);
  EXPECT_FALSE(after.has_shares);
  EXPECT_FALSE(after.spec.node_shares.empty());
  EXPECT_EQ(after.spec.node_shares, before.spec.node_shares);
}

TEST(Planner, KnowsWhatCanBeReduced) {
  EXPECT_TRUE(is_reducible(at::kFloat, ReduceOp::kSum));
  EXPECT_TRUE(is_reducible(at::kComplexDouble, ReduceOp::kSum));
  EXPECT_FALSE(is_reducible(at::kComplexDouble, ReduceOp::kMax));
  EXPECT_TRUE(is_reducible(at::kInt, ReduceOp::kAverage));
  EXPECT_FALSE(is_reducible(at::kInt, ReduceOp::kPremulSum));
  EXPECT_FALSE(is_reducible(at::kQInt8, ReduceOp::kSum));
}

TEST(Planner, ServesManyThreads) {
  Planner planner(options_of(4));
  on_every_rank(4, [&](int32_t) {
    for (int64_t numel = 1; numel < 200; ++numel) {
      EXPECT_EQ(planner.plan(all_reduce(numel)).spec.bytes, 4 * numel);
    }
  });
}

// A tensor pool of which rank 0 has blocks.
class PlannerWithPool : public ::testing::Test {
 protected:
  at::Tensor pooled(int64_t numel) { return at::from_blob(pool_.allocate(4 * numel), {numel}, at::kFloat); }

  static constexpr int64_t kNumel = 100'000;
  const Descriptor fd_{TensorPool::create(2, int64_t{4} << 20)};
  TensorPool pool_{fd_.get(), 0, 2};
};

TEST_F(PlannerWithPool, OffersADirectScheduleOfTensorsThatLieThere) {
  Planner planner(options_of(2));
  planner.set_pool(pool_);
  const at::Tensor in = pooled(kNumel);
  const at::Tensor out = pooled(kNumel);
  const PlannedCollective plan = planner.plan(all_reduce(in, out));
  ASSERT_NE(plan.direct, nullptr);
  EXPECT_TRUE(plan.direct->is_direct);
  EXPECT_FALSE(plan.schedule->is_direct);
  EXPECT_TRUE(plan.offers_direct);
  EXPECT_EQ(plan.pool_input, pool_.offset_of(plan.inputs[0], 4 * kNumel));
  EXPECT_EQ(plan.pool_output, pool_.offset_of(plan.outputs[0], 4 * kNumel));
}

TEST_F(PlannerWithPool, OffersNothingWhereATensorLiesElsewhere) {
  Planner planner(options_of(2));
  planner.set_pool(pool_);
  for (const bool is_input : {true, false}) {
    const at::Tensor in = is_input ? at::empty({kNumel}) : pooled(kNumel);
    const at::Tensor out = is_input ? pooled(kNumel) : at::empty({kNumel});
    const PlannedCollective plan = planner.plan(all_reduce(in, out));
    EXPECT_NE(plan.direct, nullptr);  // others may
    EXPECT_FALSE(plan.offers_direct);
    EXPECT_EQ((is_input ? plan.pool_input : plan.pool_output), -1);
  }
}

TEST_F(PlannerWithPool, HasNoDirectScheduleWithoutMemoryForOneRankOrForLists) {
  const at::Tensor tensor = pooled(kNumel);
  EXPECT_EQ(Planner(options_of(2)).plan(all_reduce(tensor, tensor)).direct, nullptr);
  const Descriptor nothing(TensorPool::create(2, 0));
  const TensorPool empty(nothing.get(), 0, 2);
  Planner without(options_of(2));
  without.set_pool(empty);
  EXPECT_EQ(without.plan(all_reduce(tensor, tensor)).direct, nullptr);
  Planner alone(options_of(1));
  alone.set_pool(pool_);
  EXPECT_EQ(alone.plan(all_reduce(tensor, tensor)).direct, nullptr);
  Planner planner(options_of(2));
  planner.set_pool(pool_);
  CollectiveArgs listed = all_to_all({kNumel, kNumel}, {kNumel, kNumel});
  EXPECT_NE(planner.plan(listed).direct, nullptr);
  listed.inputs = {bytes_tensor(kNumel), bytes_tensor(kNumel)};
  listed.input_is_list = true;
  EXPECT_EQ(planner.plan(listed).direct, nullptr);
}

TEST_F(PlannerWithPool, OffersLargeBlocksForReadingWhereThatIsAllowed) {
  for (const bool cma : {true, false}) {
    PlannerOptions options = options_of(2);
    options.cma = cma;
    Planner planner(options);
    planner.set_pool(pool_);
    EXPECT_EQ(planner.plan(all_to_all({kNumel, kNumel}, {kNumel, kNumel})).offers_reading, cma);
    EXPECT_FALSE(planner.plan(all_to_all({10, 10}, {10, 10})).offers_reading);
  }
}

TEST_F(PlannerWithPool, ForcesADirectAlgorithmForSmallTensorsAndForbidsItWithAnother) {
  const at::Tensor tensor = pooled(1);
  Planner forced(with_algorithm(options_of(2), "all_reduce", "all_reduce_direct"));
  forced.set_pool(pool_);
  EXPECT_NE(forced.plan(all_reduce(tensor, tensor)).direct, nullptr);
  EXPECT_FALSE(forced.plan(all_reduce(tensor, tensor)).schedule->is_direct);
  Planner forbidden(with_algorithm(options_of(2), "all_reduce", "all_reduce_staged"));
  forbidden.set_pool(pool_);
  const at::Tensor large = pooled(kNumel);
  EXPECT_EQ(forbidden.plan(all_reduce(large, large)).direct, nullptr);
}

}  // namespace
}  // namespace zeropg
