// The phases inside a node of collectives over several nodes, and inside a domain of those over several domains: slices
// (chunk_layout.h) meet in the staging slots of its ranks, the parts of one group (slot_layout.h) at a time.
//
// A rank's own slices of its own slot never hold its input, which it reads where it is: they are free for results while
// the other slices hold the inputs of a later chunk (Note [Pipelined staging] in all_reduce_staged.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/schedule/slot_layout.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

// How the ranks of a node, or of a domain, share chunks and slots. All must outlive it.
struct NodeLayout {
  const Placement& placement;
  const ChunkLayout& chunk;
  const SlotLayout& slot;
};

// One before every reduction, at `reduction`, and one before every copying out, `distance` iterations later; one for
// both where they fall together.
void add_barriers(PipelineStage reduction, int32_t distance);

// Copies what the other ranks of the node will reduce into the own slot.
void stage_inputs(PipelineStage stage, const std::vector<Extent>& inputs, const NodeLayout& layout, int32_t group = 0);

// Reduces the own slice of every part over the ranks of the node into `partial`.
using PartialOfPlace = std::function<Region(int32_t part, int64_t place)>;
void reduce_in_node(PipelineStage stage, const std::vector<Extent>& inputs, const NodeLayout& layout,
                    const PartialOfPlace& partial, ReduceScope scope = ReduceScope::kOfRanks, int32_t group = 0);

// Copies the slices of all ranks of the node, complete in their slots, to the own output (`is_streaming`: schedule.h).
void copy_out(PipelineStage stage, const std::vector<Extent>& outputs, const NodeLayout& layout,
              bool is_streaming = false, int32_t group = 0);

}  // namespace zeropg
