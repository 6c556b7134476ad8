// All algorithms by name.
#pragma once

#include <span>
#include <string_view>

#include "backend/collectives/schedule/algorithms.h"

namespace zeropg {

struct Algorithm {
  std::string_view name;
  OpKind op = OpKind::kBarrier;
  Schedule (*plan)(const CollectiveSpec&) = nullptr;
  // Whether `plan` can serve this specification; the same answer on every rank.
  bool (*supports)(const CollectiveSpec&) = nullptr;
  Cost (*cost)(const CollectiveSpec&) = nullptr;
  bool is_direct = false;  // for tensors in shared memory: see direct.h
  // Adds in another order than the others of its operation: what is measured anew in each run must not decide for it,
  // or the bits of sums would change from run to run.
  bool has_own_order = false;
  // Divides its work by CollectiveSpec::node_shares. Without a codec these say who adds, not in which order.
  bool uses_shares = false;
  // Of a direct algorithm that each node may run or not: the staged one with the same messages, which others run then.
  std::string_view beside{};
};

std::span<const Algorithm> algorithms();
const Algorithm* find_algorithm(std::string_view name);  // nullptr: no such algorithm

}  // namespace zeropg
