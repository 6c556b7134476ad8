#include "sharding/offload/pipelined_step.h"

#include <ATen/ops/rand.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "sharding/offload/registry.h"
#include "sharding/optim/registry.h"

namespace zeropg {
namespace {

std::shared_ptr<Offload> make_offload(const std::string& device, int64_t buffer_bytes) {
  TierOptions options;
  options.file.directory = std::filesystem::current_path().string();
  return std::make_shared<Offload>(make_tier(device, options), buffer_bytes);
}

Hyperparameters typical_of(const Optimizer& optimizer) {
  Hyperparameters result;
  for (const auto& [name, typical] : optimizer.traits().hyperparameters) {
    result.emplace(name, typical);
  }
  return result;
}

struct Case {
  std::string device;
  std::string optimizer;
  at::ScalarType dtype;
  bool offloads_master;
};

class PipelinedStep : public ::testing::TestWithParam<Case> {
 protected:
  // A flat parameter twice: in memory, and in the tier.
  struct Pair {
    FlatView plain;
    TieredFlat tiered;
  };

  Hyperparameters hyperparameters() const { return typical_of(*optimizer_); }

  std::vector<StateSlot> slots() const { return optimizer_->state_slots(hyperparameters()); }

  Pair make(const std::shared_ptr<Offload>& offload, int64_t numel) const {
    const at::Tensor master = at::rand({numel}, at::dtype(GetParam().dtype));
    Pair pair;
    pair.plain.master = master.clone();
    pair.plain.gradient = at::rand_like(master);
    pair.tiered.gradient = pair.plain.gradient;
    if (GetParam().offloads_master) {
      pair.tiered.tiered_master = std::make_shared<TieredVector>(offload, "masters", numel, GetParam().dtype);
      pair.tiered.tiered_master->write(0, master);
      pair.plain.parameter_out = master.to(at::kBFloat16);
      pair.tiered.parameter_out = pair.plain.parameter_out.clone();
    } else {
      pair.tiered.master = master.clone();
    }
    for (const StateSlot& slot : slots()) {
      pair.plain.state.push_back(
          at::zeros({entries_of(slot.format, numel)}, entry_dtype(slot.format, GetParam().dtype)));
      pair.tiered.state.push_back(
          std::make_shared<TieredVector>(offload, "state", numel, GetParam().dtype, slot.format));
    }
    return pair;
  }

  std::unique_ptr<Optimizer> optimizer_ = make_optimizer(GetParam().optimizer);
};

TEST_P(PipelinedStep, has_the_bits_of_a_step_in_memory) {
  const auto offload = make_offload(GetParam().device, Offload::kMinBufferBytes);  // chunks of one page
  std::vector<Pair> pairs;
  for (const int64_t numel : {1, 1023, 1024, 1025, 4096, 9000, 70001}) {
    pairs.push_back(make(offload, numel));
  }
  for (int64_t step = 1; step <= 3; ++step) {
    std::vector<TieredFlat> flats;
    for (Pair& pair : pairs) {
      const int64_t numel = pair.plain.master.numel();
      // Two stretches with their own rates, a gap between them from the second step on.
      const int64_t middle = numel / 3 / kStateBlock * kStateBlock;
      const int64_t gap = step == 1 ? 0 : std::min<int64_t>(numel - middle, 4992);
      pair.plain.gradient.copy_(at::rand_like(pair.plain.gradient));
      for (const auto& [start, stop, factor] :
           {std::make_tuple(int64_t{0}, middle, 1.0), std::make_tuple(middle + gap, numel, 0.5)}) {
        if (start == stop) continue;
        const StepArguments arguments{.hyperparameters = hyperparameters(), .step = step, .gradient_factor = factor};
        pair.tiered.runs.push_back({start, stop, optimizer_.get(), arguments, pair.tiered.state.size()});
        optimizer_->step(cut(pair.plain, slots(), start, stop), arguments);
      }
      flats.push_back(pair.tiered);
      pair.tiered.runs.clear();
    }
    pipelined_step(*offload, flats);
  }
  for (const Pair& pair : pairs) {
    const int64_t numel = pair.plain.master.numel();
    const at::Tensor master =
        GetParam().offloads_master ? pair.tiered.tiered_master->read(0, numel) : pair.tiered.master;
    EXPECT_TRUE(master.equal(pair.plain.master)) << numel;
    if (GetParam().offloads_master) {
      EXPECT_TRUE(pair.tiered.parameter_out.equal(pair.plain.parameter_out)) << numel;
    }
    for (size_t slot = 0; slot < pair.plain.state.size(); ++slot) {
      TieredVector& state = *pair.tiered.state[slot];
      EXPECT_TRUE(state.read(0, state.numel()).equal(pair.plain.state[slot])) << numel << ", slot " << slot;
    }
  }
}

TEST_P(PipelinedStep, reads_and_writes_any_range_between_steps) {
  const auto offload = make_offload(GetParam().device, Offload::kMinBufferBytes);
  constexpr int64_t kNumel = 10007;
  TieredVector vector(offload, "a test", kNumel, GetParam().dtype);
  at::Tensor expected = at::zeros({kNumel}, at::dtype(GetParam().dtype));
  EXPECT_TRUE(vector.read(0, kNumel).equal(expected));
  for (int64_t i = 0; i < 60; ++i) {
    const int64_t start = i * 7919 % kNumel;
    const at::Tensor values = at::rand({std::min<int64_t>(kNumel - start, i * 101 % 4000)}, expected.options());
    vector.write(start, values);
    expected.narrow(0, start, values.numel()).copy_(values);
    const int64_t from = i * 4099 % kNumel;
    const int64_t to = std::min(kNumel, from + i * 53);
    EXPECT_TRUE(vector.read(from, to).equal(expected.slice(0, from, to))) << i;
  }
  int64_t next = 5;
  vector.read(5, kNumel - 5, [&](int64_t start, const at::Tensor& piece) {
    EXPECT_EQ(start, next);
    EXPECT_TRUE(piece.equal(expected.narrow(0, start, piece.numel())));
    next += piece.numel();
  });
  EXPECT_EQ(next, kNumel - 5);
  EXPECT_THROW(vector.read(5, kNumel + 1), c10::ValueError);
  EXPECT_THROW(vector.write(kNumel, at::rand({1})), c10::ValueError);
  vector.clear();
  EXPECT_TRUE(vector.read(0, kNumel).equal(at::zeros_like(expected)));
}

bool takes_float64(std::string_view name) {
  const auto optimizer = make_optimizer(name);
  const std::vector<StateSlot> slots = optimizer->state_slots(typical_of(*optimizer));
  return std::all_of(slots.begin(), slots.end(), [](const StateSlot& s) { return s.format == StateFormat::kMaster; });
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const std::string_view name : optimizer_names()) {
    cases.push_back({"nvme", std::string(name), at::kFloat, true});
    if (takes_float64(name)) cases.push_back({"nvme", std::string(name), at::kDouble, false});
    cases.push_back({"cpu", std::string(name), at::kFloat, true});
    cases.push_back({"cpu", std::string(name), at::kFloat, false});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, PipelinedStep, ::testing::ValuesIn(all_cases()));

TEST(Offload, staging_does_not_grow_with_what_is_stepped) {
  const auto offload = make_offload("nvme", 1 << 20);
  EXPECT_EQ(offload->staging_bytes(), 0);
  const auto optimizer = make_optimizer("adamw");
  TieredFlat flat;
  flat.master = at::rand({1 << 20});
  flat.gradient = at::rand({1 << 20});
  for (int slot = 0; slot < 2; ++slot) {
    flat.state.push_back(std::make_shared<TieredVector>(offload, "state", 1 << 20, at::kFloat));
  }
  flat.runs.push_back({0, 1 << 20, optimizer.get(), {.hyperparameters = typical_of(*optimizer)}, 2});
  pipelined_step(*offload, {flat});
  EXPECT_LE(offload->staging_bytes(), 1 << 20);
  EXPECT_EQ(offload->tier().reserved_bytes(), uint64_t{8} << 20);
  flat.state.clear();
  EXPECT_EQ(offload->tier().reserved_bytes(), 0U);
}

TEST(Offload, in_place_tiers_need_no_staging) {
  const auto offload = make_offload("cpu", 1 << 20);
  TieredVector vector(offload, "a test", 1000, at::kFloat);
  vector.write(0, at::rand({1000}));
  EXPECT_EQ(offload->staging_bytes(), 0);
  EXPECT_TRUE(vector.in_place().equal(vector.read(0, 1000)));
}

TEST(Offload, too_few_buffers_are_refused) {
  EXPECT_THROW(make_offload("cpu", Offload::kMinBufferBytes - 1), c10::ValueError);
}

TEST(Offload, an_unknown_device_is_refused_with_the_list) {
  try {
    make_offload("tape", 1 << 20);
    FAIL();
  } catch (const c10::ValueError& error) {
    for (const TierTraits& tier : tiers()) {
      EXPECT_NE(std::string(error.what()).find(tier.device), std::string::npos) << tier.device;
    }
  }
}

}  // namespace
}  // namespace zeropg
