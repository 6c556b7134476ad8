// Whether this machine has RDMA: looks for devices only, loads nothing.
#pragma once

#include <filesystem>
#include <system_error>

namespace zeropg {

inline bool machine_has_rdma() {
  std::error_code ignored;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", ignored);
  return devices != std::filesystem::directory_iterator();
}

}  // namespace zeropg
