#include "backend/bootstrap/link_probe.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "backend/bootstrap/network_wait.h"
#include "backend/bootstrap/with_peer.h"
#include "backend/platform/cpu/runnable_time.h"

namespace zeropg {
namespace {

using std::chrono::microseconds;

// Token buckets give at once what they saved, 256 KiB and more, and TCP needs some round trips to fill a link: what
// comes in the first part is not counted.
constexpr microseconds kWarmUp{40'000};
constexpr size_t kWindows = 6;
constexpr microseconds kWindow{18'000};
constexpr microseconds kSending = kWarmUp + kWindows * kWindow;
// A sender is ahead of what it knows to have arrived by this and an eighth of that: slow links empty soon after the
// end, fast ones are kept busy.
constexpr uint64_t kFirstAhead = 32 << 10;
constexpr uint64_t kPartAhead = 8;
constexpr uint64_t kChunksAhead = 8;  // frames come whole, so slow links get small ones
constexpr size_t kChunkBytes = 64 << 10;
constexpr uint64_t kTellAfter = 16 << 10;
constexpr int32_t kMostChunksAtOnce = 8;  // of one peer, before the next one's turn
constexpr char kMeasure = 'm';
constexpr char kTellOnly = 'k';
constexpr char kFollowed = 'f';  // behind the links, as the next
constexpr char kFixed = 'x';
constexpr const char* kSenseless = "what the first rank tells of the links makes no sense";

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

using WindowBytes = std::array<uint64_t, kWindows>;

enum class ReportKind : uint64_t { kTaken, kTotal };
struct Report {
  ReportKind kind;
  uint64_t bytes;
};

// One leader's side of what it and another one send each other.
class Exchange {
 public:
  Exchange(RemoteTransport& network, int32_t peer, bool sends, bool receives)
      : network_(network), peer_(peer), sends_(sends), receives_(receives) {}

  void advance(Clock::duration since_start) {
    read_reports();
    if (receives_) receive(since_start);
    if (sends_) send(since_start >= kSending);
    tell();
  }
  bool is_done() const {
    return told_.empty() && (!sends_ || (has_ended_ && arrived_ == sent_)) && (!receives_ || total_ == taken_);
  }
  const WindowBytes& windows() const { return windows_; }

 private:
  void read_reports() {
    while (expects_reports()) {
      const auto rest = std::as_writable_bytes(std::span(&incoming_, 1)).subspan(incoming_bytes_);
      incoming_bytes_ += network_.try_receive(peer_, Lane::kPointToPoint, rest);
      if (incoming_bytes_ < sizeof incoming_) return;
      incoming_bytes_ = 0;
      const bool is_total = incoming_.kind == ReportKind::kTotal;
      const bool is_sane = is_total ? receives_ && !total_ && incoming_.bytes >= taken_
                                    : incoming_.kind == ReportKind::kTaken && incoming_.bytes <= sent_;
      TORCH_CHECK_WITH(DistBackendError, is_sane, "rank ", peer_, " sent a report about the links that makes no sense");
      if (is_total) {
        total_ = incoming_.bytes;
      } else {
        arrived_ = incoming_.bytes;
      }
    }
  }

  // What comes after the last one is not for here.
  bool expects_reports() const { return (sends_ && !(has_ended_ && arrived_ == sent_)) || (receives_ && !total_); }

  void receive(Clock::duration since_start) {
    static thread_local std::array<std::byte, kChunkBytes> scratch;
    for (int32_t chunk = 0; chunk < kMostChunksAtOnce; ++chunk) {
      const size_t bytes = network_.try_receive(peer_, Lane::kCollective, scratch);
      taken_ += bytes;
      const auto window = (since_start - kWarmUp) / kWindow;
      if (since_start >= kWarmUp && window < static_cast<int64_t>(kWindows)) windows_[window] += bytes;
      if (bytes == 0) break;
    }
    TORCH_CHECK_WITH(DistBackendError, !total_ || taken_ <= *total_, "rank ", peer_, " sent more than it told");
    if (taken_ - told_taken_ >= kTellAfter || (total_ == taken_ && told_taken_ < taken_)) {
      told_.push_back({ReportKind::kTaken, taken_});
      told_taken_ = taken_;
    }
  }

  void send(bool is_over) {
    static constexpr std::array<std::byte, kChunkBytes> kNothing{};
    for (int32_t chunk = 0; chunk < kMostChunksAtOnce && !is_over; ++chunk) {
      const uint64_t limit = kFirstAhead + arrived_ / kPartAhead;
      const uint64_t ahead = sent_ - arrived_;
      const uint64_t most = std::min<uint64_t>(limit / kChunksAhead, kChunkBytes);
      const size_t bytes = ahead < limit ? std::min(limit - ahead, most) : 0;
      const size_t moved = network_.try_send(peer_, Lane::kCollective, std::span(kNothing).first(bytes));
      sent_ += moved;
      if (moved == 0) break;
    }
    if (is_over && !std::exchange(has_ended_, true)) told_.push_back({ReportKind::kTotal, sent_});
  }

  void tell() {
    const auto bytes = std::as_bytes(std::span(told_));
    told_bytes_ += network_.try_send(peer_, Lane::kPointToPoint, bytes.subspan(told_bytes_));
    if (told_bytes_ == bytes.size()) {
      told_.clear();
      told_bytes_ = 0;
    }
  }

  RemoteTransport& network_;
  const int32_t peer_;
  const bool sends_;
  const bool receives_;
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;  // of these, as the peer says
  bool has_ended_ = false;
  uint64_t taken_ = 0;
  uint64_t told_taken_ = 0;
  std::optional<uint64_t> total_;  // of what will have come, once the peer has ended
  WindowBytes windows_{};
  Report incoming_{};
  size_t incoming_bytes_ = 0;
  std::vector<Report> told_;  // not all of it sent yet
  size_t told_bytes_ = 0;
};

class Leader {
 public:
  Leader(RemoteTransport& network, const LinkProbePlan& plan)
      : network_(network),
        plan_(plan),
        nodes_(plan.topology.node_count()),
        node_(plan.topology.node_rank[plan.topology.rank]) {}

  LinkModel agree() { return node_ == 0 ? lead() : follow(); }

 private:
  int32_t leader_of(int32_t node) const { return plan_.topology.nodes[node][0]; }
  int32_t node_at(int32_t distance) const { return ((node_ + distance) % nodes_ + nodes_) % nodes_; }

  LinkModel lead() {
    for (int32_t node = 1; node < nodes_; ++node) receive(node, 1);
    const char verdict = plan_.measures ? kMeasure : kTellOnly;
    for (int32_t node = 1; node < nodes_; ++node) send(node, {&verdict, 1});
    LinkModel links = plan_.known;
    if (plan_.measures) {
      measure();
      LinkMeasurement all;
      for (int32_t node = 0; node < nodes_; ++node) add(node, node == 0 ? seen() : receive(node, seen_bytes()), all);
      links = model_links(nodes_, plan_.topology.racks, all);
      links.is_followed = plan_.known.is_followed;
      if (!plan_.known.uplink_bytes_per_us.empty()) links.uplink_bytes_per_us = plan_.known.uplink_bytes_per_us;
    }
    const std::string encoded = encode_links(links, plan_.topology);
    for (int32_t node = 1; node < nodes_; ++node) send(node, encoded);
    return links;
  }

  LinkModel follow() {
    send(0, "r");
    if (receive(0, 1)[0] == kMeasure) {
      measure();
      send(0, seen());
    }
    return decode_links(receive(0, encoded_links_bytes(plan_.topology)), plan_.topology);
  }

  void measure() {
    const std::vector<int32_t> distances = probe_distances(nodes_);
    std::map<int32_t, std::pair<bool, bool>> directions;  // by node: whether this one sends to it, and receives from it
    for (const int32_t distance : distances) {
      directions[node_at(distance)].first = true;
      directions[node_at(-distance)].second = true;
    }
    std::map<int32_t, Exchange> exchanges;
    for (const auto& [node, ways] : directions) {
      exchanges.try_emplace(node, network_, leader_of(node), ways.first, ways.second);
    }
    greet(exchanges);
    const auto start = Clock::now();
    const auto runnable_before = runnable_time();
    const NetworkWait wait{plan_.deadline, plan_.tick, "no end of the measurement of links", start + kSending};
    wait_on_network(network_, wait, [&] {
      std::vector<int32_t> awaited;
      for (auto& [node, exchange] : exchanges) {
        with_peer(leader_of(node), [&] { exchange.advance(Clock::now() - start); });
        if (!exchange.is_done()) awaited.push_back(leader_of(node));
      }
      if (Clock::now() - start >= kSending && !busy_) {
        busy_ = std::chrono::duration<double>(runnable_time() - runnable_before) / (Clock::now() - start);
      }
      return awaited;
    });
    for (const int32_t distance : distances) counted_.push_back(exchanges.at(node_at(-distance)).windows());
  }

  // Connections that are made on demand are made now, and not while it is measured what they carry.
  void greet(const std::map<int32_t, Exchange>& exchanges) {
    std::vector<int32_t> leaders;
    for (const auto& [node, exchange] : exchanges) leaders.push_back(leader_of(node));
    greet_and_wait(network_, leaders, plan_.deadline, plan_.tick);
  }

  size_t seen_bytes() const { return sizeof(double) + probe_distances(nodes_).size() * sizeof(WindowBytes); }
  std::string seen() const {
    std::string bytes(seen_bytes(), '\0');
    std::memcpy(bytes.data(), &*busy_, sizeof *busy_);
    std::memcpy(bytes.data() + sizeof *busy_, counted_.data(), counted_.size() * sizeof(WindowBytes));
    return bytes;
  }
  void add(int32_t to, std::string_view seen, LinkMeasurement& all) const {
    std::memcpy(&all.busy.emplace_back(), seen.data(), sizeof(double));
    seen.remove_prefix(sizeof(double));
    for (const int32_t distance : probe_distances(nodes_)) {
      WindowBytes windows;
      std::memcpy(windows.data(), seen.data(), sizeof windows);
      seen.remove_prefix(sizeof windows);
      Flow& flow = all.flows.emplace_back(Flow{.from = (to - distance + nodes_) % nodes_, .to = to});
      for (const uint64_t bytes : windows) {
        flow.bytes_per_us.push_back(static_cast<double>(bytes) / static_cast<double>(kWindow.count()));
      }
    }
  }

  void send(int32_t node, std::string_view text) {
    move(node, "no room for what is told of the links", text.size(), [&](int32_t peer, size_t done) {
      return network_.try_send(peer, Lane::kPointToPoint, bytes_of(text.substr(done)));
    });
  }
  std::string receive(int32_t node, size_t bytes) {
    std::string text(bytes, '\0');
    move(node, "no word about the links", bytes, [&](int32_t peer, size_t done) {
      return network_.try_receive(peer, Lane::kPointToPoint, std::as_writable_bytes(std::span(text)).subspan(done));
    });
    return text;
  }
  void move(int32_t node, const char* what, size_t bytes, const std::function<size_t(int32_t, size_t)>& try_move) {
    const int32_t peer = leader_of(node);
    size_t done = 0;
    wait_on_network(network_, {plan_.deadline, plan_.tick, what}, [&] {
      done += with_peer(peer, [&] { return try_move(peer, done); });
      return done == bytes ? std::vector<int32_t>() : std::vector{peer};
    });
  }

  RemoteTransport& network_;
  const LinkProbePlan& plan_;
  const int32_t nodes_;
  const int32_t node_;
  std::vector<WindowBytes> counted_;  // from each node that sends to this one, nearest first
  std::optional<double> busy_;        // as in LinkMeasurement
};

void put(std::string& bytes, const std::vector<double>& speeds, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const double speed = speeds.empty() ? 0 : speeds[i];
    bytes.append(reinterpret_cast<const char*>(&speed), sizeof speed);
  }
}

// All of them positive, or none of them there.
std::vector<double> take(std::string_view bytes) {
  std::vector<double> speeds(bytes.size() / sizeof(double));
  if (speeds.empty()) return speeds;
  std::memcpy(speeds.data(), bytes.data(), bytes.size());
  if (std::all_of(speeds.begin(), speeds.end(), [](double speed) { return speed == 0; })) return {};
  const bool is_sane =
      std::all_of(speeds.begin(), speeds.end(), [](double speed) { return std::isfinite(speed) && speed > 0; });
  TORCH_CHECK_WITH(DistBackendError, is_sane, kSenseless);
  return speeds;
}

}  // namespace

LinkModel agree_on_links(RemoteTransport& network, const LinkProbePlan& plan) { return Leader(network, plan).agree(); }

size_t encoded_links_bytes(const Topology& topology) {
  return (topology.nodes.size() + topology.racks.size()) * sizeof(double) + 1;
}

std::string encode_links(const LinkModel& links, const Topology& topology) {
  std::string bytes;
  put(bytes, links.node_bytes_per_us, topology.nodes.size());
  put(bytes, links.uplink_bytes_per_us, topology.racks.size());
  bytes.push_back(links.is_followed ? kFollowed : kFixed);
  return bytes;
}

LinkModel decode_links(std::string_view bytes, const Topology& topology) {
  TORCH_CHECK_WITH(DistBackendError, bytes.size() == encoded_links_bytes(topology), "what is told of the links has ",
                   bytes.size(), " bytes, expected ", encoded_links_bytes(topology));
  const size_t of_nodes = topology.nodes.size() * sizeof(double);
  const size_t of_racks = topology.racks.size() * sizeof(double);
  TORCH_CHECK_WITH(DistBackendError, bytes.back() == kFollowed || bytes.back() == kFixed, kSenseless);
  return {.node_bytes_per_us = take(bytes.substr(0, of_nodes)),
          .uplink_bytes_per_us = take(bytes.substr(of_nodes, of_racks)),
          .is_followed = bytes.back() == kFollowed};
}

}  // namespace zeropg
