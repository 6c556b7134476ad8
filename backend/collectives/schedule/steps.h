// The words that planner functions are written in: regions by name, steps by verb, and the cutting of buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// A slot's chunk: with the slots of all ranks it must stay in the L2 cache, and every chunk costs a barrier. 128 KiB
// was the best of {32, 128, 512, 2048} KiB for 1 to 64 MiB on two ranks (Xeon with AVX-512, 2 MiB of L2 per core).
inline constexpr int64_t kChunkBytes = 128 << 10;
inline constexpr int64_t kCacheLineBytes = 64;

// How one chunk of a staging slot is cut into equal pieces, so that no two ranks write one cache line.
struct Pieces {
  int64_t bytes = 0;      // capacity of a piece; a multiple of `alignment`, 0 when the bank is too small
  int64_t alignment = 0;  // a cache line, or the element where a bank is so small that lines do not fit
};
Pieces cut_chunk(const CollectiveSpec& spec, int32_t piece_count);
bool can_cut_chunk(const CollectiveSpec& spec, int32_t piece_count);

struct Range {
  int64_t offset_bytes = 0;
  int64_t bytes = 0;
};
// Part `index` of `bytes` cut into parts of at most `part_bytes`.
Range part_of(int64_t bytes, int64_t part_bytes, int64_t index);
int64_t part_count(int64_t bytes, int64_t part_bytes);
// Part `index` of `bytes` cut into `count` parts as equal as `alignment` allows; the last ones may be empty.
Range equal_part_of(int64_t bytes, int32_t count, int64_t alignment, int32_t index);

// Chunks of a tensor, or of a block. All but the last are `bytes` long.
struct Chunks {
  int64_t bytes = 0;
  int64_t count = 0;
  int64_t last_bytes = 0;
};
Chunks chunks_of_size(int64_t bytes, int64_t chunk_bytes);
// Of nearly equal size: a tensor that is a little longer than one chunk is cut in the middle.
Chunks equal_chunks(int64_t bytes, int64_t largest_bytes, int64_t alignment);

Region input(int64_t offset_bytes);
Region output(int64_t offset_bytes);
Region staging(int32_t slot, int64_t first_chunk, int64_t offset_bytes);  // the bank is that of the chunk
// Block of a peer in a packed tensor of equal blocks or in a list.
Region input_block(const CollectiveSpec& spec, int32_t peer, int64_t offset_bytes);
Region output_block(const CollectiveSpec& spec, int32_t peer, int64_t offset_bytes);
// Of another rank of the node, in a direct schedule.
Region peer_input(int32_t peer, int64_t offset_bytes);
Region peer_output(int32_t peer, int64_t offset_bytes);
Region advance(Region region, int64_t offset_bytes);
Region with_stride(Region region, int64_t stride_bytes);  // of the first chunk -> of all

// Which part of a reduction over several levels a step is.
enum class ReduceScope : uint8_t {
  kComplete,     // of all ranks' inputs
  kOfRanks,      // of inputs; the results of other nodes are still to come
  kOfNodes,      // of such results, and complete
  kOfSomeNodes,  // of such results; those of other nodes are still to come
  // Likewise over the domains of a node, where partial results are of accumulator_dtype().
  kOfRanksOfDomain,
  kOfDomains,
};

// A stage of the pipeline of the last loop (Note [Loops]): where steps are added, and what their lag and chunks are. A
// schedule by itself stands for a stage of one chunk.
struct PipelineStage {
  PipelineStage(Schedule& schedule, int32_t lag = 0, int64_t chunks = 1)
      : schedule(schedule), lag(lag), chunks(chunks) {}

  Schedule& schedule;
  int32_t lag;
  int64_t chunks;
};

// Of a step, in all chunks but the last and in the last one.
struct StepBytes {
  StepBytes(int64_t bytes) : bytes(bytes), last_bytes(bytes) {}
  StepBytes(int64_t bytes, int64_t last_bytes) : bytes(bytes), last_bytes(last_bytes) {}
  StepBytes(const Chunks& chunks) : bytes(chunks.bytes), last_bytes(chunks.last_bytes) {}

  int64_t bytes;
  int64_t last_bytes;
};

// Each adds one step; those without bytes are left out, as is the last chunk of a step that has none there.
void add_copy(PipelineStage stage, Region destination, Region source, StepBytes bytes);
void add_reduce(PipelineStage stage, Region destination, std::span<const Region> sources, StepBytes bytes,
                ReduceScope scope = ReduceScope::kComplete);
// The same result to several places.
void add_reduce_for_all(Schedule& schedule, Region destination, std::span<const Region> echoes,
                        std::span<const Region> sources, int64_t bytes);
// Copies that nobody will read soon are `is_streaming`; all of an operation are, or none.
void add_long_copy(PipelineStage stage, Region destination, Region source, StepBytes bytes, bool is_streaming);
void add_barrier(PipelineStage stage);
void add_send(PipelineStage stage, int32_t peer, Region source, StepBytes bytes);
void add_receive(PipelineStage stage, int32_t peer, Region destination, StepBytes bytes);
// Any step that has bytes.
void add_step(PipelineStage stage, Step step, StepBytes bytes);
// Those that follow belong to another loop.
void begin_loop(Schedule& schedule);

// An empty schedule with its name and its count of banks. Without chunks it holds the one barrier that all ranks of a
// collective meet in whatever its size.
Schedule make_schedule(std::string_view algorithm, int64_t chunks);
// Likewise of a direct algorithm, which begins with that barrier.
Schedule make_direct_schedule(std::string_view algorithm);
// The schedule of a group of one rank: a reduction of one source (premul_sum still scales it) or a copy; no barrier.
Schedule plan_alone(std::string_view algorithm, const CollectiveSpec& spec);

// A collective that passes each chunk of a block through staging once: `stage` adds the steps before the chunk's
// barrier, `take` those after it. One barrier and one bank per chunk of `chunk_bytes`.
using ChunkSteps = std::function<void(PipelineStage stage, const Chunks& chunks)>;
Schedule plan_staged_once(std::string_view algorithm, const CollectiveSpec& spec, int64_t chunk_bytes,
                          const ChunkSteps& stage, const ChunkSteps& take);

// What all ranks of a one-node group contribute to a chunk, in rank order, where each staged it at the start of its
// slot: the own contribution is read from the input.
std::vector<Region> contributions(const CollectiveSpec& spec, int64_t chunk_bytes);

// The piece of the slot of `owner` that is meant for `peer`, where a slot has one piece for each rank but its owner.
int32_t piece_for_peer(int32_t owner, int32_t peer);

}  // namespace zeropg
