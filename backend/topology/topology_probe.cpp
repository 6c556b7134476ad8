#include "backend/topology/topology_probe.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace zeropg {
namespace {

std::string namespace_id(const char* kind) {
  struct stat status {};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return ::stat(path.c_str(), &status) == 0 ? std::to_string(status.st_ino) : "?";
}

std::string probe_boot_id() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return boot_id.empty() ? probe_host_name() : boot_id;
}

}  // namespace

std::string probe_host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string probe_network_id() { return probe_boot_id() + "/net:" + namespace_id("net"); }

std::string probe_host_id() { return probe_network_id() + "/user:" + namespace_id("user"); }

}  // namespace zeropg
