// What the tests of collectives share: a collective of all ranks with its tensors and the slow truth about its outputs.
//
// Tensors hold random bytes. Reductions sum int32 that wrap around, so that the truth is exact and a contribution that
// is missing or counted twice shows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/collectives/select/registry.h"
#include "backend/simulator/schedule_simulator.h"

namespace zeropg {

using Bytes = std::vector<std::byte>;
using Nodes = std::vector<std::vector<int32_t>>;

struct CollectiveShape {
  int32_t world_size = 1;
  int64_t numel = 0;  // of a block; the most for one peer in all_to_all
  int32_t root = 0;
  int64_t bank_bytes = 4096;
  int64_t mailbox_bytes = 64;
  bool is_list = false;
  bool is_in_place = false;
  uint64_t seed = 0;
  Nodes nodes{};  // empty: one node
  int64_t window_bytes = 1024;
  Nodes domains{};  // of one node; empty: none
  std::vector<int32_t> node_shares{};
  Nodes racks{};
};

inline Nodes nodes_of_sizes(const std::vector<int32_t>& sizes) {
  Nodes nodes;
  int32_t rank = 0;
  for (const int32_t size : sizes) {
    nodes.emplace_back();
    for (int32_t i = 0; i < size; ++i) nodes.back().push_back(rank++);
  }
  return nodes;
}

// Rank r on node r % count: no two neighbours share one.
inline Nodes nodes_in_turn(int32_t world_size, int32_t count) {
  Nodes nodes(count);
  for (int32_t rank = 0; rank < world_size; ++rank) nodes[rank % count].push_back(rank);
  return nodes;
}

// Ways to place `world_size` ranks on one node or more, those first that differ most.
inline std::vector<Nodes> placements(int32_t world_size) {
  if (world_size == 1) return {{}};
  std::vector<Nodes> all{{}, nodes_in_turn(world_size, std::min(world_size, 3))};
  if (world_size > 2) all.push_back(nodes_of_sizes({1, world_size - 1}));
  if (world_size <= 8) all.push_back(nodes_of_sizes(std::vector<int32_t>(world_size, 1)));
  if (world_size > 3) {
    all.push_back(nodes_of_sizes({world_size / 2, world_size - world_size / 2}));
    all.push_back(nodes_in_turn(world_size, world_size / 2));
  }
  return all;
}

// The steps that a schedule runs, one after the other, as a schedule without loops.
inline Schedule unrolled(const Schedule& schedule) {
  Schedule result = schedule;
  result.steps.clear();
  result.loop_ends.clear();
  result.sources.clear();
  result.echoes.clear();
  for (ScheduleCursor cursor(schedule); !cursor.is_done(); cursor.next()) {
    Step step = cursor.step();
    for (int32_t i = 0; i < step.source_count; ++i) result.sources.push_back(cursor.source(i));
    for (int32_t i = 0; i < step.echo_count; ++i) result.echoes.push_back(cursor.echo(i));
    step.first_source = static_cast<int32_t>(result.sources.size()) - step.source_count;
    step.first_echo = static_cast<int32_t>(result.echoes.size()) - step.echo_count;
    step.chunks = 1;
    step.lag = 0;
    result.steps.push_back(step);
  }
  return result;
}

inline bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter;
}

inline bool has_root(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kGather || op == OpKind::kScatter || op == OpKind::kBroadcast;
}

inline SimulatorOptions simulator_options(const CollectiveShape& shape) {
  return {.world_size = shape.world_size,
          .bank_bytes = shape.bank_bytes,
          .mailbox_bytes = shape.mailbox_bytes,
          .seed = shape.seed,
          .nodes = shape.nodes,
          .window_bytes = shape.window_bytes};
}

// Whether the ranks of a node share one output, that of their first rank.
inline bool makes_node_outputs(const Algorithm& algorithm) { return !algorithm.beside.empty(); }

// The placements, among all for this world, that the algorithm serves.
inline std::vector<Nodes> placements_of(const Algorithm& algorithm, int32_t world_size) {
  std::vector<Nodes> served;
  for (Nodes& nodes : placements(world_size)) {
    const CollectiveSpec spec{.op = algorithm.op,
                              .world_size = world_size,
                              .bank_bytes = 1 << 20,
                              .mailbox_bytes = 1 << 20,
                              .has_node_output = makes_node_outputs(algorithm),
                              .nodes = nodes,
                              .window_bytes = 1 << 20};
    if (algorithm.supports(spec)) served.push_back(std::move(nodes));
  }
  return served;
}

// Direct algorithms take no lists of inputs.
inline bool takes_lists(const Algorithm& algorithm) {
  return algorithm.supports({.op = algorithm.op,
                             .world_size = 4,
                             .bank_bytes = 1 << 20,
                             .mailbox_bytes = 1 << 20,
                             .input_is_list = true,
                             .window_bytes = 1 << 20}) ||
         !algorithm.is_direct;
}

class SimulatedCollective {
 public:
  SimulatedCollective(const Algorithm& algorithm, const CollectiveShape& shape) : shape_(shape), random_(shape.seed) {
    make_specs(algorithm);
    for (const CollectiveSpec& spec : specs_) schedules_.push_back(algorithm.plan(spec));
    for (int32_t rank = 0; rank < shape.world_size; ++rank) make_tensors(rank);
    for (int32_t rank = 0; rank < shape.world_size; ++rank) expected_.push_back(expected_blocks(rank));
  }

  const std::vector<CollectiveSpec>& specs() const { return specs_; }
  const std::vector<Schedule>& schedules() const { return schedules_; }
  // By rank, as `unrolled`.
  std::vector<Schedule> unrolled_schedules() const {
    std::vector<Schedule> all;
    for (const Schedule& schedule : schedules_) all.push_back(unrolled(schedule));
    return all;
  }
  const std::vector<SimulatedTensors>& tensors() const { return tensors_; }

  // Borrows the tensors: this object has to live until the simulation is over.
  SimulatedOperation operation() const {
    return {.schedules = schedules_, .tensors = tensors_, .dtype = is_reduction(op()) ? DType::kInt32 : DType::kUInt8};
  }

  void expect_outputs() const {
    for (int32_t rank = 0; rank < shape_.world_size; ++rank) {
      for (int32_t block = 0; block < output_block_count(); ++block) {
        const auto view = output_block(rank, block);
        const Bytes actual(view.begin(), view.end());
        ASSERT_TRUE(actual == expected_[rank][block]) << describe() << ", rank " << rank << ", block " << block;
      }
      if (!shape_.is_in_place && !(op() == OpKind::kBroadcast && rank == shape_.root)) {
        ASSERT_TRUE(memory_[rank].inputs == memory_[rank].inputs_before) << describe() << ", input of rank " << rank;
      }
    }
  }

  std::string describe() const {
    return schedules_[0].algorithm + " world_size " + std::to_string(shape_.world_size) + " numel " +
           std::to_string(shape_.numel) + " root " + std::to_string(shape_.root) + " bank " +
           std::to_string(shape_.bank_bytes) + (shape_.is_list ? " list" : "") +
           (shape_.is_in_place ? " in place" : "") + " seed " + std::to_string(shape_.seed) + " window " +
           std::to_string(shape_.window_bytes) + " nodes" + describe(shape_.nodes) + " domains" +
           describe(shape_.domains) + " shares and racks" + describe({shape_.node_shares}) + describe(shape_.racks);
  }

 private:
  static std::string describe(const Nodes& nodes) {
    std::string text;
    for (const auto& node : nodes) {
      text += " [";
      for (const int32_t rank : node) text += ' ' + std::to_string(rank);
      text += " ]";
    }
    return text.empty() ? " 1" : text;
  }

  struct Memory {
    std::vector<Bytes> inputs;
    std::vector<Bytes> inputs_before;
    std::vector<Bytes> outputs;
    std::vector<Bytes> outputs_before;
  };

  OpKind op() const { return specs_[0].op; }
  bool has_many_inputs() const {
    return op() == OpKind::kReduceScatter || op() == OpKind::kScatter || op() == OpKind::kAllToAll;
  }
  bool has_many_outputs() const {
    return op() == OpKind::kAllGather || op() == OpKind::kGather || op() == OpKind::kAllToAll;
  }
  int32_t input_block_count() const { return op() == OpKind::kBarrier ? 0 : has_many_inputs() ? shape_.world_size : 1; }
  int32_t output_block_count() const {
    return op() == OpKind::kBarrier ? 0 : has_many_outputs() ? shape_.world_size : 1;
  }
  int64_t input_bytes(int32_t rank, int32_t block) const {
    return op() == OpKind::kAllToAll ? specs_[rank].send_bytes[block] : specs_[rank].bytes;
  }
  int64_t output_bytes(int32_t rank, int32_t block) const {
    return op() == OpKind::kAllToAll ? specs_[rank].receive_bytes[block] : specs_[rank].bytes;
  }

  void make_specs(const Algorithm& algorithm) {
    CollectiveSpec spec;
    spec.op = algorithm.op;
    spec.world_size = shape_.world_size;
    spec.root = shape_.root;
    spec.element_bytes = is_reduction(algorithm.op) ? 4 : 1;
    spec.bytes = algorithm.op == OpKind::kBarrier ? 0 : shape_.numel * spec.element_bytes;
    spec.bank_bytes = shape_.bank_bytes;
    spec.mailbox_bytes = shape_.mailbox_bytes;
    spec.input_is_list = shape_.is_list;
    spec.output_is_list = shape_.is_list;
    spec.has_node_output = makes_node_outputs(algorithm);
    spec.nodes = shape_.nodes;
    spec.domains = shape_.domains;
    spec.node_shares = shape_.node_shares;
    spec.racks = shape_.racks;
    spec.window_bytes = shape_.window_bytes;
    specs_.assign(shape_.world_size, spec);
    for (int32_t rank = 0; rank < shape_.world_size; ++rank) specs_[rank].rank = rank;
    if (algorithm.op != OpKind::kAllToAll) return;
    for (CollectiveSpec& each : specs_) {
      each.bytes = 0;
      each.send_bytes.resize(shape_.world_size);
      each.receive_bytes.resize(shape_.world_size);
    }
    for (int32_t from = 0; from < shape_.world_size; ++from) {
      for (int32_t to = 0; to < shape_.world_size; ++to) {
        // A third of the pairs exchange nothing, a third the most.
        const int64_t bytes =
            std::vector<int64_t>{0, shape_.numel, int64_t(random_() % (shape_.numel + 1))}[random_() % 3];
        specs_[from].send_bytes[to] = specs_[to].receive_bytes[from] = bytes;
      }
    }
  }

  std::vector<Bytes> random_tensors(int32_t block_count, bool is_list, const auto& bytes_of) {
    std::vector<Bytes> tensors;
    for (int32_t block = 0; block < block_count; ++block) {
      if (is_list || block == 0) tensors.emplace_back();
      for (int64_t i = 0; i < bytes_of(block); ++i) tensors.back().push_back(std::byte(random_() >> 20));
    }
    return tensors;
  }

  void make_tensors(int32_t rank) {
    Memory memory;
    const bool has_input_list = shape_.is_list && has_many_inputs();
    const bool has_output_list = shape_.is_list && has_many_outputs();
    memory.inputs =
        random_tensors(input_block_count(), has_input_list, [&](int32_t b) { return input_bytes(rank, b); });
    memory.outputs =
        random_tensors(output_block_count(), has_output_list, [&](int32_t b) { return output_bytes(rank, b); });
    memory.inputs_before = memory.inputs;
    memory.outputs_before = memory.outputs;
    memory_.push_back(std::move(memory));
    SimulatedTensors tensors;
    for (Bytes& tensor : memory_.back().inputs) tensors.inputs.emplace_back(tensor);
    for (Bytes& tensor : memory_.back().outputs) tensors.outputs.emplace_back(tensor);
    alias(rank, memory_.back(), tensors);
    if (op() == OpKind::kAllToAll) {
      int64_t offset = 0;
      for (int32_t peer = 0; peer < shape_.world_size; ++peer) {
        tensors.blocks_for_peers.push_back(offset);
        offset += input_bytes(rank, peer);
      }
    }
    tensors_.push_back(std::move(tensors));
  }

  // In place: the smaller of input and output lies inside the other, at the rank's own block.
  void alias(int32_t rank, Memory& memory, SimulatedTensors& tensors) {
    const bool is_shared_broadcast = op() == OpKind::kBroadcast && rank == shape_.root;
    if (op() == OpKind::kAllToAll || op() == OpKind::kBarrier || !(shape_.is_in_place || is_shared_broadcast)) return;
    if (has_many_outputs()) {
      const int64_t offset = shape_.is_list ? 0 : rank * specs_[rank].bytes;
      tensors.inputs[0] = tensors.outputs[shape_.is_list ? rank : 0].subspan(offset, specs_[rank].bytes);
      memory.inputs_before[0].assign(tensors.inputs[0].begin(), tensors.inputs[0].end());
    } else {
      const int64_t offset = has_many_inputs() && !shape_.is_list ? rank * specs_[rank].bytes : 0;
      const int32_t index = has_many_inputs() && shape_.is_list ? rank : 0;
      tensors.outputs[0] = tensors.inputs[index].subspan(offset, specs_[rank].bytes);
      memory.outputs_before[0].assign(tensors.outputs[0].begin(), tensors.outputs[0].end());
    }
  }

  Bytes cut(const std::vector<Bytes>& tensors, bool is_list, int32_t block, const auto& bytes_of) const {
    if (is_list) return tensors[block];
    int64_t offset = 0;
    for (int32_t b = 0; b < block; ++b) offset += bytes_of(b);
    return Bytes(tensors[0].begin() + offset, tensors[0].begin() + offset + bytes_of(block));
  }
  Bytes input_before(int32_t rank, int32_t block) const {
    return cut(memory_[rank].inputs_before, shape_.is_list && has_many_inputs(), block,
               [&](int32_t b) { return input_bytes(rank, b); });
  }
  std::span<std::byte> output_block(int32_t rank, int32_t block) const {
    const bool is_of_node = specs_[rank].has_node_output;
    const auto& outputs = tensors_[is_of_node ? first_of_node(specs_[rank], rank) : rank].outputs;
    if (shape_.is_list && has_many_outputs()) return outputs[block];
    int64_t offset = 0;
    for (int32_t b = 0; b < block; ++b) offset += output_bytes(rank, b);
    return outputs[0].subspan(offset, output_bytes(rank, block));
  }

  Bytes sum_of_inputs(int32_t block) const {
    Bytes sum = input_before(0, block);
    for (int32_t rank = 1; rank < shape_.world_size; ++rank) {
      const Bytes other = input_before(rank, block);
      for (size_t i = 0; i < sum.size(); i += 4) {
        uint32_t a = 0;
        uint32_t b = 0;
        std::memcpy(&a, sum.data() + i, 4);
        std::memcpy(&b, other.data() + i, 4);
        a += b;
        std::memcpy(sum.data() + i, &a, 4);
      }
    }
    return sum;
  }

  std::vector<Bytes> expected_blocks(int32_t rank) const {
    const bool is_root = rank == shape_.root;
    std::vector<Bytes> blocks;
    for (int32_t block = 0; block < output_block_count(); ++block) {
      const auto before = [&] {
        return cut(memory_[rank].outputs_before, shape_.is_list && has_many_outputs(), block,
                   [&](int32_t b) { return output_bytes(rank, b); });
      };
      switch (op()) {
        case OpKind::kAllReduce:
          blocks.push_back(sum_of_inputs(0));
          break;
        case OpKind::kReduce:
          blocks.push_back(is_root ? sum_of_inputs(0) : before());
          break;
        case OpKind::kReduceScatter:
          blocks.push_back(sum_of_inputs(rank));
          break;
        case OpKind::kAllGather:
          blocks.push_back(input_before(block, 0));
          break;
        case OpKind::kGather:
          blocks.push_back(is_root ? input_before(block, 0) : before());
          break;
        case OpKind::kScatter:
          blocks.push_back(input_before(shape_.root, rank));
          break;
        case OpKind::kBroadcast:
          blocks.push_back(input_before(shape_.root, 0));
          break;
        case OpKind::kAllToAll:
          blocks.push_back(input_before(block, rank));
          break;
        case OpKind::kBarrier:
          break;
      }
    }
    return blocks;
  }

  CollectiveShape shape_;
  std::mt19937_64 random_;
  std::vector<CollectiveSpec> specs_;
  std::vector<Schedule> schedules_;
  std::vector<Memory> memory_;
  std::vector<SimulatedTensors> tensors_;
  std::vector<std::vector<Bytes>> expected_;  // [rank][block]
};

}  // namespace zeropg
