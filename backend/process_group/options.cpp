#include "backend/process_group/options.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "backend/topology/network_rules.h"

namespace zeropg {

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kLargestRegionBytes = int64_t{1} << 30;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string read_secret_file(const std::string& path) {
  struct stat status {};
  TORCH_CHECK_VALUE(::stat(path.c_str(), &status) == 0, "[zeropg] ZEROPG_SECRET_FILE: cannot open ", path,
                    "; give the path of a readable file or unset the variable.");
  // Reading a pipe would wait for a writer, and a device may never end.
  TORCH_CHECK_VALUE(S_ISREG(status.st_mode), "[zeropg] ZEROPG_SECRET_FILE: ", path,
                    " is not a regular file; write the secret into one.");
  TORCH_CHECK_VALUE((status.st_mode & (S_IRWXG | S_IRWXO)) == 0, "[zeropg] ZEROPG_SECRET_FILE: ", path,
                    " is accessible by other users; run chmod 600 on it.");
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  std::string secret = content.str();
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) {
    secret.pop_back();
  }
  TORCH_CHECK_VALUE(file.good() && !secret.empty(), "[zeropg] ZEROPG_SECRET_FILE: ", path,
                    " is empty or unreadable; write the secret into it.");
  return secret;
}

bool is_set(const char* name) {
  const std::string value = environment(name);
  TORCH_CHECK_VALUE(value.empty() || value == "0" || value == "1", "[zeropg] ", name, " is '", value,
                    "', expected 1 or 0.");
  return value == "1";
}

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

}  // namespace

BackendOptions::BackendOptions(std::chrono::milliseconds timeout) : c10d::Backend::Options("zeropg", timeout) {}

void BackendOptions::resolve() {
  TORCH_CHECK_VALUE(timeout.count() > 0, "[zeropg] BackendOptions: timeout is ", timeout.count(),
                    " ms, expected a positive time.");
  TORCH_CHECK_VALUE(bank_bytes >= kPageBytes && bank_bytes <= kLargestRegionBytes && bank_bytes % kPageBytes == 0,
                    "[zeropg] BackendOptions: bank_bytes is ", bank_bytes, ", expected a multiple of ", kPageBytes,
                    " up to ", kLargestRegionBytes, ".");
  TORCH_CHECK_VALUE(
      mailbox_bytes >= kPageBytes && mailbox_bytes <= kLargestRegionBytes && is_power_of_two(mailbox_bytes),
      "[zeropg] BackendOptions: mailbox_bytes is ", mailbox_bytes, ", expected a power of two from ", kPageBytes,
      " to ", kLargestRegionBytes, ".");
  TORCH_CHECK_VALUE(pool_bytes >= -1, "[zeropg] BackendOptions: pool_bytes is ", pool_bytes,
                    ", expected a size in bytes, or -1 for this rank's share of the machine's memory.");
  TORCH_CHECK_VALUE(window_bytes >= kPageBytes && window_bytes <= kLargestRegionBytes,
                    "[zeropg] BackendOptions: window_bytes is ", window_bytes, ", expected ", kPageBytes, " to ",
                    kLargestRegionBytes, ".");
  check_network(network);
  if (secret.empty()) {
    secret = environment("ZEROPG_SECRET");
  }
  if (secret.empty()) {
    const std::string path = environment("ZEROPG_SECRET_FILE");
    if (!path.empty()) {
      secret = read_secret_file(path);
    }
  }
  authenticate_frames = is_set("ZEROPG_AUTHENTICATE_FRAMES") || authenticate_frames;
  const std::string mode = environment("ZEROPG_CONNECTIONS");
  if (connections == kAutomaticConnections && !mode.empty()) {
    connections = mode;
  }
  const std::pair<std::string*, const char*> from_environment[] = {
      {&host_id, "ZEROPG_HOST_ID"},   {&domain_id, "ZEROPG_DOMAIN_ID"},  {&rack_id, "ZEROPG_RACK_ID"},
      {&ucx_root, "ZEROPG_UCX_ROOT"}, {&interfaces, "ZEROPG_INTERFACE"}, {&topology_file, "ZEROPG_TOPOLOGY_FILE"},
      {&ports, "ZEROPG_PORTS"}};
  for (const auto& [option, name] : from_environment) {
    if (option->empty()) {
      *option = environment(name);
    }
  }
  check_connections(connections);
  InterfaceRules{interfaces};  // both throw for what they cannot read
  parse_ports(ports);
}

}  // namespace zeropg
