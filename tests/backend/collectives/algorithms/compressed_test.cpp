// Reductions with a codec, on all ranks in the simulator: those on one node against a slow truth, bit for bit; all by
// what must hold of them whatever their order of summation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend/collectives/schedule/steps.h"
#include "backend/collectives/select/registry.h"
#include "backend/simulator/schedule_simulator.h"
#include "compression/error_feedback.h"
#include "compression/registry/registry.h"

namespace zeropg {
namespace {

using Floats = std::vector<float>;

struct Shape {
  std::string algorithm{};
  int32_t world_size = 2;
  int64_t numel = 0;  // of the input of an all-reduce, of a block of a reduce-scatter
  int64_t bits = 4;
  int64_t block = 32;
  ReduceOp reduce_op = ReduceOp::kAverage;
  bool has_residuals = true;
  bool is_list = false;
  bool is_in_place = false;
  int64_t mailbox_bytes = 512;
  int64_t bank_bytes = 4096;
  uint64_t seed = 0;
  std::vector<std::vector<int32_t>> nodes{};
  int64_t window_bytes = 1024;
  std::vector<int32_t> node_shares{};
};

std::span<std::byte> bytes_of(Floats& values) { return std::as_writable_bytes(std::span(values)); }

Floats random_floats(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

class Reduction {
 public:
  explicit Reduction(const Shape& shape)
      : shape_(shape),
        algorithm_(*find_algorithm(shape.algorithm)),
        codec_(make_compressor(
            "block_quant", {{"bits", static_cast<double>(shape.bits)}, {"block", static_cast<double>(shape.block)}})) {
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      const int64_t numel = input_numel();
      inputs_.push_back(random_floats(numel, 1000 * shape.seed + rank));
      outputs_.push_back(Floats(shape.numel, 7.0f));
      residuals_.push_back({random_floats(numel, 77 + rank), random_floats(numel, 99 + rank)});
      if (!shape.has_residuals) residuals_.back() = {Floats(numel, 0.0f), Floats(numel, 0.0f)};
    }
    inputs_before_ = inputs_;
    residuals_before_ = residuals_;
    make_tensors();
    if (shape.nodes.empty()) compute_truth();
  }

  bool is_all_reduce() const { return algorithm_.op == OpKind::kAllReduce; }
  int64_t input_numel() const { return is_all_reduce() ? shape_.numel : shape_.numel * shape_.world_size; }

  CollectiveSpec spec(int32_t rank) const {
    return {.op = algorithm_.op,
            .rank = rank,
            .world_size = shape_.world_size,
            .element_bytes = 4,
            .bytes = shape_.numel * 4,
            .bank_bytes = shape_.bank_bytes,
            .mailbox_bytes = shape_.mailbox_bytes,
            .input_is_list = shape_.is_list,
            .nodes = shape_.nodes,
            .node_shares = shape_.node_shares,
            .window_bytes = shape_.window_bytes,
            .codec = codec_.get(),
            .has_residuals = shape_.has_residuals};
  }

  // `order`: seed of the interleaving of ranks.
  std::vector<Traffic> run(uint64_t order = 0) {
    SimulatedOperation operation{.tensors = tensors_,
                                 .dtype = DType::kFloat32,
                                 .reduce_op = shape_.reduce_op,
                                 .factor = static_cast<double>(shape_.world_size),
                                 .codec = codec_.get()};
    for (int32_t rank = 0; rank < shape_.world_size; ++rank) operation.schedules.push_back(algorithm_.plan(spec(rank)));
    return simulate({.world_size = shape_.world_size,
                     .bank_bytes = shape_.bank_bytes,
                     .mailbox_bytes = shape_.mailbox_bytes,
                     .seed = shape_.seed + order,
                     .nodes = shape_.nodes,
                     .window_bytes = shape_.window_bytes},
                    {operation});
  }

  void expect_results() {
    for (int32_t rank = 0; rank < shape_.world_size; ++rank) {
      const std::span<std::byte> output = tensors_[rank].outputs[0];
      ASSERT_EQ(output.size(), 4 * expected_[rank].size());
      const auto expected = std::as_bytes(std::span(expected_[rank]));
      EXPECT_TRUE(std::equal(output.begin(), output.end(), expected.begin())) << describe() << " rank " << rank;
      for (int hop = 0; hop < 2; ++hop) {
        EXPECT_TRUE(residuals_[rank][hop] == expected_residuals_[rank][hop])
            << describe() << " rank " << rank << " hop " << hop;
      }
    }
  }

  // Nothing is lost and nothing counts twice: the results and what all ranks still owe are the averages and what they
  // owed before. All ranks get the same bits, and what is owed is small.
  void expect_conservation() const {
    for (int32_t owner = 0; owner < (is_all_reduce() ? 1 : shape_.world_size); ++owner) {
      const int64_t start = is_all_reduce() ? 0 : owner * shape_.numel;
      for (int64_t i = 0; i < shape_.numel; ++i) {
        double wanted = 0;
        double found = output(owner)[i];
        for (int32_t rank = 0; rank < shape_.world_size; ++rank) {
          const auto owed = [&](const std::vector<Floats>& of) {
            return of[kContributionHop][start + i] / double(shape_.world_size) + of[kResultHop][start + i];
          };
          wanted += inputs_before_[rank][start + i] / double(shape_.world_size) + owed(residuals_before_[rank]);
          found += owed(residuals_[rank]);
        }
        ASSERT_NEAR(found, wanted, 1e-4) << describe() << ", element " << i << " of rank " << owner;
      }
    }
    for (int32_t rank = 1; is_all_reduce() && rank < shape_.world_size; ++rank) {
      EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(output(rank))), std::as_bytes(std::span(output(0)))))
          << describe() << rank;
    }
  }

  std::span<const float> output(int32_t rank) const {
    const std::span<std::byte> bytes = tensors_[rank].outputs[0];
    return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / 4};
  }

  std::string describe() const {
    return shape_.algorithm + " world_size " + std::to_string(shape_.world_size) + " numel " +
           std::to_string(shape_.numel) + " seed " + std::to_string(shape_.seed);
  }
  const Compressor& codec() const { return *codec_; }

 private:
  void make_tensors() {
    for (int32_t rank = 0; rank < shape_.world_size; ++rank) {
      SimulatedTensors tensors;
      if (shape_.is_list) {
        for (int32_t block = 0; block < shape_.world_size; ++block) {
          tensors.inputs.push_back(bytes_of(inputs_[rank]).subspan(4 * block * shape_.numel, 4 * shape_.numel));
        }
      } else {
        tensors.inputs.push_back(bytes_of(inputs_[rank]));
      }
      tensors.outputs.push_back(bytes_of(outputs_[rank]));
      if (shape_.is_in_place) {
        const int64_t offset = is_all_reduce() ? 0 : rank * shape_.numel;
        tensors.outputs[0] = bytes_of(inputs_[rank]).subspan(4 * offset, 4 * shape_.numel);
      }
      if (shape_.has_residuals) {
        for (Floats& residual : residuals_[rank]) tensors.residuals.push_back(bytes_of(residual));
      }
      tensors_.push_back(tensors);
    }
  }

  // What peers see of values, and what stays behind.
  Floats through_codec(Floats values, std::span<float> residual) const {
    std::vector<std::byte> encoded(codec_->capacity_bytes(static_cast<int64_t>(values.size())));
    codec_->encode(values, shape_.has_residuals ? residual : std::span<float>(), encoded);
    codec_->decode(encoded, values);
    return values;
  }

  // Owner by owner on whole ranges: pieces must not show in the result.
  void compute_truth() {
    expected_residuals_ = residuals_;
    expected_.assign(shape_.world_size, Floats(shape_.numel));
    for (int32_t owner = 0; owner < shape_.world_size; ++owner) {
      const Range range = is_all_reduce() ? equal_part_of(4 * shape_.numel, shape_.world_size, 4 * shape_.block, owner)
                                          : Range{4 * owner * shape_.numel, 4 * shape_.numel};
      const int64_t start = range.offset_bytes / 4;
      const int64_t count = range.bytes / 4;
      Floats sum;
      for (int32_t rank = 0; rank < shape_.world_size; ++rank) {
        Floats values(inputs_[rank].begin() + start, inputs_[rank].begin() + start + count);
        if (rank != owner && shape_.world_size > 1) {
          values = through_codec(values, std::span(expected_residuals_[rank][kContributionHop]).subspan(start, count));
        }
        if (rank == 0) {
          sum = values;
        } else {
          for (int64_t i = 0; i < count; ++i) sum[i] += values[i];
        }
      }
      if (shape_.reduce_op == ReduceOp::kAverage) {
        for (float& value : sum) value /= static_cast<float>(shape_.world_size);
      }
      if (!is_all_reduce()) {
        expected_[owner] = sum;
        continue;
      }
      if (shape_.world_size > 1) {
        sum = through_codec(sum, std::span(expected_residuals_[owner][kResultHop]).subspan(start, count));
      }
      for (Floats& each : expected_) std::copy(sum.begin(), sum.end(), each.begin() + start);
    }
  }

  Shape shape_;
  const Algorithm& algorithm_;
  std::shared_ptr<const Compressor> codec_;
  std::vector<Floats> inputs_;
  std::vector<Floats> inputs_before_;
  std::vector<Floats> outputs_;
  std::vector<std::vector<Floats>> residuals_before_;
  std::vector<std::vector<Floats>> residuals_;  // [rank][hop]
  std::vector<SimulatedTensors> tensors_;
  std::vector<Floats> expected_;
  std::vector<std::vector<Floats>> expected_residuals_;
};

class CompressedTest : public testing::TestWithParam<std::string> {
 protected:
  void check(Shape shape) const {
    shape.algorithm = GetParam();
    Reduction reduction(shape);
    SCOPED_TRACE(reduction.describe());
    reduction.run();
    reduction.expect_results();
    if (shape.reduce_op == ReduceOp::kAverage && shape.has_residuals) reduction.expect_conservation();
  }
};

TEST_P(CompressedTest, GivesTheSlowTruthInEveryWorldAndSize) {
  for (const int32_t world_size : {1, 2, 3, 4, 8, 17}) {
    for (const int64_t numel : {0, 1, world_size - 1, world_size + 1, 31, 32, 33, 500, 2048, 5003}) {
      check({.world_size = world_size, .numel = numel, .seed = 1});
    }
  }
}

TEST_P(CompressedTest, ServesEveryVariant) {
  for (int variant = 0; variant < 32; ++variant) {
    if ((variant & 1) != 0 && GetParam().starts_with("all_reduce")) continue;  // has no lists
    check({.world_size = 3,
           .numel = 1001,
           .bits = (variant & 2) != 0 ? 8 : 4,
           .reduce_op = (variant & 4) != 0 ? ReduceOp::kSum : ReduceOp::kAverage,
           .has_residuals = (variant & 8) != 0,
           .is_list = (variant & 1) != 0,
           .is_in_place = (variant & 16) != 0,
           .seed = 2});
  }
}

TEST_P(CompressedTest, DoesNotDependOnWhoIsFirst) {
  for (uint64_t seed = 10; seed < 30; ++seed) {
    check({.world_size = static_cast<int32_t>(2 + seed % 4), .numel = 3001, .mailbox_bytes = 160, .seed = seed});
  }
}

TEST_P(CompressedTest, WritesNoOutputBeforeTheRanksHaveMet) {
  for (int32_t rank = 0; rank < 3; ++rank) {
    const Schedule schedule =
        find_algorithm(GetParam())
            ->plan(Reduction({.algorithm = GetParam(), .world_size = 3, .numel = 700}).spec(rank));
    EXPECT_EQ(schedule.algorithm, GetParam());
    ASSERT_FALSE(schedule.steps.empty());
    EXPECT_EQ(schedule.steps[0].kind, StepKind::kBarrier);
  }
}

// Each byte that is reduced crosses each link encoded, once per phase: the least that a direct exchange can do.
TEST_P(CompressedTest, SendsAnEighthOfTheBytes) {
  constexpr int64_t kNumel = 1 << 18;
  for (const int32_t world_size : {2, 4}) {
    Reduction reduction({.algorithm = GetParam(),
                         .world_size = world_size,
                         .numel = kNumel / (GetParam().starts_with("all_reduce") ? 1 : world_size),
                         .block = 256,
                         .mailbox_bytes = 256 << 10});
    const std::vector<Traffic> traffic = reduction.run();
    const int64_t phases = GetParam().starts_with("all_reduce") ? 2 : 1;
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (int32_t peer = 0; peer < world_size; ++peer) {
        const int64_t bytes = peer == rank ? 0 : phases * reduction.codec().capacity_bytes(kNumel / world_size);
        EXPECT_EQ(traffic[rank].sent_bytes[peer], bytes);
        EXPECT_LE(bytes, 0.127 * phases * 4 * kNumel / world_size);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Registry, CompressedTest,
                         testing::Values("all_reduce_compressed", "reduce_scatter_compressed"),
                         [](const auto& info) { return info.param; });

using Nodes = std::vector<std::vector<int32_t>>;

Nodes nodes_of(const std::vector<int32_t>& node_of_rank) {
  Nodes nodes(*std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1);
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    nodes[node_of_rank[rank]].push_back(static_cast<int32_t>(rank));
  }
  return nodes;
}

const std::vector<std::vector<int32_t>> kPlacements = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 1, 2, 2, 2, 1, 0},
};

class CompressedBetweenNodesTest : public testing::TestWithParam<std::string> {};

TEST_P(CompressedBetweenNodesTest, LosesNothingAndGivesAllRanksTheSameBits) {
  for (const std::vector<int32_t>& placement : kPlacements) {
    for (const int64_t numel : {0, 1, 33, 700, 3003}) {
      for (const uint64_t seed : {1, 2}) {
        Reduction reduction({.algorithm = GetParam(),
                             .world_size = static_cast<int32_t>(placement.size()),
                             .numel = numel,
                             .is_list = seed == 2 && GetParam().starts_with("reduce_scatter"),
                             .is_in_place = seed == 2,
                             .seed = seed,
                             .nodes = nodes_of(placement)});
        SCOPED_TRACE(reduction.describe());
        reduction.run();
        reduction.expect_conservation();
      }
    }
  }
}

TEST(CompressedSharesTest, NodesMayCompleteUnequalShares) {
  const std::vector<std::vector<int32_t>> shares{{512, 512, 0}, {0, 1023, 1}, {100, 0, 924}};
  for (const std::vector<int32_t>& placement :
       {std::vector<int32_t>{0, 1, 2}, {0, 0, 1, 2, 2, 2, 1, 0}, {0, 1, 2, 0, 1, 2}}) {
    for (const int64_t numel : {33, 700, 3003}) {
      for (const std::vector<int32_t>& each : shares) {
        Reduction reduction({.algorithm = "all_reduce_hierarchical",
                             .world_size = static_cast<int32_t>(placement.size()),
                             .numel = numel,
                             .bank_bytes = 1 << 16,
                             .seed = 3,
                             .nodes = nodes_of(placement),
                             .node_shares = each});
        SCOPED_TRACE(reduction.describe());
        reduction.run();
        reduction.expect_conservation();
      }
    }
  }
}

TEST_P(CompressedBetweenNodesTest, DoesNotDependOnWhoIsFirst) {
  for (const std::vector<int32_t>& placement : kPlacements) {
    Floats first;
    for (uint64_t order = 0; order < 4; ++order) {
      Shape shape{.algorithm = GetParam(),
                  .world_size = static_cast<int32_t>(placement.size()),
                  .numel = 3001,
                  .bits = 8,
                  .seed = 7,
                  .nodes = nodes_of(placement),
                  .window_bytes = 768};
      Reduction reduction(shape);
      reduction.run(order);
      const Floats result(reduction.output(0).begin(), reduction.output(0).end());
      if (order == 0) first = result;
      EXPECT_TRUE(result == first);
    }
  }
}

// 2 (m - 1) / m of the tensor for an all-reduce, (m - 1) / m for a reduce-scatter, encoded: the lower bound.
TEST_P(CompressedBetweenNodesTest, SendsAnEighthOfTheBytesBetweenNodes) {
  constexpr int64_t kNumel = 1 << 20;
  const Nodes nodes = nodes_of({0, 0, 1, 1});
  const bool is_all_reduce = GetParam().starts_with("all_reduce");
  Reduction reduction({.algorithm = GetParam(),
                       .world_size = 4,
                       .numel = is_all_reduce ? kNumel : kNumel / 4,
                       .block = 256,
                       .mailbox_bytes = 256 << 10,
                       .bank_bytes = 1 << 20,
                       .nodes = nodes,
                       .window_bytes = 256 << 10});
  const std::vector<Traffic> traffic = reduction.run();
  const auto between = bytes_between_nodes(traffic, nodes);
  const double exact = (is_all_reduce ? 2 : 1) * 0.5 * 4 * kNumel;
  EXPECT_LE(between[0][1], 0.1272 * exact);
  EXPECT_GE(between[0][1], 0.1269 * exact);
  EXPECT_EQ(between[0][1], between[1][0]);
}

INSTANTIATE_TEST_SUITE_P(Registry, CompressedBetweenNodesTest,
                         testing::Values("all_reduce_hierarchical", "reduce_scatter_hierarchical"),
                         [](const auto& info) { return info.param; });

TEST(CompressedSelectionTest, ACodecIsServedByAlgorithmsThatUseIt) {
  const auto codec = make_compressor("block_quant", {});
  CollectiveSpec spec{.op = OpKind::kAllReduce,
                      .world_size = 2,
                      .element_bytes = 4,
                      .bytes = 1 << 20,
                      .bank_bytes = 1 << 20,
                      .mailbox_bytes = 256 << 10,
                      .codec = codec.get()};
  EXPECT_EQ(select_algorithm(spec).name, "all_reduce_compressed");
  EXPECT_EQ(select_algorithm(spec, "all_reduce_staged").name, "all_reduce_compressed");
  spec.op = OpKind::kReduceScatter;
  EXPECT_EQ(select_algorithm(spec).name, "reduce_scatter_compressed");
  spec.codec = nullptr;
  EXPECT_EQ(select_algorithm(spec).name, "reduce_scatter_staged");
  spec.world_size = 4;
  spec.codec = codec.get();
  spec.nodes = {{0, 1}, {2, 3}};
  spec.window_bytes = 256 << 10;
  EXPECT_EQ(select_algorithm(spec).name, "reduce_scatter_hierarchical");
  spec.op = OpKind::kAllReduce;
  spec.bytes = 1000;
  EXPECT_EQ(select_algorithm(spec).name, "all_reduce_hierarchical");
  spec.nodes.clear();
  spec.codec = codec.get();
  spec.mailbox_bytes = 64;
  EXPECT_THROW(select_algorithm(spec), std::invalid_argument);
}

}  // namespace
}  // namespace zeropg
