#include "backend/topology/topology_file.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <stdexcept>

#include "backend/diagnostics/json_reader.h"

namespace zeropg {
namespace {

constexpr int64_t kMostNodes = 1'000'000;
constexpr uintmax_t kMostFileBytes = uintmax_t{64} << 20;
constexpr double kLeastGbps = 1e-9;  // a byte per second
constexpr double kMostGbps = 1e9;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

double read_speed(JsonReader& json, const std::string& key) {
  const double speed = json.read_number();
  if (!(speed >= kLeastGbps && speed <= kMostGbps)) {
    json.fail("expected a number of 1e9 bytes/s, from 1e-9 to 1e9, for " + key);
  }
  return speed;
}

class RackReader {
 public:
  explicit RackReader(JsonReader& json) : json_(json) {}

  Rack read(size_t number) {
    json_.read_object([&](const std::string& key) { read_value(key); });
    if (!has("name")) rack_.name = "number " + std::to_string(number);
    if (has("hosts") == has("nodes")) {
      refuse("rack '" + rack_.name + "' needs either hosts, a list of names, or nodes, their number");
    }
    if (has("hosts")) rack_.nodes = static_cast<int64_t>(rack_.hosts.size());
    if (rack_.nodes < 1 || rack_.nodes > kMostNodes) {
      refuse("rack '" + rack_.name + "' has " + std::to_string(rack_.nodes) +
             " nodes, expected a number of at least 1 and at most " + std::to_string(kMostNodes));
    }
    return std::move(rack_);
  }

 private:
  bool has(const char* key) const { return keys_.contains(key); }

  void read_value(const std::string& key) {
    if (!keys_.insert(key).second) json_.fail("the key '" + key + "' stands twice");
    if (key == "name") {
      rack_.name = json_.read_string();
      if (rack_.name.empty()) json_.fail("a rack's name is empty");
    } else if (key == "pod") {
      rack_.pod = json_.read_string();
    } else if (key == "hosts") {
      json_.read_array([&] { rack_.hosts.push_back(json_.read_string()); });
    } else if (key == "nodes") {
      rack_.nodes = json_.read_integer();
    } else if (key == "node_gbps") {
      rack_.node_gbps = read_speed(json_, key);
    } else if (key == "uplink_gbps") {
      rack_.uplink_gbps = read_speed(json_, key);
    } else {
      json_.fail("a rack has the key '" + key + "', expected some of name, pod, hosts, nodes, node_gbps, uplink_gbps");
    }
  }

  JsonReader& json_;
  Rack rack_;
  std::set<std::string, std::less<>> keys_;
};

void check_names(const std::vector<Rack>& racks) {
  std::set<std::string> names;
  std::set<std::string> hosts;
  for (const Rack& rack : racks) {
    if (!names.insert(rack.name).second) {
      refuse("two racks are called '" + rack.name + "'; give each a name of its own");
    }
    for (const std::string& host : rack.hosts) {
      if (!hosts.insert(host).second) refuse("host '" + host + "' is named twice; a host is in one rack");
    }
  }
}

}  // namespace

std::vector<Rack> parse_racks(std::string_view text) {
  JsonReader json(text);
  std::optional<std::vector<Rack>> racks;
  json.read_object([&](const std::string& key) {
    if (key != "racks" || racks) json.fail("the key '" + key + "' stands here, expected racks alone");
    racks.emplace();
    json.read_array([&] { racks->push_back(RackReader(json).read(racks->size())); });
  });
  json.finish();
  if (!racks || racks->empty()) refuse("it has no racks; name at least one, with its hosts or the number of its nodes");
  check_names(*racks);
  return std::move(*racks);
}

TopologyFile read_topology_file(const std::string& path) {
  const auto refuse_file = [&](const std::string& why) { refuse("topology file " + path + ": " + why); };
  std::error_code error;
  // Reading a pipe would wait for a writer, and a device may never end.
  if (!std::filesystem::is_regular_file(path, error)) refuse_file("it cannot be read, or is no regular file");
  if (std::filesystem::file_size(path, error) > kMostFileBytes) refuse_file("it is too large to be one");
  std::ifstream file(path, std::ios::binary);
  TopologyFile result{.text = {std::istreambuf_iterator<char>(file), {}}, .racks = {}};
  if (!file.good() && !file.eof()) refuse_file("it cannot be read");
  try {
    result.racks = parse_racks(result.text);
  } catch (const std::invalid_argument& refusal) {
    refuse_file(refusal.what());
  }
  return result;
}

LinkModel declared_links(const Topology& topology, const std::vector<Rack>& racks) {
  LinkModel links{.node_bytes_per_us = std::vector<double>(topology.nodes.size()),
                  .uplink_bytes_per_us = std::vector<double>(topology.racks.size())};
  for (size_t number = 0; number < topology.racks.size(); ++number) {
    const auto rack = std::find_if(racks.begin(), racks.end(),
                                   [&](const Rack& other) { return other.name == topology.rack_ids[number]; });
    if (rack == racks.end()) continue;
    links.uplink_bytes_per_us[number] = 1000 * rack->uplink_gbps;
    for (const int32_t node : topology.racks[number]) links.node_bytes_per_us[node] = 1000 * rack->node_gbps;
  }
  for (std::vector<double>* speeds : {&links.node_bytes_per_us, &links.uplink_bytes_per_us}) {
    if (std::find(speeds->begin(), speeds->end(), 0) != speeds->end()) speeds->clear();
  }
  return links;
}

const Rack* find_rack(const std::vector<Rack>& racks, std::string_view host) {
  for (const Rack& rack : racks) {
    if (std::find(rack.hosts.begin(), rack.hosts.end(), host) != rack.hosts.end()) return &rack;
  }
  return nullptr;
}

}  // namespace zeropg
