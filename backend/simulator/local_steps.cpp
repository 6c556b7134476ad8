#include "backend/simulator/local_steps.h"

#include <algorithm>
#include <string>

#include "backend/collectives/schedule/encodings.h"

namespace zeropg {

LocalSteps::LocalSteps(const SimulatorOptions& options, const RankPrograms& programs, SimulatedMemory& memory,
                       std::vector<RankAccount>& accounts)
    : options_(options), programs_(programs), memory_(memory), accounts_(accounts), selections_(options.world_size) {}

void LocalSteps::spend(int32_t rank) {
  const SimulatedOperation& operation = programs_.operation_of(rank);
  const int64_t bytes = memory_bytes_of(programs_.step_of(rank), operation.dtype, operation.codec);
  accounts_[rank].traffic.memory_bytes += bytes;
  accounts_[rank].clock.work(bytes, options_.model);
}

void LocalSteps::copy(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  const bool is_in_place =
      memory_.locate(rank, step.source, step.bytes, false) == memory_.locate(rank, step.destination, step.bytes, true);
  if (is_in_place) return;
  const std::byte* source = memory_.resolve(rank, step.source, step.bytes, false);
  std::byte* destination = memory_.resolve(rank, step.destination, step.bytes, true);
  check_apart(rank, destination, source, step.bytes);
  std::copy_n(source, step.bytes, destination);
  accounts_[rank].traffic.copied_bytes += step.bytes;
  spend(rank);
}

void LocalSteps::reduce_sources(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  const Schedule& schedule = programs_.schedule_of(rank);
  if (step.source_count < 1 || step.first_source < 0 ||
      step.first_source + size_t(step.source_count) > schedule.sources.size()) {
    programs_.fail(rank, "its sources are not in the schedule's list of " + std::to_string(schedule.sources.size()));
  }
  if (step.echo_count < 0 || step.first_echo < 0 ||
      step.first_echo + size_t(step.echo_count) > schedule.echoes.size()) {
    programs_.fail(rank, "its echoes are not in the schedule's list of " + std::to_string(schedule.echoes.size()));
  }
  const SimulatedOperation& operation = programs_.operation_of(rank);
  const Widening times = widening(operation.dtype, step.form);
  const int64_t source_bytes = times.of_sources * step.bytes;
  const int64_t result_bytes = times.of_destination * step.bytes;
  spend(rank);
  std::vector<const void*> sources;
  std::byte* destination = memory_.resolve(rank, step.destination, result_bytes, true);
  for (int32_t i = 0; i < step.source_count; ++i) {
    const std::byte* source = memory_.resolve(rank, programs_.cursor_of(rank).source(i), source_bytes, false);
    const bool is_same = source == destination && source_bytes == result_bytes;
    if (!is_same) check_apart(rank, destination, source, std::max(source_bytes, result_bytes));
    sources.push_back(source);
  }
  const int64_t size = element_bytes(operation.dtype);
  if (step.bytes % size != 0) {
    programs_.fail(rank, std::string("it cuts through an element of ") + dtype_name(operation.dtype));
  }
  const auto check_aligned = [&](const void* data, int64_t times_size) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(data) % (times_size * size) == 0;
    if (!is_aligned) programs_.fail(rank, "an element that is not aligned");
  };
  check_aligned(destination, times.of_destination);
  for (const void* source : sources) check_aligned(source, times.of_sources);
  const ReduceOp op = step.has_partial_sources ? op_over_partial_results(operation.reduce_op) : operation.reduce_op;
  reduce(destination, sources.data(), static_cast<int32_t>(sources.size()), step.bytes / size, operation.dtype, op,
         operation.factor, divides_average(step, operation.dtype, operation.codec != nullptr), step.form);
  accounts_[rank].traffic.reduced_bytes += static_cast<int64_t>(sources.size()) * source_bytes;
  for (int32_t i = 0; i < step.echo_count; ++i) {
    std::copy_n(destination, result_bytes,
                memory_.resolve(rank, programs_.cursor_of(rank).echo(i), result_bytes, true));
  }
}

const Compressor& LocalSteps::codec_of(int32_t rank) const {
  const Compressor* codec = programs_.operation_of(rank).codec;
  if (codec == nullptr) programs_.fail(rank, "the operation has no codec");
  return zeropg::codec_of(*codec, programs_.step_of(rank).hop);
}

std::span<float> LocalSteps::residual_of(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  if (step.residual.space != Space::kResidual) return {};
  return memory_.resolve_as<float>(rank, step.residual, step.bytes, true);
}

void LocalSteps::select(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  const Compressor& codec = codec_of(rank);
  spend(rank);
  const SelectionRange range{memory_.resolve_as<const float>(rank, step.source, step.bytes, false), residual_of(rank)};
  selections_[rank] = codec.select({&range, 1});
}

// An encoding that is sized lies behind its size: Note [Sized messages] in schedule.h.
void LocalSteps::encode(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  const Compressor& codec = codec_of(rank);
  if (step.bytes % kFloatBytes != 0) programs_.fail(rank, "it cuts through a float");
  const int64_t count = step.bytes / kFloatBytes;
  const int64_t size_bytes = codec.has_fixed_size() ? 0 : kSizeBytes;
  accounts_[rank].traffic.encoded_bytes += step.bytes;
  spend(rank);
  const auto values = memory_.resolve_as<const float>(rank, step.source, step.bytes, false);
  const auto room =
      memory_.resolve_as<std::byte>(rank, step.destination, size_bytes + codec.capacity_bytes(count), true);
  const auto encoded = room.subspan(static_cast<size_t>(size_bytes));
  const bool is_selected = codec.selects() && step.hop == kContributionHop && has_selection(rank);
  const int64_t first = is_selected ? step.source.offset_bytes / kFloatBytes : 0;
  const int64_t length = is_selected
                             ? codec.encode_selected(selections_[rank].at(first), values, residual_of(rank), encoded)
                             : codec.encode(values, residual_of(rank), encoded);
  if (size_bytes > 0) put_size(room, length);
}

// Schedules that select do so once, over the whole input.
bool LocalSteps::has_selection(int32_t rank) const {
  const std::vector<Step>& steps = programs_.schedule_of(rank).steps;
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.kind == StepKind::kSelect; });
}

void LocalSteps::decode(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  const Compressor& codec = codec_of(rank);
  const int64_t count = step.bytes / kFloatBytes;
  spend(rank);
  const int64_t size_bytes = codec.has_fixed_size() ? 0 : kSizeBytes;
  auto encoded =
      memory_.resolve_as<const std::byte>(rank, step.source, size_bytes + codec.capacity_bytes(count), false);
  if (size_bytes > 0) encoded = encoded.subspan(kSizeBytes, static_cast<size_t>(get_size(encoded)));
  const auto values = memory_.resolve_as<float>(rank, step.destination, step.bytes, true);
  if (step.kind == StepKind::kDecodeAdd) {
    codec.decode_add(encoded, values);
  } else {
    codec.decode(encoded, values);
  }
}

void LocalSteps::check_apart(int32_t rank, const std::byte* a, const std::byte* b, int64_t bytes) const {
  const auto distance = a < b ? b - a : a - b;
  if (distance < bytes) programs_.fail(rank, "a source overlaps the destination at an offset");
}

}  // namespace zeropg
