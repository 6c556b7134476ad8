// The ranks of one sharded model, as process groups.
//
// Each copy of the model is cut over the ranks of a shard group. Where there are several copies (hybrid sharding), rank
// s of each shard group has slice s, and these ranks form a replica group.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace zeropg {

struct RankGroups {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // One copy of the model over all ranks.
  RankGroups(Group all) : everybody(std::move(all)), shards(everybody) {}  // NOLINT(google-explicit-constructor)
  // `replicas`: null where there is one copy.
  RankGroups(Group everybody, Group shards, Group replicas)
      : everybody(std::move(everybody)), shards(std::move(shards)), replicas(std::move(replicas)) {}

  Group everybody;
  Group shards;    // those that have one copy together
  Group replicas;  // those that have the same slice, the first copy's first
  // Over which ranks the other parts of tensors are (tensor parallelism), which are in other copies than this rank's:
  // one group for each dimension of their mesh. The first one has none: tensors that are whole.
  std::vector<std::vector<Group>> splits{{}};
  Group parts{};  // all that have some part of the model's tensors, this rank's included; null where tensors are whole
};

}  // namespace zeropg
