#include "backend/topology/link_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace zeropg {
namespace {

constexpr int32_t kMostTargets = 8;
constexpr double kApart = 1.25;
constexpr double kBusy = 0.75;

using Windows = std::vector<double>;  // bytes per microsecond in each

void add(Windows& sum, const Windows& more) {
  sum.resize(std::max(sum.size(), more.size()));
  for (size_t window = 0; window < more.size(); ++window) sum[window] += more[window];
}

Windows slower(const Windows& a, const Windows& b) {
  Windows result;
  for (size_t window = 0; window < std::min(a.size(), b.size()); ++window) {
    result.push_back(std::min(a[window], b[window]));
  }
  return result;
}

struct Range {
  double middle = 0;  // the median
  double high = 0;    // the best but one
};

Range range_of(Windows windows) {
  if (windows.empty()) return {};
  std::sort(windows.begin(), windows.end());
  return {windows[windows.size() / 2], windows[windows.size() - std::min<size_t>(2, windows.size())]};
}

bool is_slower(const Range& one, const Range& other) { return one.high * kApart < other.middle; }

double with_two_digits(double value) {
  if (!(value > 0)) return 0;
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

// One figure for all nodes that are not told apart.
std::vector<double> speeds_of(const std::vector<Range>& ranges) {
  std::vector<size_t> by_speed(ranges.size());
  std::iota(by_speed.begin(), by_speed.end(), size_t{0});
  std::stable_sort(by_speed.begin(), by_speed.end(),
                   [&](size_t a, size_t b) { return ranges[a].middle > ranges[b].middle; });
  std::vector<double> speeds(ranges.size());
  for (auto begin = by_speed.begin(); begin != by_speed.end();) {
    Range together{};
    auto end = begin;
    // What is alike so far has the mean of its ranges.
    for (double count = 0; end != by_speed.end() && (end == begin || !is_slower(ranges[*end], together)); ++end) {
      together.middle = (together.middle * count + ranges[*end].middle) / (count + 1);
      ++count;
    }
    for (; begin != end; ++begin) speeds[*begin] = with_two_digits(together.middle);
  }
  return speeds;
}

// Whether a node is no longer as fast in proportion to the fastest one as it was.
bool have_changed(std::vector<double> before, const std::vector<double>& now) {
  if (before.empty()) before.assign(now.size(), 1);
  const double fastest_before = *std::max_element(before.begin(), before.end());
  const double fastest_now = *std::max_element(now.begin(), now.end());
  for (size_t node = 0; node < now.size(); ++node) {
    const double times = now[node] / fastest_now / (before[node] / fastest_before);
    if (times > kApart || times < 1 / kApart) return true;
  }
  return false;
}

// Of each rack: what crosses to and from others, what one flow does there, and what one does inside.
struct RackFlows {
  Windows out, in;
  Windows across, inside;
  double across_count = 0, inside_count = 0;
};

Windows mean(Windows sum, double count) {
  for (double& rate : sum) rate /= std::max(1.0, count);
  return sum;
}

std::vector<RackFlows> flows_of_racks(const std::vector<int32_t>& rack_of, size_t racks,
                                      const std::vector<Flow>& flows) {
  std::vector<RackFlows> result(racks);
  for (const Flow& flow : flows) {
    RackFlows& from = result[rack_of[flow.from]];
    RackFlows& to = result[rack_of[flow.to]];
    if (&from == &to) {
      add(from.inside, flow.bytes_per_us);
      ++from.inside_count;
      continue;
    }
    add(from.out, flow.bytes_per_us);
    add(to.in, flow.bytes_per_us);
    for (RackFlows* rack : {&from, &to}) {
      add(rack->across, flow.bytes_per_us);
      ++rack->across_count;
    }
  }
  return result;
}

std::vector<double> uplinks_of(const std::vector<std::vector<int32_t>>& racks, const std::vector<double>& speeds,
                               const std::vector<Flow>& flows) {
  std::vector<int32_t> rack_of(speeds.size());
  for (size_t rack = 0; rack < racks.size(); ++rack) {
    for (const int32_t node : racks[rack]) rack_of[node] = static_cast<int32_t>(rack);
  }
  const std::vector<RackFlows> seen = flows_of_racks(rack_of, racks.size(), flows);
  std::vector<double> uplinks;
  bool is_one_a_limit = false;
  for (size_t rack = 0; rack < racks.size(); ++rack) {
    double together = 0;
    for (const int32_t node : racks[rack]) together += speeds[node];
    const Range across = range_of(mean(seen[rack].across, seen[rack].across_count));
    const Range inside = range_of(mean(seen[rack].inside, seen[rack].inside_count));
    const bool is_limit = seen[rack].across_count > 0 && is_slower(across, inside);
    is_one_a_limit |= is_limit;
    // A pause of any of many processes shows in one direction's windows: each has its own middle.
    const double crossing = with_two_digits(std::min(range_of(seen[rack].out).middle, range_of(seen[rack].in).middle));
    uplinks.push_back(is_limit && crossing > 0 ? crossing : together);
  }
  return is_one_a_limit ? uplinks : std::vector<double>();
}

}  // namespace

std::vector<int32_t> probe_distances(int32_t nodes) {
  std::vector<int32_t> distances;
  const bool has_all = nodes <= kMostTargets + 1;
  for (int32_t distance = 1; distance < nodes && distances.size() < kMostTargets;
       distance = has_all ? distance + 1 : 2 * distance) {
    distances.push_back(distance);
  }
  return distances;
}

LinkModel model_links(int32_t nodes, const std::vector<std::vector<int32_t>>& racks, const LinkMeasurement& measured) {
  const std::vector<Flow>& flows = measured.flows;
  std::vector<Windows> out(nodes);
  std::vector<Windows> in(nodes);
  for (const Flow& flow : flows) {
    add(out[flow.from], flow.bytes_per_us);
    add(in[flow.to], flow.bytes_per_us);
  }
  std::vector<Range> ranges;
  for (int32_t node = 0; node < nodes; ++node) ranges.push_back(range_of(slower(out[node], in[node])));
  LinkModel model{.node_bytes_per_us = speeds_of(ranges)};
  std::vector<double>& speeds = model.node_bytes_per_us;
  if (std::find(speeds.begin(), speeds.end(), 0) != speeds.end()) return {};  // nothing came: nothing is known
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  for (size_t node = 0; node < measured.busy.size(); ++node) {
    if (measured.busy[node] > kBusy) speeds[node] = fastest;
  }
  if (racks.size() > 1) model.uplink_bytes_per_us = uplinks_of(racks, speeds, flows);
  return model;
}

LinkModel follow_links(const LinkModel& before, const std::vector<LinkTraffic>& recent) {
  if (recent.size() < kFollowedWindows) return before;
  std::vector<Windows> carried(recent[0].out_bytes_per_us.size());
  for (const LinkTraffic& window : recent) {
    const Windows both = slower(window.out_bytes_per_us, window.in_bytes_per_us);
    for (size_t node = 0; node < both.size(); ++node) carried[node].push_back(both[node]);
  }
  std::vector<Range> ranges;
  for (const Windows& windows : carried) ranges.push_back(range_of(windows));
  const std::vector<double> speeds = speeds_of(ranges);
  const bool is_known = std::find(speeds.begin(), speeds.end(), 0) == speeds.end();
  if (!is_known || !have_changed(before.node_bytes_per_us, speeds)) return before;
  LinkModel after = before;
  after.node_bytes_per_us = speeds;
  return after;
}

}  // namespace zeropg
