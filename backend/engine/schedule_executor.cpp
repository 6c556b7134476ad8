#include "backend/engine/schedule_executor.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "backend/collectives/schedule/encodings.h"
#include "backend/collectives/schedule/staging_stores.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

namespace {

// A result that goes to several places, or past the caches, is made in pieces that stay in the L1 cache. (For several
// places stores past the caches were half as fast: the lines have just been read.)
constexpr int64_t kPieceBytes = 8 << 10;

bool is_streamed_to_staging(const Step& step) {
  return step.destination.space == Space::kStaging && should_stream_to_staging(step.bytes);
}

}  // namespace

ScheduleExecutor::ScheduleExecutor(CollectiveContext& context, const PlannedCollective& collective,
                                   const OperationLabel& label)
    : context_(context),
      collective_(collective),
      label_(label),
      call_(context.begin_call(collective.call)),
      in_node_(context, collective, call_, label),
      between_nodes_(context, collective.spec, call_),
      direct_access_(context, collective, label),
      schedule_(collective.schedule.get()),
      cursor_(*schedule_) {
  if (collective.spec.codec != nullptr) {
    codec_steps_.emplace(collective);
  }
  if (collective.schedule->scratch_bytes > 0) {
    scratch_ = context.scratch(collective.schedule->scratch_bytes);
  }
  if (direct_access_.begins_direct()) {
    schedule_ = collective.direct.get();
    cursor_ = ScheduleCursor(*schedule_);
  }
}

Progress ScheduleExecutor::advance() {
  bool has_moved = false;
  while (!cursor_.is_done()) {
    const int64_t moved_before = moved_bytes_;
    if (!run(cursor_.step())) {
      note_blocked();
      return has_moved || moved_bytes_ != moved_before ? Progress::kMoved : Progress::kBlocked;
    }
    if (std::exchange(is_to_restart_, false)) {
      cursor_ = ScheduleCursor(*schedule_);
    } else {
      cursor_.next();
    }
    moved_bytes_ = 0;
    has_moved = true;
    note_moved();
  }
  if (!has_given_banks_) {
    // Here and not when this object dies: by then another thread may have begun the group's next operation.
    has_given_banks_ = true;
    context_.finish_banks(schedule_->banks_used);
    if (is_direct()) {
      context_.statistics.count_direct(label_);
    }
    if (codec_steps_) {
      note_coding(codec_steps_->counters());
    }
  }
  return Progress::kDone;
}

void ScheduleExecutor::note_coding(const CodecCounters& counters) {
  CodecMeter* meter = collective_.compression.meter.get();
  (meter != nullptr ? *meter : context_.statistics.coding()).add(counters);
}

bool ScheduleExecutor::run(const Step& step) {
  switch (step.kind) {
    case StepKind::kCopy: {
      if (step.source.space == Space::kPeerInput && direct_access_.must_read(step.source.index)) {
        direct_access_.read(step.source.index, step.source.offset_bytes,
                            {address(step.destination), static_cast<size_t>(step.bytes)});
        return true;
      }
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
      codec_steps_->encode(step, address(step.source), address(step.destination));
      return true;
    case StepKind::kDecode:
    case StepKind::kDecodeAdd:
      codec_steps_->decode(step, address(step.source), address(step.destination));
      return true;
    case StepKind::kSelect:
      codec_steps_->select(step, address(step.source));
      return true;
  }
  TORCH_INTERNAL_ASSERT(false, label_.prefix(), ": a step that the engine does not know");
}

bool ScheduleExecutor::run_barrier() {
  ShmArena& arena = context_.arena;
  if (barrier_ == 0) {
    if (!is_announced_) {
      in_node_.announce_call();
      direct_access_.offer(in_node_.mine().direct);
    } else if (is_direct()) {
      direct_access_.check();
    }
    barrier_ = context_.next_barrier();
    arena.arrive(barrier_);
  }
  if (!arena.all_arrived(barrier_)) {
    return false;
  }
  barrier_ = 0;
  if (!is_announced_) {
    is_announced_ = true;
    in_node_.compare_calls();
    choose_schedule();
  }
  return true;
}

bool ScheduleExecutor::run_send(const Step& step) {
  if (!between_nodes_.send_to(step.peer)) {
    return false;
  }
  const std::byte* source = address(step.source);
  const int64_t length = step.is_sized ? kSizeBytes + get_size({source, kSizeBytes}) : step.bytes;
  const std::span<const std::byte> rest(source + moved_bytes_, static_cast<size_t>(length - moved_bytes_));
  moved_bytes_ += static_cast<int64_t>(context_.transports[step.peer]->try_send(step.peer, Lane::kCollective, rest));
  return moved_bytes_ == length;
}

bool ScheduleExecutor::run_receive(const Step& step) {
  if (!between_nodes_.receive_from(step.peer)) {
    return false;
  }
  std::byte* destination = address(step.destination);
  if (step.is_sized && moved_bytes_ < kSizeBytes && !receive_until(step, destination, kSizeBytes)) return false;
  return receive_until(step, destination, step.is_sized ? sized_length(step, destination) : step.bytes);
}

bool ScheduleExecutor::receive_until(const Step& step, std::byte* destination, int64_t length) {
  const std::span<std::byte> rest(destination + moved_bytes_, static_cast<size_t>(length - moved_bytes_));
  moved_bytes_ += static_cast<int64_t>(context_.transports[step.peer]->try_receive(step.peer, Lane::kCollective, rest));
  return moved_bytes_ == length;
}

// Note [Sized messages]: a peer's word, so it is checked before it counts.
int64_t ScheduleExecutor::sized_length(const Step& step, const std::byte* message) const {
  const int64_t length = kSizeBytes + get_size({message, kSizeBytes});
  TORCH_CHECK_WITH(DistBackendError, length <= step.bytes, "rank ", step.peer, " sent an encoding of ",
                   length - kSizeBytes, " bytes where at most ", step.bytes - kSizeBytes,
                   " can be; its memory or ours is damaged");
  return length;
}

void ScheduleExecutor::reduce_step(const Step& step) {
  const ReduceOp op = step.has_partial_sources ? op_over_partial_results(collective_.reduce_op) : collective_.reduce_op;
  const bool is_divided = divides_average(step, collective_.dtype, codec_steps_.has_value());
  const bool is_streamed = is_streamed_to_staging(step);
  const Widening times = widening(collective_.dtype, step.form);
  const int64_t piece_bytes = step.echo_count == 0 && !is_streamed ? step.bytes : kPieceBytes / times.of_destination;
  alignas(64) std::byte piece[kPieceBytes];
  std::vector<const void*> sources(static_cast<size_t>(step.source_count));
  int64_t next_check = DirectAccess::kCheckBytes;
  for (int64_t offset = 0; offset < step.bytes; offset += piece_bytes) {
    if (is_direct() && offset >= next_check) {
      next_check += DirectAccess::kCheckBytes;
      direct_access_.check();
    }
    const int64_t bytes = std::min(piece_bytes, step.bytes - offset);
    for (int32_t i = 0; i < step.source_count; ++i) {
      sources[static_cast<size_t>(i)] = address(cursor_.source(i)) + times.of_sources * offset;
    }
    std::byte* destination = address(step.destination) + times.of_destination * offset;
    reduce(is_streamed ? piece : destination, sources.data(), step.source_count, bytes / collective_.spec.element_bytes,
           collective_.dtype, op, collective_.factor, is_divided, step.form);
    if (is_streamed) {
      copy_bytes(destination, piece, times.of_destination * bytes, /*is_streaming=*/true);
    }
    for (int32_t i = 0; i < step.echo_count; ++i) {
      std::memcpy(address(cursor_.echo(i)) + offset, destination, static_cast<size_t>(bytes));
    }
  }
}

std::byte* ScheduleExecutor::address(const Region& region) const {
  switch (region.space) {
    case Space::kInput:
      return collective_.inputs.at(region.index) + region.offset_bytes;
    case Space::kOutput:
      return collective_.outputs.at(region.index) + region.offset_bytes;
    case Space::kScratch:
      return scratch_ + region.offset_bytes;
    case Space::kStaging:
      return context_.staging(region.index, region.bank) + region.offset_bytes;
    case Space::kPeerInput:
      return direct_access_.input_of(region.index) + region.offset_bytes;
    case Space::kPeerOutput:
      return direct_access_.output_of(region.index) + region.offset_bytes;
    case Space::kResidual:
      break;
  }
  return nullptr;
}

void ScheduleExecutor::choose_schedule() {
  const DirectAccess::Decision decision = direct_access_.decide(in_node_);
  if (decision.is_direct) {
    schedule_ = collective_.direct.get();
    cursor_ = ScheduleCursor(*schedule_);  // its barrier, which was this one
  } else {
    schedule_ = collective_.schedule.get();
  }
  is_to_restart_ = decision.must_restart;
}

std::vector<int32_t> ScheduleExecutor::awaited() const {
  if (cursor_.is_done()) {
    return {};
  }
  const Step& step = cursor_.step();
  if (step.kind == StepKind::kBarrier) {
    return barrier_ == 0 ? std::vector<int32_t>() : context_.missing_at(barrier_);
  }
  return step.peer >= 0 ? std::vector<int32_t>{step.peer} : std::vector<int32_t>();
}

void ScheduleExecutor::note_wait() const {
  const Step& step = cursor_.step();
  context_.peers.note_wait(Lane::kCollective, step.kind == StepKind::kBarrier ? RankNotes::kAtBarrier : step.peer,
                           awaited(), std::bit_cast<WaitingCall>(call_));
  between_nodes_.compare_with_waiting();
}

std::string ScheduleExecutor::describe_wait() const {
  const auto [step, chunk] = cursor_.position();
  const int64_t chunks = step < schedule_->steps.size() ? schedule_->steps[step].chunks : 1;
  const std::string where = chunks > 1 ? c10::str(" in chunk ", chunk + 1, " of ", chunks) : "";
  return c10::str("in step ", step + 1, " of ", schedule_->steps.size(), where, " of ", schedule_->algorithm);
}

// Who is late is sampled, not known: a rank counts as late for as long as the samples find it missing.
void ScheduleExecutor::note_blocked() {
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

void ScheduleExecutor::note_moved() {
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
