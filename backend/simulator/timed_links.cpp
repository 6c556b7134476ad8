#include "backend/simulator/timed_links.h"

#include <algorithm>

namespace zeropg {

double LinkSpeeds::part_of_uplink(int32_t node) const {
  if (rack_of_nodes.empty()) return 0;
  return of_uplink(node) / static_cast<double>(std::ranges::count(rack_of_nodes, rack_of_nodes[node]));
}

TimedLinks::TimedLinks(const LinkSpeeds& speeds, const std::vector<int32_t>& nodes) {
  const bool are_all = nodes.size() == speeds.of_nodes.size();
  for (const int32_t node : nodes) {
    out_.of_nodes.push_back({speeds.of_nodes[node]});
    if (speeds.rack_of_nodes.empty()) continue;
    uplink_of_.push_back(are_all ? speeds.rack_of_nodes[node] : static_cast<int32_t>(uplink_of_.size()));
    if (!are_all) out_.uplinks.push_back({speeds.part_of_uplink(node)});
  }
  if (are_all) {
    for (const double speed : speeds.of_uplinks) out_.uplinks.push_back({speed});
  }
  in_ = out_;
}

void TimedLinks::enter(const Flight& flight) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(flights_.size()));
    flights_.emplace_back();
  }
  const uint32_t place = free_.back();
  free_.pop_back();
  flights_[place] = flight;
  queue_.push({flight.time_us, next_order_++, place});
}

std::optional<Flight> TimedLinks::advance() {
  Queued queued = queue_.top();
  queue_.pop();
  Flight& flight = flights_[queued.flight];
  Links& links = flight.is_arriving ? in_ : out_;
  const bool is_uplink = flight.crosses_racks && (flight.links_passed == 0) == flight.is_arriving;
  Link& link = is_uplink ? links.uplinks[uplink_of_[flight.node]] : links.of_nodes[flight.node];
  const LinkClock::Times times = link.clock.carry(flight.time_us, flight.bytes, link.bytes_per_us);
  flight.time_us = times.begin_us;
  flight.end_us = std::max(flight.end_us, times.end_us);
  if (++flight.links_passed == (flight.crosses_racks ? 2 : 1)) {
    free_.push_back(queued.flight);
    return flight;
  }
  queued.time_us = flight.time_us;
  queue_.push(queued);
  return std::nullopt;
}

}  // namespace zeropg
