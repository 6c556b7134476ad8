// Keeps what is known of the links between nodes current while the group works.
//
// Note [What links carry meanwhile]
// In an all-reduce all nodes send and receive for as long as the slowest link takes, so its time does not say which
// link that is. But the kernel knows for each connection how long bytes were on their way (Delivery): over a slow link
// all the time, over others only while there were any. What went over a connection in a window, by that time, is what
// its way carries; what all connections of a node carry together is what its link does. A connection that was busy for
// less than half of the time counts as if it had been for half: it was not the link that held it up, and short times
// are noise.
//
// A window is as many large all-reduces as take about 100 ms at the speeds that are known. After it, before the next
// one, the ranks add up what they have seen, in an all-reduce of some bytes that takes its place in the queue like any
// other: so all of them get the same sums there and make the same of them, and nobody waits who does not wait for the
// collective itself. What was planned by the old links and has not begun is planned anew. Ranks that nevertheless came
// to different shares would see it in each other's calls (CallFingerprint::algorithm).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/group/group_context.h"
#include "backend/group/planner.h"
#include "backend/topology/link_model.h"
#include "backend/transport/network/wire.h"

namespace zeropg {

// Of one group on several nodes. Used only by the thread that runs the head of the collective queue, in a Use of the
// group.
class LinkWatch {
 public:
  // `group` must outlive it.
  LinkWatch(GroupContext& group, std::shared_ptr<Planner> planner);

  // What is to run for a collective that comes next: it, planned by the links of now, or first what the ranks agree by.
  // Valid until end().
  const PlannedCollective& begin(PlannedCollective& collective);
  // That has ended. False: it was not yet the collective.
  bool end();

 private:
  bool is_due(const PlannedCollective& next) const;
  void write_own_flows();
  void follow();
  void say_what_changed(const LinkModel& after);

  GroupContext& group_;
  const std::shared_ptr<Planner> planner_;  // life shared with the process group
  LinkModel links_;
  std::vector<LinkTraffic> recent_;  // windows, oldest first

  PlannedCollective agreement_;  // once it was needed
  std::vector<double> flows_;    // its input and output: out of each node, then into each
  bool is_agreeing_ = false;
  std::vector<Delivery> before_;  // of each rank, when the window began

  int64_t flowing_bytes_ = 0;  // of the collective that runs, where it counts
  std::chrono::steady_clock::time_point start_{};
  int64_t window_bytes_ = 0;
  double us_per_byte_ =
      0;  // in the window's first operation, which all ranks began together; 0: the first window, where they did not
  int32_t changes_ = 0;
};

}  // namespace zeropg
