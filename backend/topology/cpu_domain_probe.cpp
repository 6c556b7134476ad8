#include "backend/topology/cpu_domain_probe.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "backend/platform/cpu/affinity.h"

namespace zeropg {
namespace {

std::string first_line(const std::filesystem::path& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// The kernel's lists: "0-3,8,10-11".
bool contains(const std::string& list, int32_t cpu) {
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream numbers(range);
    int32_t first = -1;
    if (!(numbers >> first)) return false;
    int32_t last = first;
    char dash = 0;
    if (numbers >> dash && !(numbers >> last)) return false;
    if (first <= cpu && cpu <= last) return true;
  }
  return false;
}

bool contains_all(const std::string& list, const std::vector<int32_t>& cpus) {
  return std::all_of(cpus.begin(), cpus.end(), [&](int32_t cpu) { return contains(list, cpu); });
}

// Folders `<parent>/<prefix>*`, in no order.
std::vector<std::filesystem::path> folders(const std::filesystem::path& parent, const std::string& prefix) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(prefix)) found.push_back(entry->path());
  }
  return found;
}

}  // namespace

std::string domain_id_of(const std::vector<int32_t>& cpus, const std::string& system) {
  if (cpus.empty()) return "";
  const auto own = std::filesystem::path(system) / "cpu" / ("cpu" + std::to_string(cpus[0])) / "cache";
  for (const auto& cache : folders(own, "index")) {
    if (first_line(cache / "level") != "3") continue;
    const std::string list = first_line(cache / "shared_cpu_list");
    if (contains_all(list, cpus)) return "cache:" + list;
  }
  const std::string prefix = "node";
  for (const auto& node : folders(std::filesystem::path(system) / "node", prefix)) {
    if (contains_all(first_line(node / "cpulist"), cpus)) {
      return "memory:" + node.filename().string().substr(prefix.size());
    }
  }
  return "";
}

std::string probe_domain_id() { return domain_id_of(allowed_cpus(), "/sys/devices/system"); }

}  // namespace zeropg
