// When a partial sum may begin without the ranks that are late: the rule, without messages or threads.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropg {

// Rounds are numbered from 0; a step has `rounds_per_step` of them. A round may begin when
//   - at least ranks - floor(tolerance * ranks) ranks have come to it, and
//   - every rank has come to all rounds of the step that is max_steps_behind before.
// So with max_steps_behind = 1 a rank may miss any round of one step, and must have come to all of it before others
// begin the next step.
class RoundGate {
 public:
  RoundGate(int32_t ranks, double tolerance, int64_t rounds_per_step, int64_t max_steps_behind);

  // How many ranks a round needs.
  int32_t quorum() const { return quorum_; }
  // A rank has come to its first `count` rounds.
  void note(int32_t rank, int64_t count);
  bool may_begin(int64_t round) const;
  bool begins_step(int64_t round) const { return round % rounds_per_step_ == 0; }
  // Those that have not come to a round.
  std::vector<int32_t> missing(int64_t round) const;

 private:
  int32_t quorum_;
  int64_t rounds_per_step_;
  int64_t max_steps_behind_;
  std::vector<int64_t> counts_;  // of each rank
};

}  // namespace zeropg
