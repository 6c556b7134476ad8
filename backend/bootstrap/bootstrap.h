// From a c10d store to connected ranks: who is where, who may join, the shared arena of the node, and the
// connections to other nodes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/topology/network_rules.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/registry.h"
#include "backend/transport/network/remote_transport.h"
#include "backend/transport/shm/shm_arena.h"
#include "backend/transport/shm/tensor_pool.h"

namespace zeropg {

struct BootstrapOptions {
  static constexpr int64_t kShareOfMemory = -1;

  std::chrono::milliseconds timeout{};
  std::string members;  // of describe_members, for errors
  std::string secret;   // empty: a random one through the store (keeps out only those who cannot reach the store)
  std::string host_id;  // empty: probed; the same of the next
  std::string domain_id;
  std::string rack_id;        // empty: none, unless the topology file names one
  std::string topology_file;  // its path; empty: none
  KnownLinks known_links;     // of groups that were made before; that of rank 0 counts, as does the next
  bool measures_links = true;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t pool_bytes = kShareOfMemory;      // of the tensor pool, for each rank
  int64_t window_bytes = int64_t{1} << 20;  // per stream to a rank on another node
  std::string network{kAutomaticNetwork};   // or a wire's name
  std::string library_root;                 // see WireOptions, as the next
  bool authenticates_frames = false;
  std::string connections{kAutomaticConnections};  // see check_connections
  InterfaceRules interfaces;                       // between nodes, as the ports
  PortRange ports;
};

// A connection inside the node over which the leader passes descriptors; kept for later SharedSegments.
class DescriptorChannel;

struct BootstrapResult {
  Topology topology;
  std::unique_ptr<ShmArena> arena;   // of the ranks of this node
  std::shared_ptr<TensorPool> pool;  // as the arena; life shared with the tensors in it
  std::shared_ptr<DescriptorChannel> channel;
  std::unique_ptr<RemoteTransport> network;  // to the ranks of other nodes; null when there are none
};

// Collective over all ranks of `store`'s prefix. Throws DistBackendError naming the ranks that did not come in time.
BootstrapResult bootstrap(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                          const BootstrapOptions& options);

// Collective over the ranks of a node: its leader makes a descriptor with `create`, every rank returns its own copy of
// it. Calls must come in the same order on all ranks (no other use of the channel in between). Every message proves the
// group's secret.
int share_descriptor(
    DescriptorChannel& channel, const std::function<int()>& create, std::chrono::milliseconds timeout,
    const std::function<void()>& tick = [] {});

}  // namespace zeropg
