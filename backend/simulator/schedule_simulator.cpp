#include "backend/simulator/schedule_simulator.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>

#include "backend/collectives/schedule/encodings.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule_cursor.h"

namespace zeropg {

namespace {

constexpr std::byte kPoison{0xcb};  // memory that no step has written yet

const char* kind_name(StepKind kind) {
  constexpr const char* kNames[] = {"copy",   "reduce", "barrier",    "send",  "receive",
                                    "encode", "decode", "decode_add", "select"};
  return kNames[static_cast<size_t>(kind)];
}

std::string to_string(const Region& region) {
  constexpr const char* kNames[] = {"input", "output", "scratch", "staging", "peer_input", "peer_output", "residual"};
  std::ostringstream text;
  text << kNames[static_cast<size_t>(region.space)] << '[' << region.index << ']';
  if (region.space == Space::kStaging) text << " bank " << int{region.bank};
  text << " + " << region.offset_bytes;
  return text.str();
}

// An access to a slot's bank since the last barrier.
struct Access {
  int32_t rank;
  int64_t begin;
  int64_t end;
  bool is_write;
  size_t operation;  // of that rank, and its step
  SchedulePosition position;
};

// The same of the ranks' tensors, by address.
struct TensorAccess {
  int32_t rank;
  const std::byte* begin;
  const std::byte* end;
  bool is_write;
  size_t operation;
  SchedulePosition position;
};

struct Bank {
  std::vector<std::byte> bytes;
  std::vector<Access> accesses;
};

struct Mailbox {
  struct Piece {
    int64_t size;
    std::vector<std::byte> bytes;
    double arrival_us;  // of its first byte between nodes, of its last one within a node
  };
  std::deque<Piece> pieces;
  int64_t used_bytes = 0;
};

struct RankState {
  size_t operation = 0;
  std::optional<ScheduleCursor> cursor{};  // of the operation's schedule; none: all are done
  int64_t moved_bytes = 0;                 // of the current send or receive
  bool is_at_barrier = false;
  int32_t banks_used = 0;         // by the operations that are done
  double message_arrival_us = 0;  // of the current send
  RankClock clock;
  std::vector<std::byte> scratch;
  std::vector<std::byte> received;
  Selection selection;
};

// Invariant: every access since the last barrier is in the log of its bank; a barrier that opens empties the logs, as
// it orders all that was done before it before all that follows.
class Simulation {
 public:
  Simulation(const SimulatorOptions& options, const std::vector<SimulatedOperation>& operations)
      : options_(options), operations_(operations), random_(options.seed), ranks_(options.world_size) {
    place_ranks();
    check_operations();
    banks_.resize(2 * size_t(options.world_size));
    for (Bank& bank : banks_) bank.bytes.assign(options.bank_bytes, kPoison);
    tensor_accesses_.resize(nodes_.size());
    traffic_.resize(options.world_size);
    for (int32_t rank = 0; rank < options.world_size; ++rank) {
      traffic_[rank].sent_bytes.assign(options.world_size, 0);
      traffic_[rank].staged_read_bytes.assign(options.world_size, 0);
      enter_operation(rank);
    }
  }

  std::vector<Traffic> run() {
    take_steps_at_random();
    const auto is_done = [&](const RankState& state) { return state.operation == operations_.size(); };
    if (!std::all_of(ranks_.begin(), ranks_.end(), is_done)) throw SimulationError(deadlock_report());
    for (const auto& [pair, mailbox] : mailboxes_) {
      if (mailbox.used_bytes == 0) continue;
      throw SimulationError(std::to_string(mailbox.used_bytes) + " bytes from rank " + std::to_string(pair.first) +
                            " to rank " + std::to_string(pair.second) + " were sent but never received");
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) traffic_[rank].time_us = ranks_[rank].clock.now_us;
    return std::move(traffic_);
  }

 private:
  void take_steps_at_random() {
    while (true) {
      const int32_t rank = draw_rank();
      if (rank < 0) break;
      take_step(rank);
    }
  }

  void place_ranks() {
    const CollectiveSpec spec{.world_size = options_.world_size, .nodes = options_.nodes};
    const Placement placement(spec);
    for (int32_t node = 0; node < placement.node_count(); ++node) {
      nodes_.emplace_back();
      for (int32_t i = 0; i < placement.node_size(node); ++i) nodes_.back().push_back(placement.rank_at(node, i));
    }
    for (int32_t rank = 0; rank < options_.world_size; ++rank) node_of_.push_back(placement.node_of(rank));
  }

  bool is_near(int32_t rank, int32_t peer) const { return node_of_[rank] == node_of_[peer]; }
  int64_t capacity(int32_t from, int32_t to) const {
    return is_near(from, to) ? options_.mailbox_bytes : options_.window_bytes;
  }
  SimulatedLink link(int32_t from, int32_t to) const {
    if (options_.link) return options_.link(from, to);
    if (is_near(from, to)) return {};
    const auto ranks = static_cast<double>(nodes_[node_of_[from]].size());
    const auto peers = static_cast<double>(nodes_[node_of_[to]].size());
    return {.latency_us = options_.model.hop_us,
            .sender = {.bytes_per_us = options_.model.network_bytes_per_us / ranks},
            .receiver = {.bytes_per_us = options_.model.network_bytes_per_us / peers}};
  }

  void check_operations() const {
    for (const SimulatedOperation& operation : operations_) {
      const auto world_size = static_cast<size_t>(options_.world_size);
      if (operation.schedules.size() != world_size || operation.tensors.size() != world_size) {
        throw std::invalid_argument("simulate: an operation has " + std::to_string(operation.schedules.size()) +
                                    " schedules and " + std::to_string(operation.tensors.size()) +
                                    " sets of tensors, expected one per rank of " + std::to_string(world_size));
      }
      for (int32_t rank = 0; rank < options_.world_size; ++rank) {
        const Schedule& schedule = operation.schedules[rank];
        const Schedule& first = operation.schedules[nodes_[node_of_[rank]][0]];
        if (schedule.banks_used == first.banks_used) continue;
        throw SimulationError(schedule.algorithm + ": ranks of a node use " + std::to_string(schedule.banks_used) +
                              " and " + std::to_string(first.banks_used) +
                              " banks, so that their next operations would not agree on one");
      }
    }
  }

  const SimulatedOperation& operation_of(int32_t rank) const { return operations_[ranks_[rank].operation]; }
  const Schedule& schedule_of(int32_t rank) const { return operation_of(rank).schedules[rank]; }
  const Step& step_of(int32_t rank) const { return ranks_[rank].cursor->step(); }

  SchedulePosition position_of(int32_t rank) const {
    return ranks_[rank].cursor ? ranks_[rank].cursor->position() : SchedulePosition();
  }

  std::string describe(int32_t rank) const { return describe(rank, ranks_[rank].operation, position_of(rank)); }

  std::string describe(int32_t rank, size_t operation, SchedulePosition position) const {
    std::ostringstream text;
    text << "rank " << rank << ", operation " << operation;
    if (operation == operations_.size()) return text.str() + ": done";
    const Schedule& schedule = operations_[operation].schedules[rank];
    const Step step = step_of_chunk(schedule.steps[position.step], position.chunk);
    text << " " << schedule.algorithm << ", step " << position.step << " of " << schedule.steps.size();
    if (step.chunks > 1) text << " in chunk " << position.chunk << " of " << step.chunks;
    text << " (" << kind_name(step.kind);
    if (step.kind == StepKind::kSend) text << ' ' << step.bytes << " bytes to rank " << step.peer;
    if (step.kind == StepKind::kReceive) {
      text << ' ' << step.bytes << " bytes from rank " << step.peer;
    }
    if (step.peer < 0 && step.kind != StepKind::kBarrier) {
      text << ' ' << step.bytes << " bytes to " << to_string(step.destination);
    }
    text << ')';
    return text.str();
  }

  std::string deadlock_report() const {
    std::string text = "deadlock: no rank can go on";
    for (int32_t rank = 0; rank < options_.world_size; ++rank) {
      text += "\n  " + describe(rank);
      if (ranks_[rank].moved_bytes > 0) text += ", " + std::to_string(ranks_[rank].moved_bytes) + " bytes moved";
    }
    return text;
  }

  // Schedules without steps are passed at once; the bank parity moves on with each schedule.
  void enter_operation(int32_t rank) {
    RankState& state = ranks_[rank];
    while (state.operation < operations_.size()) {
      state.scratch.assign(schedule_of(rank).scratch_bytes, kPoison);
      state.cursor.emplace(schedule_of(rank));
      if (!state.cursor->is_done()) return;
      leave_operation(rank);
    }
    state.cursor.reset();
  }

  void leave_operation(int32_t rank) {
    ranks_[rank].banks_used += schedule_of(rank).banks_used;
    ++ranks_[rank].operation;
  }

  void finish_step(int32_t rank) {
    RankState& state = ranks_[rank];
    state.moved_bytes = 0;
    state.cursor->next();
    if (!state.cursor->is_done()) return;
    leave_operation(rank);
    enter_operation(rank);
  }

  bool can_step(int32_t rank) const {
    const RankState& state = ranks_[rank];
    if (state.operation == operations_.size() || state.is_at_barrier) return false;
    const Step& step = step_of(rank);
    if (step.kind == StepKind::kSend) {
      const auto mailbox = mailboxes_.find({rank, step.peer});
      return mailbox == mailboxes_.end() || mailbox->second.used_bytes < capacity(rank, step.peer);
    }
    if (step.kind == StepKind::kReceive) {
      const auto mailbox = mailboxes_.find({step.peer, rank});
      return mailbox != mailboxes_.end() && !mailbox->second.pieces.empty();
    }
    return true;
  }

  int32_t draw(int64_t count) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(count)); }

  // One rank is favoured for a while and one starved, so that skews grow as far as the schedule allows.
  int32_t draw_rank() {
    if (draw(16) == 0) {
      favoured_ = draw(options_.world_size);
      starved_ = draw(options_.world_size);
    }
    if (draw(4) != 0 && can_step(favoured_)) return favoured_;
    const int32_t first = draw(options_.world_size);
    int32_t found = -1;
    for (int32_t i = 0; i < options_.world_size; ++i) {
      const int32_t rank = (first + i) % options_.world_size;
      if (!can_step(rank)) continue;
      if (rank != starved_) return rank;
      found = rank;
    }
    return found;
  }

  void take_step(int32_t rank) {
    switch (step_of(rank).kind) {
      case StepKind::kCopy:
        copy(rank);
        return finish_step(rank);
      case StepKind::kReduce:
        reduce_sources(rank);
        return finish_step(rank);
      case StepKind::kBarrier:
        return arrive(rank);
      case StepKind::kSend:
        return send(rank);
      case StepKind::kReceive:
        return receive(rank);
      case StepKind::kEncode:
        encode(rank);
        return finish_step(rank);
      case StepKind::kDecode:
      case StepKind::kDecodeAdd:
        decode(rank);
        return finish_step(rank);
      case StepKind::kSelect:
        select(rank);
        return finish_step(rank);
    }
  }

  void spend(int32_t rank) {
    const SimulatedOperation& operation = operation_of(rank);
    const int64_t bytes = memory_bytes_of(step_of(rank), operation.dtype, operation.codec);
    traffic_[rank].memory_bytes += bytes;
    ranks_[rank].clock.work(bytes, options_.model);
  }

  void copy(int32_t rank) {
    const Step& step = step_of(rank);
    if (locate(rank, step.source, step.bytes, false) == locate(rank, step.destination, step.bytes, true)) return;
    const std::byte* source = resolve(rank, step.source, step.bytes, false);
    std::byte* destination = resolve(rank, step.destination, step.bytes, true);
    check_apart(rank, destination, source, step.bytes);
    std::copy_n(source, step.bytes, destination);
    traffic_[rank].copied_bytes += step.bytes;
    spend(rank);
  }

  void reduce_sources(int32_t rank) {
    const Step& step = step_of(rank);
    const Schedule& schedule = schedule_of(rank);
    if (step.source_count < 1 || step.first_source < 0 ||
        step.first_source + size_t(step.source_count) > schedule.sources.size()) {
      fail(rank, "its sources are not in the schedule's list of " + std::to_string(schedule.sources.size()));
    }
    if (step.echo_count < 0 || step.first_echo < 0 ||
        step.first_echo + size_t(step.echo_count) > schedule.echoes.size()) {
      fail(rank, "its echoes are not in the schedule's list of " + std::to_string(schedule.echoes.size()));
    }
    const SimulatedOperation& operation = operation_of(rank);
    const Widening times = widening(operation.dtype, step.form);
    const int64_t source_bytes = times.of_sources * step.bytes;
    const int64_t result_bytes = times.of_destination * step.bytes;
    spend(rank);
    std::vector<const void*> sources;
    std::byte* destination = resolve(rank, step.destination, result_bytes, true);
    for (int32_t i = 0; i < step.source_count; ++i) {
      const std::byte* source = resolve(rank, ranks_[rank].cursor->source(i), source_bytes, false);
      const bool is_same = source == destination && source_bytes == result_bytes;
      if (!is_same) check_apart(rank, destination, source, std::max(source_bytes, result_bytes));
      sources.push_back(source);
    }
    const int64_t size = element_bytes(operation.dtype);
    if (step.bytes % size != 0) {
      fail(rank, std::string("it cuts through an element of ") + dtype_name(operation.dtype));
    }
    const auto check_aligned = [&](const void* data, int64_t times_size) {
      if (reinterpret_cast<uintptr_t>(data) % (times_size * size) != 0) fail(rank, "an element that is not aligned");
    };
    check_aligned(destination, times.of_destination);
    for (const void* source : sources) check_aligned(source, times.of_sources);
    const ReduceOp op = step.has_partial_sources ? op_over_partial_results(operation.reduce_op) : operation.reduce_op;
    reduce(destination, sources.data(), static_cast<int32_t>(sources.size()), step.bytes / size, operation.dtype, op,
           operation.factor, step.is_final, step.form);
    traffic_[rank].reduced_bytes += static_cast<int64_t>(sources.size()) * source_bytes;
    for (int32_t i = 0; i < step.echo_count; ++i) {
      std::copy_n(destination, result_bytes, resolve(rank, ranks_[rank].cursor->echo(i), result_bytes, true));
    }
  }

  const Compressor& codec_of(int32_t rank) const {
    const Compressor* codec = operation_of(rank).codec;
    if (codec == nullptr) fail(rank, "the operation has no codec");
    return zeropg::codec_of(*codec, step_of(rank).hop);
  }

  template <class T>
  std::span<T> resolve_as(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
    return {reinterpret_cast<T*>(resolve(rank, region, bytes, is_write)), static_cast<size_t>(bytes) / sizeof(T)};
  }

  std::span<float> residual_of(int32_t rank) {
    const Step& step = step_of(rank);
    if (step.residual.space != Space::kResidual) return {};
    return resolve_as<float>(rank, step.residual, step.bytes, true);
  }

  void select(int32_t rank) {
    const Step& step = step_of(rank);
    const Compressor& codec = codec_of(rank);
    spend(rank);
    const SelectionRange range{resolve_as<const float>(rank, step.source, step.bytes, false), residual_of(rank)};
    ranks_[rank].selection = codec.select({&range, 1});
  }

  // An encoding that is sized lies behind its size: Note [Sized messages] in schedule.h.
  void encode(int32_t rank) {
    const Step& step = step_of(rank);
    const Compressor& codec = codec_of(rank);
    if (step.bytes % kFloatBytes != 0) fail(rank, "it cuts through a float");
    const int64_t count = step.bytes / kFloatBytes;
    const int64_t size_bytes = codec.has_fixed_size() ? 0 : kSizeBytes;
    traffic_[rank].encoded_bytes += step.bytes;
    spend(rank);
    const auto values = resolve_as<const float>(rank, step.source, step.bytes, false);
    const auto room = resolve_as<std::byte>(rank, step.destination, size_bytes + codec.capacity_bytes(count), true);
    const auto encoded = room.subspan(static_cast<size_t>(size_bytes));
    const bool is_selected = codec.selects() && step.hop == kContributionHop && has_selection(rank);
    const int64_t first = is_selected ? first_selected(rank) : 0;
    const int64_t length =
        is_selected ? codec.encode_selected(ranks_[rank].selection.at(first), values, residual_of(rank), encoded)
                    : codec.encode(values, residual_of(rank), encoded);
    if (size_bytes > 0) put_size(room, length);
  }

  // Schedules that select do so once, over the whole input.
  bool has_selection(int32_t rank) const {
    const std::vector<Step>& steps = schedule_of(rank).steps;
    return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.kind == StepKind::kSelect; });
  }
  int64_t first_selected(int32_t rank) const { return step_of(rank).source.offset_bytes / kFloatBytes; }

  void decode(int32_t rank) {
    const Step& step = step_of(rank);
    const Compressor& codec = codec_of(rank);
    const int64_t count = step.bytes / kFloatBytes;
    spend(rank);
    const int64_t size_bytes = codec.has_fixed_size() ? 0 : kSizeBytes;
    auto encoded = resolve_as<const std::byte>(rank, step.source, size_bytes + codec.capacity_bytes(count), false);
    if (size_bytes > 0) encoded = encoded.subspan(kSizeBytes, static_cast<size_t>(get_size(encoded)));
    const auto values = resolve_as<float>(rank, step.destination, step.bytes, true);
    if (step.kind == StepKind::kDecodeAdd) {
      codec.decode_add(encoded, values);
    } else {
      codec.decode(encoded, values);
    }
  }

  void arrive(int32_t rank) {
    ranks_[rank].is_at_barrier = true;
    ++traffic_[rank].barriers;
    const std::vector<int32_t>& node = nodes_[node_of_[rank]];
    double latest_us = 0;
    for (const int32_t each : node) {
      if (!ranks_[each].is_at_barrier) return;
      latest_us = std::max(latest_us, ranks_[each].clock.now_us);
    }
    tensor_accesses_[node_of_[rank]].clear();
    for (const int32_t each : node) {
      for (int bank = 0; bank < 2; ++bank) banks_[2 * each + bank].accesses.clear();
      ranks_[each].clock.now_us = latest_us + options_.model.barrier_us;
      ranks_[each].is_at_barrier = false;
      finish_step(each);
    }
  }

  // As much as there is room for, or a part of it.
  void send(int32_t rank) {
    const Step& step = step_of(rank);
    RankState& state = ranks_[rank];
    check_peer(rank);
    const int64_t length = sent_length(rank);
    if (state.moved_bytes == 0) {
      traffic_[rank].sent_bytes[step.peer] += length;
      state.message_arrival_us = start_message(rank, step.peer, length);
    }
    Mailbox& mailbox = mailboxes_[{rank, step.peer}];
    const int64_t room = std::min(length - state.moved_bytes, capacity(rank, step.peer) - mailbox.used_bytes);
    const int64_t bytes = room == 0 || draw(2) == 0 ? room : 1 + draw(room);
    mailbox.pieces.push_back({.size = bytes, .bytes = {}, .arrival_us = state.message_arrival_us});
    const std::byte* source = resolve(rank, step.source, length, false) + state.moved_bytes;
    mailbox.pieces.back().bytes.assign(source, source + bytes);
    mailbox.used_bytes += bytes;
    state.moved_bytes += bytes;
    if (state.moved_bytes == length) finish_step(rank);
  }

  // Of a message, or of as much of it as is known yet.
  int64_t sent_length(int32_t rank) {
    const Step& step = step_of(rank);
    if (!step.is_sized) return step.bytes;
    return kSizeBytes + get_size(resolve_as<const std::byte>(rank, step.source, step.bytes, false));
  }

  int64_t received_length(int32_t rank) const {
    const Step& step = step_of(rank);
    const RankState& state = ranks_[rank];
    if (!step.is_sized) return step.bytes;
    if (state.moved_bytes < kSizeBytes) return kSizeBytes;
    const int64_t length = kSizeBytes + get_size(state.received);
    if (length > step.bytes) fail(rank, "a message of " + std::to_string(length) + " bytes for that room");
    return length;
  }

  // When it begins to arrive; within a node, where the sender copies it, when it has arrived.
  double start_message(int32_t rank, int32_t peer, int64_t bytes) {
    RankClock& clock = ranks_[rank].clock;
    return is_near(rank, peer) ? clock.send_near(link(rank, peer), bytes)
                               : clock.send_far(link(rank, peer), bytes, options_.model);
  }

  void take_time_to_receive(int32_t rank, int32_t peer, double arrival_us, int64_t bytes) {
    RankClock& clock = ranks_[rank].clock;
    if (is_near(rank, peer)) {
      clock.receive_near(arrival_us);
    } else {
      clock.receive_far(link(peer, rank), arrival_us, bytes);
    }
  }

  void receive(int32_t rank) {
    const Step& step = step_of(rank);
    RankState& state = ranks_[rank];
    check_peer(rank);
    Mailbox& mailbox = mailboxes_[{step.peer, rank}];
    Mailbox::Piece& piece = mailbox.pieces.front();
    const int64_t bytes = std::min(received_length(rank) - state.moved_bytes, piece.size);
    state.received.resize(static_cast<size_t>(state.moved_bytes + bytes));
    std::copy_n(piece.bytes.begin(), bytes, state.received.begin() + state.moved_bytes);
    piece.bytes.erase(piece.bytes.begin(), piece.bytes.begin() + bytes);
    take_time_to_receive(rank, step.peer, piece.arrival_us, bytes);
    piece.size -= bytes;
    if (piece.size == 0) mailbox.pieces.pop_front();
    mailbox.used_bytes -= bytes;
    state.moved_bytes += bytes;
    const int64_t length = received_length(rank);
    if (state.moved_bytes < length) return;
    if (!is_near(rank, step.peer)) state.clock.take_far(options_.model);
    std::copy_n(state.received.begin(), length, resolve(rank, step.destination, step.bytes, true));
    finish_step(rank);
  }

  void check_peer(int32_t rank) const {
    const Step& step = step_of(rank);
    if (step.peer < 0 || step.peer >= options_.world_size || step.peer == rank) fail(rank, "there is no such peer");
    // Between nodes, and where counts are not announced, there is still the header, which says just that.
    const bool has_header = !is_near(rank, step.peer) || options_.world_size > kMostAnnouncedBlocks;
    if (step.bytes == 0 && !has_header) fail(rank, "a message without bytes");
  }

  void check_apart(int32_t rank, const std::byte* a, const std::byte* b, int64_t bytes) const {
    const auto distance = a < b ? b - a : a - b;
    if (distance < bytes) fail(rank, "a source overlaps the destination at an offset");
  }

  [[noreturn]] void fail(int32_t rank, const std::string& what) const {
    throw SimulationError(describe(rank) + ": " + what);
  }

  // As locate, after checking that no other rank is at it.
  std::byte* resolve(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
    std::byte* data = locate(rank, region, bytes, is_write);
    const bool is_tensor = region.space == Space::kInput || region.space == Space::kOutput ||
                           region.space == Space::kPeerInput || region.space == Space::kPeerOutput;
    if (region.space == Space::kStaging) log_access(rank, region, bytes, is_write);
    if (is_tensor && schedule_of(rank).is_direct) {
      log_tensor_access(rank, region, {data, size_t(bytes)}, is_write);
    }
    return data;
  }

  // The memory of a region, after checking that it lies inside its buffer.
  std::byte* locate(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
    const SimulatedTensors& tensors = operation_of(rank).tensors[rank];
    std::span<std::byte> buffer;
    const auto list = region.space == Space::kInput    ? std::span(tensors.inputs)
                      : region.space == Space::kOutput ? std::span(tensors.outputs)
                                                       : std::span(tensors.residuals);
    switch (region.space) {
      case Space::kInput:
        if (is_write) fail(rank, "it writes to an input");
        [[fallthrough]];
      case Space::kOutput:
      case Space::kResidual:
        if (region.index < 0 || size_t(region.index) >= list.size()) fail(rank, "there is no " + to_string(region));
        buffer = list[region.index];
        break;
      case Space::kScratch:
        buffer = ranks_[rank].scratch;
        break;
      case Space::kPeerInput:
      case Space::kPeerOutput:
        buffer = tensor_of_peer(rank, region, is_write);
        break;
      case Space::kStaging:
        if (region.index < 0 || region.index >= options_.world_size || region.bank > 1) {
          fail(rank, "there is no " + to_string(region));
        }
        if (!is_near(rank, region.index)) fail(rank, to_string(region) + " is on another node");
        buffer = bank_of(rank, region).bytes;
        break;
    }
    if (region.offset_bytes < 0 || bytes < 0 || region.offset_bytes > int64_t(buffer.size()) - bytes) {
      fail(rank, std::to_string(bytes) + " bytes at " + to_string(region) + " are outside its " +
                     std::to_string(buffer.size()) + " bytes");
    }
    return buffer.data() + region.offset_bytes;
  }

  std::span<std::byte> tensor_of_peer(int32_t rank, const Region& region, bool is_write) const {
    const bool is_input = region.space == Space::kPeerInput;
    if (is_input && is_write) fail(rank, "it writes to an input");
    if (region.index < 0 || region.index >= options_.world_size || !schedule_of(rank).is_direct) {
      fail(rank, "there is no " + to_string(region));
    }
    if (!is_near(rank, region.index)) fail(rank, to_string(region) + " is on another node");
    const SimulatedTensors& peer = operation_of(rank).tensors[region.index];
    const auto& tensors = is_input ? peer.inputs : peer.outputs;
    if (tensors.empty()) fail(rank, "there is no " + to_string(region));
    const bool has_blocks = is_input && !peer.blocks_for_peers.empty();
    return has_blocks ? tensors[0].subspan(size_t(peer.blocks_for_peers[rank])) : tensors[0];
  }

  void log_tensor_access(int32_t rank, const Region& region, std::span<const std::byte> bytes, bool is_write) {
    const RankState& state = ranks_[rank];
    std::vector<TensorAccess>& accesses = tensor_accesses_[node_of_[rank]];
    const TensorAccess access{rank,     bytes.data(),    bytes.data() + bytes.size(),
                              is_write, state.operation, position_of(rank)};
    for (const TensorAccess& other : accesses) {
      const bool overlaps = access.begin < other.end && other.begin < access.end;
      if (other.rank == rank || !overlaps || !(access.is_write || other.is_write)) continue;
      fail(rank, "race: it " + std::string(is_write ? "writes " : "reads ") + std::to_string(bytes.size()) +
                     " bytes at " + to_string(region) + " which, with no barrier between, are " +
                     (other.is_write ? "written by " : "read by ") +
                     describe(other.rank, other.operation, other.position));
    }
    accesses.push_back(access);
  }

  Bank& bank_of(int32_t rank, const Region& region) {
    return banks_[2 * region.index + (region.bank + ranks_[rank].banks_used) % 2];
  }

  // Messages are not taken to order accesses to staging: only barriers are.
  void log_access(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
    Bank& bank = bank_of(rank, region);
    const RankState& state = ranks_[rank];
    const Access access{rank,     region.offset_bytes, region.offset_bytes + bytes,
                        is_write, state.operation,     position_of(rank)};
    for (const Access& other : bank.accesses) {
      const bool overlaps = access.begin < other.end && other.begin < access.end;
      if (other.rank == rank || !overlaps || !(access.is_write || other.is_write)) continue;
      fail(rank, "race: it " + std::string(is_write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " +
                     to_string(region) + " which, with no barrier between, are " +
                     (other.is_write ? "written by " : "read by ") +
                     describe(other.rank, other.operation, other.position));
    }
    bank.accesses.push_back(access);
    if (!is_write) traffic_[rank].staged_read_bytes[region.index] += bytes;
  }

  const SimulatorOptions& options_;
  const std::vector<SimulatedOperation>& operations_;
  std::vector<std::vector<int32_t>> nodes_;
  std::vector<int32_t> node_of_;
  std::mt19937_64 random_;
  std::vector<RankState> ranks_;
  std::vector<Bank> banks_;                                 // two per slot
  std::vector<std::vector<TensorAccess>> tensor_accesses_;  // by node, since its last barrier, of direct schedules
  std::map<std::pair<int32_t, int32_t>, Mailbox> mailboxes_;
  std::vector<Traffic> traffic_;
  int32_t favoured_ = 0;
  int32_t starved_ = 0;
};

}  // namespace

std::vector<Traffic> simulate(const SimulatorOptions& options, const std::vector<SimulatedOperation>& operations) {
  return Simulation(options, operations).run();
}

std::vector<std::vector<int64_t>> bytes_between_nodes(const std::vector<Traffic>& traffic,
                                                      const std::vector<std::vector<int32_t>>& nodes) {
  std::vector<std::vector<int64_t>> bytes(nodes.size(), std::vector<int64_t>(nodes.size(), 0));
  for (size_t from = 0; from < nodes.size(); ++from) {
    for (size_t to = 0; to < nodes.size(); ++to) {
      if (from == to) continue;
      for (const int32_t sender : nodes[from]) {
        for (const int32_t receiver : nodes[to]) bytes[from][to] += traffic[sender].sent_bytes[receiver];
      }
    }
  }
  return bytes;
}

}  // namespace zeropg
