#include "backend/engine/link_watch.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "backend/diagnostics/notices.h"

namespace zeropg {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLargeBytes = 1 << 20;
constexpr double kWindowUs = 100'000;
constexpr uint64_t kLeastFlow = 64 << 10;  // in a window: less says nothing about a connection
constexpr double kLeastBusy = 0.5;
constexpr int32_t kMostNotices = 20;  // of a group

bool is_positive(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value) && value > 0; });
}

}  // namespace

LinkWatch::LinkWatch(GroupContext& group, std::shared_ptr<Planner> planner)
    : group_(group),
      planner_(std::move(planner)),
      links_(planner_->links()),
      flows_(2 * group.topology().nodes.size()),
      before_(static_cast<size_t>(group.world_size())) {}

const PlannedCollective& LinkWatch::begin(PlannedCollective& collective) {
  is_agreeing_ = is_due(collective);
  if (is_agreeing_) {
    write_own_flows();
    if (agreement_.schedule == nullptr) {
      CollectiveArgs sum;
      sum.op = OpKind::kAllReduce;
      sum.dtype = at::ScalarType::Double;
      sum.bytes = static_cast<int64_t>(flows_.size() * sizeof(double));
      agreement_ = planner_->plan(sum);
      agreement_.call.root = CallFingerprint::kAboutLinks;
      agreement_.inputs = {reinterpret_cast<std::byte*>(flows_.data())};
      agreement_.outputs = agreement_.inputs;
    }
    planner_->refresh(agreement_);
    return agreement_;
  }
  planner_->refresh(collective);
  const bool counts = collective.has_shares && collective.spec.op == OpKind::kAllReduce;
  flowing_bytes_ = counts && collective.spec.bytes >= kLargeBytes ? collective.spec.bytes : 0;
  start_ = Clock::now();
  return collective;
}

bool LinkWatch::end() {
  if (std::exchange(is_agreeing_, false)) {
    follow();
    return false;
  }
  const bool began_together = window_bytes_ == 0 && agreement_.schedule != nullptr;
  if (flowing_bytes_ > 0 && began_together) {
    us_per_byte_ = std::chrono::duration<double, std::micro>(Clock::now() - start_).count() / flowing_bytes_;
  }
  window_bytes_ += flowing_bytes_;
  return true;
}

bool LinkWatch::is_due(const PlannedCollective& next) const {
  const std::vector<double>& speeds = links_.node_bytes_per_us;
  const double slowest =
      speeds.empty() ? CostModel{}.network_bytes_per_us : *std::min_element(speeds.begin(), speeds.end());
  return next.has_shares && next.spec.bytes >= kLargeBytes && window_bytes_ > kWindowUs * slowest;
}

void LinkWatch::write_own_flows() {
  const Topology& topology = group_.topology();
  const auto nodes = static_cast<int32_t>(topology.nodes.size());
  const double took_us = us_per_byte_ * static_cast<double>(window_bytes_);
  std::fill(flows_.begin(), flows_.end(), 0);
  for (int32_t peer = 0; peer < topology.world_size(); ++peer) {
    if (topology.is_on_this_node(peer)) continue;
    const std::optional<Delivery> now = group_.network()->delivery_to(peer);
    if (!now) continue;
    const Delivery before = std::exchange(before_[peer], *now);
    const uint64_t bytes = now->bytes - before.bytes;
    if (bytes < kLeastFlow || us_per_byte_ == 0) continue;
    const double busy_us = std::chrono::duration<double, std::micro>(now->busy - before.busy).count();
    const double rate = static_cast<double>(bytes) / std::max(busy_us, kLeastBusy * took_us);
    flows_[topology.node_rank[topology.rank]] += rate;
    flows_[nodes + topology.node_rank[peer]] += rate;
  }
  window_bytes_ = 0;
}

// The same on all ranks. What a peer told may be anything.
void LinkWatch::follow() {
  if (!is_positive(flows_)) return;
  const auto middle = flows_.begin() + static_cast<ptrdiff_t>(flows_.size() / 2);
  recent_.push_back({.out_bytes_per_us = {flows_.begin(), middle}, .in_bytes_per_us = {middle, flows_.end()}});
  if (recent_.size() > kFollowedWindows) recent_.erase(recent_.begin());
  const LinkModel after = follow_links(links_, recent_);
  if (after == links_) return;
  planner_->follow_links(after);
  say_what_changed(after);
  links_ = after;
}

void LinkWatch::say_what_changed(const LinkModel& after) {
  if (group_.rank() != 0 || ++changes_ > kMostNotices) return;
  const std::vector<double>& speeds = after.node_bytes_per_us;
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  const auto gbps = [](double bytes_per_us) { return bytes_per_us / 1000; };
  std::string slower;
  for (size_t node = 0; node < speeds.size(); ++node) {
    if (speeds[node] == fastest) continue;
    slower += c10::str(slower.empty() ? "" : ", ", "node ", node, " (",
                       group_.topology().host_ids[group_.topology().nodes[node][0]], ") ", gbps(speeds[node]));
  }
  const std::string what =
      slower.empty()
          ? "the links of all nodes carry alike again, so all nodes have equal shares of reductions"
          : c10::str("links between nodes are not alike now, so nodes have other shares of reductions: ", slower,
                     " GB/s, the others ", gbps(fastest));
  notice(c10::str("links ", changes_, what), c10::str("[zeropg rank 0/", group_.world_size(), "] ", what, "."));
}

}  // namespace zeropg
