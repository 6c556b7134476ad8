#include "backend/transport/shm/rank_notes.h"

namespace zeropg {
namespace {

// A number (at least -1) and when it was noted, in one word, so that a reader never mixes two notes.
struct Note {
  static constexpr int kNumberBits = 24;
  uint64_t milliseconds = 0;  // of the machine's monotonic clock
  int32_t number = 0;

  explicit Note(int32_t number) : milliseconds(now()), number(number) {}
  explicit Note(uint64_t word)
      : milliseconds(word >> kNumberBits), number(static_cast<int32_t>(word & ((1U << kNumberBits) - 1)) - 1) {}
  uint64_t packed() const { return milliseconds << kNumberBits | static_cast<uint64_t>(number + 1); }
  std::optional<int32_t> unless_older_than(std::chrono::milliseconds life) const {
    return now() - milliseconds <= static_cast<uint64_t>(life.count()) ? std::optional(number) : std::nullopt;
  }

  static uint64_t now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count());
  }
};

}  // namespace

void RankNotes::note_wait(Lane lane, int32_t peer) {
  waits_[static_cast<size_t>(lane)].store(Note(peer).packed(), std::memory_order_relaxed);
}

std::optional<int32_t> RankNotes::wait(Lane lane) const {
  return Note(waits_[static_cast<size_t>(lane)].load(std::memory_order_relaxed)).unless_older_than(kWaitLife);
}

void RankNotes::note_cpu(int32_t cpu) { cpu_.store(Note(cpu).packed(), std::memory_order_relaxed); }

std::optional<int32_t> RankNotes::cpu() const {
  return Note(cpu_.load(std::memory_order_relaxed)).unless_older_than(kCpuLife);
}

}  // namespace zeropg
