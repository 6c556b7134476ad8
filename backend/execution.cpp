#include "backend/execution.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "backend/collectives/direct.h"
#include "backend/collectives/staging_stores.h"
#include "backend/transport/copy.h"
#include "backend/transport/rank_names.h"
#include "backend/transport/rank_state.h"

namespace zeropg {

namespace {

// A result that goes to several places, or past the caches, is made in pieces that stay in the L1 cache. (For several
// places stores past the caches were half as fast: the lines have just been read.)
constexpr int64_t kPieceBytes = 8 << 10;

// How much of a rank's tensor is at most written after it gave up.
constexpr int64_t kCheckBytes = 1 << 20;

bool is_streamed_to_staging(const Step& step) {
  return step.destination.space == Space::kStaging && should_stream_to_staging(step.bytes);
}

AnnouncedReduction announced_reduction(const Collective& collective) {
  AnnouncedReduction said{.factor = collective.factor.real(), .factor_imaginary = collective.factor.imag()};
  if (const Compressor* codec = collective.spec.codec) {
    codec->description().copy(said.codec, sizeof(said.codec) - 1);
  }
  return said;
}

// Or, of an all-to-all: how many bytes it sends to each rank and receives from each.
struct AnnouncedBlocks {
  int64_t sent[kMostComparedBlocks] = {};
  int64_t received[kMostComparedBlocks] = {};
};
static_assert(sizeof(AnnouncedBlocks) == Announcement::kInlineBytes);

AnnouncedBlocks announced_blocks(const Announcement& said) {
  AnnouncedBlocks blocks;
  std::memcpy(&blocks, said.payload, sizeof(blocks));
  return blocks;
}

bool announces_counts(const CollectiveSpec& spec) {
  return spec.op == OpKind::kAllToAll && spec.world_size <= kMostComparedBlocks;
}

}  // namespace

Execution::Execution(Group& group, const Collective& collective, const OperationLabel& label)
    : group_(group),
      collective_(collective),
      label_(label),
      sequence_(group.next_announcement()),
      call_headers_(group, collective, sequence_),
      schedule_(collective.schedule.get()),
      residuals_(*collective.schedule, collective.compression) {
  if (collective.schedule->scratch_bytes > 0) {
    scratch_ = group.scratch(collective.schedule->scratch_bytes);
  }
  const SharedTensors shared = shared_tensors(collective.spec, collective.spec.rank);
  if (offers_direct() && (shared.input || shared.output)) {
    schedule_ = collective.direct.get();
  }
}

Progress Execution::advance() {
  bool has_moved = false;
  while (step_ < schedule_->steps.size()) {
    const int64_t moved_before = moved_bytes_;
    if (!run(schedule_->steps[step_])) {
      note_blocked();
      return has_moved || moved_bytes_ != moved_before ? Progress::kMoved : Progress::kBlocked;
    }
    step_ = std::exchange(is_to_restart_, false) ? 0 : step_ + 1;
    moved_bytes_ = 0;
    has_moved = true;
    note_moved();
  }
  if (!has_given_banks_) {
    // Here and not when this object dies: by then another thread may have begun the group's next operation.
    has_given_banks_ = true;
    group_.finish_banks(schedule_->banks_used);
    if (is_direct()) {
      group_.count_direct(label_);
    }
  }
  return Progress::kDone;
}

bool Execution::run(const Step& step) {
  switch (step.kind) {
    case StepKind::kCopy: {
      std::byte* destination = address(step.destination);
      const std::byte* source = address(step.source);
      if (step.is_streaming || is_streamed_to_staging(step)) {
        copy_bytes(destination, source, destination == source ? 0 : step.bytes, /*is_streaming=*/true);
      } else if (destination != source && step.bytes > 0) {
        std::memmove(destination, source, static_cast<size_t>(step.bytes));
      }
      return true;
    }
    case StepKind::kReduce:
      reduce_step(step);
      return true;
    case StepKind::kBarrier:
      return run_barrier();
    case StepKind::kSend:
      return run_send(step);
    case StepKind::kReceive:
      return run_receive(step);
    case StepKind::kEncode:
      encode(step);
      return true;
    case StepKind::kDecode:
    case StepKind::kDecodeAdd:
      decode(step);
      return true;
  }
  TORCH_INTERNAL_ASSERT(false, label_.prefix(), ": a step that the engine does not know");
}

bool Execution::run_barrier() {
  ShmArena& arena = group_.arena();
  if (barrier_ == 0) {
    if (!is_announced_) {
      announce();
    } else {
      check_peer_tensors();
    }
    barrier_ = group_.next_barrier();
    arena.arrive(barrier_);
  }
  if (!arena.all_arrived(barrier_)) {
    return false;
  }
  barrier_ = 0;
  if (!is_announced_) {
    is_announced_ = true;
    check_announcements();
    choose_schedule();
  }
  return true;
}

bool Execution::run_send(const Step& step) {
  if (!call_headers_.send_to(step.peer)) {
    return false;
  }
  const std::byte* source = address(step.source);
  const std::span<const std::byte> rest(source + moved_bytes_, static_cast<size_t>(step.bytes - moved_bytes_));
  moved_bytes_ += static_cast<int64_t>(group_.transport_to(step.peer).try_send(step.peer, Lane::kCollective, rest));
  return moved_bytes_ == step.bytes;
}

bool Execution::run_receive(const Step& step) {
  if (!call_headers_.receive_from(step.peer)) {
    return false;
  }
  std::byte* destination = address(step.destination);
  const std::span<std::byte> rest(destination + moved_bytes_, static_cast<size_t>(step.bytes - moved_bytes_));
  moved_bytes_ += static_cast<int64_t>(group_.transport_to(step.peer).try_receive(step.peer, Lane::kCollective, rest));
  return moved_bytes_ == step.bytes;
}

void Execution::reduce_step(const Step& step) {
  const ReduceOp op = step.has_partial_sources ? op_over_partial_results(collective_.reduce_op) : collective_.reduce_op;
  const bool is_streamed = is_streamed_to_staging(step);
  const int64_t piece_bytes = step.echo_count == 0 && !is_streamed ? step.bytes : kPieceBytes;
  alignas(64) std::byte piece[kPieceBytes];
  std::vector<const void*> sources(static_cast<size_t>(step.source_count));
  int64_t next_check = kCheckBytes;
  for (int64_t offset = 0; offset < step.bytes; offset += piece_bytes) {
    if (offset >= next_check) {
      next_check += kCheckBytes;
      check_peer_tensors();
    }
    const int64_t bytes = std::min(piece_bytes, step.bytes - offset);
    for (int32_t i = 0; i < step.source_count; ++i) {
      sources[static_cast<size_t>(i)] = address(schedule_->sources[step.first_source + i]) + offset;
    }
    std::byte* destination = address(step.destination) + offset;
    reduce(is_streamed ? piece : destination, sources.data(), step.source_count, bytes / collective_.spec.element_bytes,
           collective_.dtype, op, collective_.factor, step.is_final);
    if (is_streamed) {
      copy_bytes(destination, piece, bytes, /*is_streaming=*/true);
    }
    for (int32_t i = 0; i < step.echo_count; ++i) {
      std::memcpy(address(schedule_->echoes[step.first_echo + i]) + offset, destination, static_cast<size_t>(bytes));
    }
  }
}

void Execution::encode(const Step& step) {
  const Compressor& codec = *collective_.spec.codec;
  const int64_t count = step.bytes / static_cast<int64_t>(sizeof(float));
  const std::span values(reinterpret_cast<const float*>(address(step.source)), static_cast<size_t>(count));
  const std::span encoded(address(step.destination), static_cast<size_t>(codec.encoded_bytes(count)));
  if (step.residual.space == Space::kResidual) {
    residuals_.encode(codec, values, step.residual.index,
                      step.residual.offset_bytes / static_cast<int64_t>(sizeof(float)), encoded);
  } else {
    codec.encode(values, {}, encoded);
  }
}

void Execution::decode(const Step& step) {
  const Compressor& codec = *collective_.spec.codec;
  const int64_t count = step.bytes / static_cast<int64_t>(sizeof(float));
  const std::span<const std::byte> encoded(address(step.source), static_cast<size_t>(codec.encoded_bytes(count)));
  const std::span values(reinterpret_cast<float*>(address(step.destination)), static_cast<size_t>(count));
  if (step.kind == StepKind::kDecodeAdd) {
    codec.decode_add(encoded, values);
  } else {
    codec.decode(encoded, values);
  }
}

std::byte* Execution::address(const Region& region) const {
  switch (region.space) {
    case Space::kInput:
      return collective_.inputs.at(region.index) + region.offset_bytes;
    case Space::kOutput:
      return collective_.outputs.at(region.index) + region.offset_bytes;
    case Space::kScratch:
      return scratch_ + region.offset_bytes;
    case Space::kStaging:
      return group_.arena().staging(group_.local_rank(region.index), group_.physical_bank(region.bank)) +
             region.offset_bytes;
    case Space::kPeerInput:
      return peer_inputs_.at(region.index) + region.offset_bytes;
    case Space::kPeerOutput:
      return peer_outputs_.at(region.index) + region.offset_bytes;
    case Space::kResidual:
      break;
  }
  return nullptr;
}

bool Execution::offers_direct() const {
  const CollectiveSpec& spec = collective_.spec;
  return collective_.offers_direct && (spec.op != OpKind::kAllToAll || announces_counts(spec));
}

// Note [Direct schedules]
// A rank knows of its own tensors only whether others can reach them. So it begins with the direct schedule, whose
// first step is the barrier, where it offers its own for that, and with the staged one where it does not, or where the
// operation reaches none of its tensors. At the first barrier everybody reads what all have announced, and decides
// alike, from nothing that ranks may see differently (a rank with a list, or with little to send, has no direct
// schedule at all): the direct schedule, from behind that barrier, if all offer it; otherwise the staged one. Of that,
// who began with the other has not done the steps before the barrier yet; then all begin it again, who did them does
// them twice: they only copy inputs to staging that nobody reads before the next barrier.
void Execution::choose_schedule() {
  bool offer_all = true;
  bool must_restart = false;
  for (const int32_t peer : group_.node()) {
    const Announcement& said = group_.arena().announcement(group_.local_rank(peer), sequence_);
    offer_all = offer_all && said.offers_direct != 0;
    must_restart = must_restart || said.begins_direct != 0;
  }
  if (offer_all) {
    locate_peer_tensors();
    schedule_ = collective_.direct.get();
    step_ = 0;
  } else {
    schedule_ = collective_.schedule.get();
    is_to_restart_ = must_restart;
  }
}

// Nobody passes the last barrier before this rank has arrived; so who has left by now did so early, and may have
// changed what this rank has read of its tensor, or want it for itself again.
void Execution::check_peer_tensors() const {
  if (!is_direct()) {
    return;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // the reads above come before this look
  for (const int32_t peer : group_.node()) {
    const RankState state = group_.arena().state_of(group_.local_rank(peer));
    TORCH_CHECK_WITH(DistNetworkError, state == RankState::kAlive, "rank ", peer,
                     " gave up while others worked on its tensor");
  }
}

void Execution::locate_peer_tensors() {
  const CollectiveSpec& spec = collective_.spec;
  peer_inputs_.assign(static_cast<size_t>(spec.world_size), nullptr);
  peer_outputs_.assign(static_cast<size_t>(spec.world_size), nullptr);
  for (const int32_t peer : group_.node()) {
    const Announcement& said = group_.arena().announcement(group_.local_rank(peer), sequence_);
    const SharedTensors shared = shared_tensors(spec, peer);
    if (spec.op == OpKind::kAllToAll) {
      const AnnouncedBlocks blocks = announced_blocks(said);
      int64_t offset = said.pool_input;
      for (int32_t rank = 0; rank < spec.rank && offset >= 0; ++rank) {
        const int64_t bytes = blocks.sent[rank];
        offset = bytes < 0 || bytes > group_.pool().bytes_per_rank() ? -1 : offset + bytes;
      }
      peer_inputs_[peer] = in_pool_of(peer, offset, spec.receive_bytes[peer]);
    } else if (shared.input) {
      peer_inputs_[peer] = in_pool_of(peer, said.pool_input, shared_input_bytes(spec));
    }
    if (shared.output) {
      peer_outputs_[peer] = in_pool_of(peer, said.pool_output, spec.bytes);
    }
  }
}

std::byte* Execution::in_pool_of(int32_t rank, int64_t offset, int64_t bytes) const {
  std::byte* data = group_.pool().at(group_.local_rank(rank), offset, bytes);
  TORCH_CHECK_WITH(DistBackendError, data != nullptr, label_.prefix(), ": rank ", rank, " says that ", bytes,
                   " bytes of its tensor begin at ", offset, " of its part of the tensor pool, which has ",
                   group_.pool().bytes_per_rank(), "; its memory is damaged: restart from a checkpoint.");
  return data;
}

// Note [Announcements]
// Slot sequence % 2 may be overwritten for sequence + 2 only when nobody reads it for `sequence` any more: every rank
// reads right after the first barrier of `sequence`, and the first barrier of sequence + 1 comes after that.
void Execution::announce() {
  const CollectiveSpec& spec = collective_.spec;
  Announcement& mine = group_.arena().announcement(group_.local_rank(group_.rank()), sequence_);
  mine.sequence = sequence_;
  mine.op = static_cast<uint32_t>(spec.op);
  mine.dtype = static_cast<uint32_t>(collective_.dtype_id);
  mine.reduce_op = static_cast<uint32_t>(collective_.reduce_op);
  mine.root = spec.root;
  mine.bytes = spec.bytes;
  mine.algorithm = hash_of(collective_.schedule->algorithm);
  mine.begins_direct = is_direct() ? 1 : 0;
  mine.offers_direct = offers_direct() ? 1 : 0;
  mine.pool_input = collective_.pool_input;
  mine.pool_output = collective_.pool_output;
  if (announces_counts(spec)) {
    AnnouncedBlocks blocks;
    std::ranges::copy(spec.send_bytes, blocks.sent);
    std::ranges::copy(spec.receive_bytes, blocks.received);
    std::memcpy(mine.payload, &blocks, sizeof(blocks));
  } else {
    const AnnouncedReduction said = announced_reduction(collective_);
    std::memcpy(mine.payload, &said, sizeof(said));
  }
}

void Execution::check_announcements() {
  const CollectiveSpec& spec = collective_.spec;
  ShmArena& arena = group_.arena();
  const AnnouncedReduction mine = announced_reduction(collective_);
  const uint64_t algorithm = hash_of(collective_.schedule->algorithm);
  std::vector<int32_t> planned_otherwise;
  std::map<std::string, std::vector<int32_t>> calls;
  bool is_same = true;
  for (const int32_t peer : group_.node()) {
    const Announcement& other = arena.announcement(group_.local_rank(peer), sequence_);
    bool is_peer_same = other.op == static_cast<uint32_t>(spec.op) &&
                        other.dtype == static_cast<uint32_t>(collective_.dtype_id) &&
                        other.reduce_op == static_cast<uint32_t>(collective_.reduce_op) && other.root == spec.root &&
                        other.bytes == spec.bytes;
    if (is_peer_same && !announces_counts(spec)) {
      is_peer_same = std::memcmp(other.payload, &mine, sizeof(mine)) == 0;
    }
    is_same = is_same && is_peer_same;
    if (other.algorithm != algorithm) {
      planned_otherwise.push_back(peer);
    }
  }
  if (is_same) {
    if (announces_counts(spec)) {
      check_announced_blocks();
    }
    TORCH_CHECK_WITH(DistBackendError, planned_otherwise.empty(), label_.prefix(), ": this rank runs ",
                     collective_.schedule->algorithm, ", ", format_ranks(planned_otherwise),
                     " another algorithm; give BackendOptions(algorithms=...) and the version of zeropg the same value "
                     "on every rank.");
    return;
  }
  for (const int32_t peer : group_.node()) {
    calls[describe_announcement(arena.announcement(group_.local_rank(peer), sequence_))].push_back(peer);
  }
  std::string text;
  for (const auto& [call, ranks] : calls) {
    text += (text.empty() ? "" : "; ") + format_ranks(ranks) + ": " + call;
  }
  C10_THROW_ERROR(DistBackendError, c10::str(label_.prefix(), ": the ranks made different calls: ", text,
                                             "; make the same call with the same sizes on every rank."));
}

// Of all pairs of the node, so that no rank ends an operation that fails on others.
void Execution::check_announced_blocks() const {
  const std::vector<int32_t>& ranks = group_.node();
  std::vector<AnnouncedBlocks> blocks;
  for (const int32_t rank : ranks) {
    blocks.push_back(announced_blocks(group_.arena().announcement(group_.local_rank(rank), sequence_)));
  }
  const auto name = [&](int32_t rank) {
    return rank == group_.rank() ? std::string("this rank") : c10::str("rank ", rank);
  };
  for (size_t from = 0; from < ranks.size(); ++from) {
    for (size_t to = 0; to < ranks.size(); ++to) {
      const int64_t sent = blocks[from].sent[ranks[to]];
      const int64_t expected = blocks[to].received[ranks[from]];
      TORCH_CHECK_WITH(DistBackendError, sent == expected, label_.prefix(), ": ", name(ranks[from]), " sends ", sent,
                       " bytes to ", name(ranks[to]), ", which expects ", expected,
                       "; make the splits of both ranks match.");
    }
  }
}

std::vector<int32_t> Execution::awaited() const {
  const std::vector<Step>& steps = schedule_->steps;
  if (step_ >= steps.size()) {
    return {};
  }
  const Step& step = steps[step_];
  if (step.kind == StepKind::kBarrier) {
    return barrier_ == 0 ? std::vector<int32_t>() : group_.missing_at(barrier_);
  }
  return step.peer >= 0 ? std::vector<int32_t>{step.peer} : std::vector<int32_t>();
}

void Execution::note_wait() const {
  const Step& step = schedule_->steps[step_];
  group_.note_wait(Lane::kCollective, step.kind == StepKind::kBarrier ? ShmArena::kAtBarrier : step.peer, awaited());
}

std::string Execution::describe_wait() const {
  return c10::str("in step ", step_ + 1, " of ", schedule_->steps.size(), " of ", schedule_->algorithm);
}

// Who is late is sampled, not known: a rank counts as late for as long as the samples find it missing.
void Execution::note_blocked() {
  constexpr std::chrono::microseconds kSampleInterval{50};
  const auto now = std::chrono::steady_clock::now();
  if (wait_start_ == std::chrono::steady_clock::time_point{}) {
    wait_start_ = now;
    waiting_for_ = awaited();
  } else if (now - wait_start_ >= kSampleInterval) {
    note_moved();
    wait_start_ = now;
    waiting_for_ = awaited();
  }
}

void Execution::note_moved() {
  if (wait_start_ == std::chrono::steady_clock::time_point{}) {
    return;
  }
  waiting_seconds_.resize(static_cast<size_t>(collective_.spec.world_size));
  for (int32_t peer : waiting_for_) {
    waiting_seconds_[static_cast<size_t>(peer)] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - wait_start_).count();
  }
  wait_start_ = {};
}

}  // namespace zeropg
