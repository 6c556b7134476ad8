#include "backend/collectives/schedule/steps.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace zeropg {

Pieces cut_chunk(const CollectiveSpec& spec, int32_t piece_count) {
  const int64_t available = std::min(spec.bank_bytes, kChunkBytes) / piece_count;
  const int64_t alignment = available >= kCacheLineBytes ? kCacheLineBytes : spec.element_bytes;
  const int64_t bytes = available / alignment * alignment;
  if (bytes == 0) {
    throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": a staging bank of " +
                                std::to_string(spec.bank_bytes) + " bytes cannot hold one element of " +
                                std::to_string(spec.element_bytes) + " bytes for each of " +
                                std::to_string(piece_count) + " ranks; enlarge the staging banks");
  }
  return {bytes, alignment};
}

bool can_cut_chunk(const CollectiveSpec& spec, int32_t piece_count) {
  return piece_count <= 0 || spec.bank_bytes >= int64_t{piece_count} * spec.element_bytes;
}

Range part_of(int64_t bytes, int64_t part_bytes, int64_t index) {
  const int64_t begin = std::min(bytes, index * part_bytes);
  return {begin, std::min(part_bytes, bytes - begin)};
}

int64_t part_count(int64_t bytes, int64_t part_bytes) { return (bytes + part_bytes - 1) / part_bytes; }

Range equal_part_of(int64_t bytes, int32_t count, int64_t alignment, int32_t index) {
  const int64_t part_bytes = part_count(part_count(bytes, count), alignment) * alignment;
  return part_of(bytes, part_bytes, index);
}

Chunks chunks_of_size(int64_t bytes, int64_t chunk_bytes) {
  const int64_t count = part_count(bytes, chunk_bytes);
  return {.bytes = chunk_bytes, .count = count, .last_bytes = count == 0 ? 0 : bytes - (count - 1) * chunk_bytes};
}

Chunks equal_chunks(int64_t bytes, int64_t largest_bytes, int64_t alignment) {
  if (bytes == 0) return {.bytes = largest_bytes};
  const int64_t equal_bytes = part_count(bytes, part_count(bytes, largest_bytes));
  return chunks_of_size(bytes, part_count(equal_bytes, alignment) * alignment);
}

Region input(int64_t offset_bytes) { return {.space = Space::kInput, .offset_bytes = offset_bytes}; }

Region output(int64_t offset_bytes) { return {.space = Space::kOutput, .offset_bytes = offset_bytes}; }

Region staging(int32_t slot, int64_t first_chunk, int64_t offset_bytes) {
  return {.space = Space::kStaging,
          .bank = static_cast<uint8_t>(first_chunk % 2),
          .index = slot,
          .offset_bytes = offset_bytes};
}

Region input_block(const CollectiveSpec& spec, int32_t peer, int64_t offset_bytes) {
  if (spec.input_is_list) return {.space = Space::kInput, .index = peer, .offset_bytes = offset_bytes};
  return input(peer * spec.bytes + offset_bytes);
}

Region output_block(const CollectiveSpec& spec, int32_t peer, int64_t offset_bytes) {
  if (spec.output_is_list) return {.space = Space::kOutput, .index = peer, .offset_bytes = offset_bytes};
  return output(peer * spec.bytes + offset_bytes);
}

Region peer_input(int32_t peer, int64_t offset_bytes) {
  return {.space = Space::kPeerInput, .index = peer, .offset_bytes = offset_bytes};
}

Region peer_output(int32_t peer, int64_t offset_bytes) {
  return {.space = Space::kPeerOutput, .index = peer, .offset_bytes = offset_bytes};
}

Region advance(Region region, int64_t offset_bytes) {
  region.offset_bytes += offset_bytes;
  return region;
}

Region with_stride(Region region, int64_t stride_bytes) {
  region.stride_bytes = stride_bytes;
  return region;
}

void add_step(PipelineStage stage, Step step, StepBytes bytes) {
  step.lag = stage.lag;
  step.chunks = bytes.last_bytes == 0 ? stage.chunks - 1 : stage.chunks;
  step.last_bytes = bytes.last_bytes == 0 ? bytes.bytes : bytes.last_bytes;
  step.bytes = step.chunks == 1 ? step.last_bytes : bytes.bytes;
  if (step.chunks > 0 && step.bytes > 0) stage.schedule.steps.push_back(step);
}

void begin_loop(Schedule& schedule) { schedule.loop_ends.push_back(schedule.steps.size()); }

void add_copy(PipelineStage stage, Region destination, Region source, StepBytes bytes) {
  add_step(stage, {.kind = StepKind::kCopy, .destination = destination, .source = source}, bytes);
}

void add_reduce(PipelineStage stage, Region destination, std::span<const Region> sources, StepBytes bytes,
                ReduceScope scope) {
  Schedule& schedule = stage.schedule;
  const size_t steps = schedule.steps.size();
  const bool is_of_ranks = scope == ReduceScope::kOfRanks || scope == ReduceScope::kOfRanksOfDomain;
  const bool is_complete = !is_of_ranks && scope != ReduceScope::kOfSomeNodes;
  add_step(stage,
           {.kind = StepKind::kReduce,
            .is_final = is_complete,
            .has_partial_sources = !is_of_ranks && scope != ReduceScope::kComplete,
            .form = scope == ReduceScope::kOfRanksOfDomain ? ReduceForm::kToAccumulators
                    : scope == ReduceScope::kOfDomains     ? ReduceForm::kFromAccumulators
                                                           : ReduceForm::kWhole,
            .destination = destination,
            .first_source = static_cast<int32_t>(schedule.sources.size()),
            .source_count = static_cast<int32_t>(sources.size())},
           bytes);
  if (schedule.steps.size() > steps) schedule.sources.insert(schedule.sources.end(), sources.begin(), sources.end());
}

void add_reduce_for_all(Schedule& schedule, Region destination, std::span<const Region> echoes,
                        std::span<const Region> sources, int64_t bytes) {
  if (bytes == 0) return;
  add_reduce(schedule, destination, sources, bytes);
  Step& step = schedule.steps.back();
  step.first_echo = static_cast<int32_t>(schedule.echoes.size());
  step.echo_count = static_cast<int32_t>(echoes.size());
  schedule.echoes.insert(schedule.echoes.end(), echoes.begin(), echoes.end());
}

void add_long_copy(PipelineStage stage, Region destination, Region source, StepBytes bytes, bool is_streaming) {
  add_step(stage, {.kind = StepKind::kCopy, .is_streaming = is_streaming, .destination = destination, .source = source},
           bytes);
}

void add_barrier(PipelineStage stage) {
  if (stage.chunks < 1) return;
  stage.schedule.steps.push_back({.kind = StepKind::kBarrier, .chunks = stage.chunks, .lag = stage.lag});
}

void add_send(PipelineStage stage, int32_t peer, Region source, StepBytes bytes) {
  add_step(stage, {.kind = StepKind::kSend, .peer = peer, .source = source}, bytes);
}

void add_receive(PipelineStage stage, int32_t peer, Region destination, StepBytes bytes) {
  add_step(stage, {.kind = StepKind::kReceive, .peer = peer, .destination = destination}, bytes);
}

Schedule make_schedule(std::string_view algorithm, int64_t chunks) {
  Schedule schedule;
  schedule.algorithm = algorithm;
  schedule.banks_used = static_cast<int32_t>(chunks);
  if (chunks == 0) add_barrier(schedule);
  return schedule;
}

Schedule make_direct_schedule(std::string_view algorithm) {
  Schedule schedule = make_schedule(algorithm, 0);
  schedule.is_direct = true;
  return schedule;
}

Schedule plan_alone(std::string_view algorithm, const CollectiveSpec& spec) {
  Schedule schedule;
  schedule.algorithm = algorithm;
  const OpTraits& op = traits_of(spec.op);
  if (op.is_reducing) {
    const Region source = input(0);
    add_reduce(schedule, output(0), {&source, 1}, spec.bytes);
  } else if (op.has_blocks()) {
    add_copy(schedule, output(0), input(0), op.has_counts ? spec.send_bytes[0] : spec.bytes);
  }
  return schedule;
}

Schedule plan_staged_once(std::string_view algorithm, const CollectiveSpec& spec, int64_t chunk_bytes,
                          const ChunkSteps& stage, const ChunkSteps& take) {
  const Chunks chunks = chunks_of_size(spec.bytes, chunk_bytes);
  Schedule schedule = make_schedule(algorithm, chunks.count);
  if (chunks.count == 0) return schedule;
  const PipelineStage only(schedule, 0, chunks.count);
  stage(only, chunks);
  add_barrier(only);
  take(only, chunks);
  return schedule;
}

std::vector<Region> contributions(const CollectiveSpec& spec, int64_t chunk_bytes) {
  std::vector<Region> sources;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) {
    sources.push_back(rank == spec.rank ? with_stride(input(0), chunk_bytes) : staging(rank, 0, 0));
  }
  return sources;
}

int32_t piece_for_peer(int32_t owner, int32_t peer) { return peer < owner ? peer : peer - 1; }

}  // namespace zeropg
