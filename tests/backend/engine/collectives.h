// Collectives of ranks that are objects of this process, planned as a program's calls are.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "backend/group/planner.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {

inline std::unique_ptr<Planner> make_planner(GroupContext& group, std::map<std::string, std::string> algorithms = {}) {
  auto planner = std::make_unique<Planner>(PlannerOptions{.rank = group.rank(),
                                                          .world_size = group.world_size(),
                                                          .bank_bytes = kBankBytes,
                                                          .mailbox_bytes = kMailboxBytes,
                                                          .window_bytes = small_group().window_bytes,
                                                          .cma = false,
                                                          .algorithms = std::move(algorithms)});
  if (!group.topology().is_one_node()) planner->set_nodes(group.topology().nodes);
  planner->set_pool(*group.pool());
  return planner;
}

// Whole numbers, so that sums are exact: `value`, value + 1, ... and again after 8 of them.
inline void fill(const at::Tensor& tensor, int value) {
  auto* data = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) data[i] = static_cast<float>(value + i % 8);
}

inline at::Tensor filled(int64_t numel, int value) {
  const at::Tensor tensor = at::empty({numel}, at::kFloat);
  fill(tensor, value);
  return tensor;
}

// What fill() leaves, times `times`.
inline void expect_filled(const at::Tensor& tensor, int value, int times = 1) {
  const auto* data = tensor.const_data_ptr<float>();
  int64_t wrong = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) wrong += data[i] != static_cast<float>(value + i % 8 * times);
  EXPECT_EQ(wrong, 0) << "of " << tensor.numel();
}

inline CollectiveArgs reduction(OpKind op, const at::Tensor& input, const at::Tensor& output, int32_t root = 0) {
  CollectiveArgs args;
  args.op = op;
  args.inputs = {input};
  args.outputs = {output};
  args.dtype = at::kFloat;
  args.bytes = static_cast<int64_t>(output.nbytes());
  args.root = root;
  return args;
}

inline CollectiveArgs all_reduce(const at::Tensor& tensor) { return reduction(OpKind::kAllReduce, tensor, tensor); }

inline CollectiveArgs barrier() { return {}; }

// After an all_reduce of filled(numel, rank) on every rank.
inline void expect_sum_over_ranks(const at::Tensor& tensor, int32_t world_size) {
  expect_filled(tensor, world_size * (world_size - 1) / 2, world_size);
}

}  // namespace zeropg
