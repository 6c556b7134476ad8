// Notices that ranks took different paths through a model, and wait for each other for ever.
//
// Note [Different paths]
// Where units are gathered while backward runs, gathers are on one group and reductions on another, so nobody compares
// their order. A rank that leaves out a unit which others gather is soon waiting for their reductions, and they for its
// gather. One thread drives a model: while it waits, it begins nothing. So the two wait for ever where one waits for
// gather g of which the other has begun fewer, and the other for reduction r of which the first has begun fewer. What
// a rank has begun and waits for it tells the others through the store once it has waited for kPatience. However old
// that is, it still holds while this rank has not begun what the other waits for.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zeropg {

class PathWatch {
 public:
  enum Kind : uint8_t { kGather, kReduction };
  // Of one rank: how many it has begun, and which one of what kind it waits for. By the number of the call, from 1.
  struct Position {
    std::array<uint64_t, 2> begun{};
    Kind waits_in = kGather;
    uint64_t waits_for = 0;  // 0: it does not wait
  };

  // Collective, before any other rank may look: what every rank says is in `store`, of this model alone, from then on.
  // `fail`: ends the waits of that kind on this rank with an error of this text; called by a thread of its own.
  PathWatch(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size,
            std::function<void(Kind, const std::string&)> fail);
  ~PathWatch();  // returns at once, whatever the store does
  PathWatch(const PathWatch&) = delete;

  uint64_t note_begun(Kind kind);  // returns its number
  // Around a wait for that call, of `what`.
  void begin_wait(Kind kind, uint64_t number, const std::string& what);
  void end_wait();

  // What another rank says, if anything; and whether two ranks wait for each other for ever.
  static std::string encode(const Position& position);
  static Position decode(const std::string& text);  // nothing begun where it is damaged
  static bool is_deadlock(const Position& mine, const Position& theirs);

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_;  // life shared with the thread
};

}  // namespace zeropg
