#include "backend/platform/cpu/cgroup.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <vector>

namespace zeropg {
namespace {

// Calls `visit` with every folder, from the process's own control group up to the root, that may hold limits of
// `controller`. In a container without a cgroup namespace the path in /proc names a folder of the host that is not
// mounted here; the root of the mount is then the container's own group, so the walk up still finds the limit.
void visit_cgroup_folders(const MachineFiles& files, const std::string& controller,
                          const std::function<void(const std::string&)>& visit) {
  std::ifstream memberships(files.proc + "/self/cgroup");
  for (std::string line; std::getline(memberships, line);) {  // "<id>:<controllers>:<path>", v2: "0::<path>"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_unified = controllers.empty();
    if (!is_unified && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const std::vector<std::string> mounts = is_unified ? std::vector<std::string>{"", "/unified"}
                                                       : std::vector<std::string>{"/" + controllers, "/" + controller};
    for (const std::string& mount : mounts) {
      std::string path = line.substr(second + 1);
      while (!path.empty() && path != "/") {
        visit(files.cgroup + mount + path);
        path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
      }
      visit(files.cgroup + mount);
    }
  }
}

template <typename Number>
bool read_number(const std::string& path, Number* number) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *number);  // fails on "max"
}

// The number behind `field` in a file of lines like "field 12"; `otherwise` where there is none.
int64_t field_of(const std::string& path, const std::string& field, int64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    int64_t number = 0;
    if (line.starts_with(field + " ") && std::istringstream(line.substr(field.size())) >> number) return number;
  }
  return otherwise;
}

// Of /proc/meminfo, which counts in KiB.
int64_t meminfo_bytes(const MachineFiles& files, const std::string& field) {
  const int64_t kibibytes = field_of(files.proc + "/meminfo", field, -1);
  return kibibytes < 0 ? std::numeric_limits<int64_t>::max() : kibibytes * 1024;
}

}  // namespace

int64_t memory_limit_bytes(const MachineFiles& files) {
  int64_t limit = meminfo_bytes(files, "MemTotal:");
  visit_cgroup_folders(files, "memory", [&](const std::string& folder) {
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      int64_t bytes = 0;
      if (read_number(folder + name, &bytes) && bytes > 0) limit = std::min(limit, bytes);
    }
  });
  return limit;
}

int64_t memory_available_bytes(const MachineFiles& files) {
  struct Names {
    const char* limit;
    const char* usage;
    const char* cached;
  };
  constexpr Names kVersions[] = {{"/memory.max", "/memory.current", "inactive_file"},
                                 {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"}};
  int64_t available = meminfo_bytes(files, "MemAvailable:");
  visit_cgroup_folders(files, "memory", [&](const std::string& folder) {
    for (const auto& [limit_name, usage_name, cached_name] : kVersions) {
      int64_t limit = 0;
      int64_t usage = 0;
      if (!read_number(folder + limit_name, &limit) || !read_number(folder + usage_name, &usage)) continue;
      const int64_t cached = std::min(usage, field_of(folder + "/memory.stat", cached_name, 0));
      available = std::min(available, std::max<int64_t>(0, limit - (usage - cached)));
    }
  });
  return available;
}

double cpu_limit(const MachineFiles& files) {
  double limit = std::numeric_limits<double>::infinity();
  visit_cgroup_folders(files, "cpu", [&](const std::string& folder) {
    double quota_us = 0;
    double period_us = 0;
    std::ifstream unified(folder + "/cpu.max");  // "<quota>|max <period>"
    const bool has_quota =
        (unified >> quota_us >> period_us) || (read_number(folder + "/cpu.cfs_quota_us", &quota_us) &&
                                               read_number(folder + "/cpu.cfs_period_us", &period_us));
    if (has_quota && quota_us > 0 && period_us > 0) limit = std::min(limit, quota_us / period_us);
  });
  return limit;
}

}  // namespace zeropg
