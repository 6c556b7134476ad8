#include "backend/transport/cgroup.h"

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

}  // namespace

int64_t memory_limit_bytes(const MachineFiles& files) {
  int64_t limit = std::numeric_limits<int64_t>::max();
  std::ifstream meminfo(files.proc + "/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    int64_t kibibytes = 0;
    if (line.starts_with("MemTotal:") && std::istringstream(line.substr(9)) >> kibibytes) limit = kibibytes * 1024;
  }
  visit_cgroup_folders(files, "memory", [&](const std::string& folder) {
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      int64_t bytes = 0;
      if (read_number(folder + name, &bytes) && bytes > 0) limit = std::min(limit, bytes);
    }
  });
  return limit;
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
