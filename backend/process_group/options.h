// What a user may set for one process group, and the only reader of ZEROPG_* environment variables.
#pragma once

#include <torch/version.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/topology/link_model.h"
#include "backend/transport/network/registry.h"

namespace zeropg {

// Passed as `pg_options=` to init_process_group / new_group. Every rank of a group must give the same values.
struct BackendOptions : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout);
  BackendOptions(const BackendOptions&) = default;

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  // Without this c10d would slice the options when it makes a child group.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  // Forces an algorithm per operation ("all_reduce" -> "all_reduce_staged"); an operation that is not named is planned.
  std::map<std::string, std::string> algorithms;
  // Staging memory: each rank owns two banks of this size in the shared arena, so one chunk of a collective is at most
  // this long. Multiple of 4096.
  int64_t bank_bytes = int64_t{1} << 20;
  // Ring memory per ordered pair of ranks and lane. Power of two. Untouched rings cost no memory. From 65 ranks of a
  // node on rings are smaller: shared_mailbox_bytes in shm_arena.h.
  int64_t mailbox_bytes = int64_t{256} << 10;
  // Shared memory for tensors (ProcessGroupZero::allocateTensor, zeropg.empty), at most this much for each rank; what
  // no tensor has used costs nothing. Negative: this rank's share of the machine's memory. 0: none.
  int64_t pool_bytes = -1;
  // A rank may send this much of a stream to a rank on another node before that one takes any; less in large groups:
  // shared_window_bytes in byte_stream.h.
  int64_t window_bytes = int64_t{4} << 20;
  // Whether large messages between ranks of a node, and blocks of an all-to-all, may be read from the sender's memory
  // (process_vm_readv), where a trial shows that this works.
  bool cma = true;
  // What carries bytes between nodes: a name of the registry, or "automatic" for the best that every rank has.
  std::string network{kAutomaticNetwork};
  // The network interfaces to use between nodes, as InterfaceRules reads it: "eth,ib0", "^docker", "10.1.0.0/16".
  // Empty: the environment's, else all that are up.
  std::string interfaces;
  // The TCP ports at which ranks wait for those of other nodes ("29600-29700"). Empty: the environment's, else any.
  std::string ports;
  // A folder with the UCX to use (lib/libucp.so.0). Empty: the environment's, else the system's where that has RDMA,
  // else the libucx wheel beside torch.
  std::string ucx_root;
  // Proves membership. Empty: the environment's, else a random one through the rendezvous store.
  std::string secret;
  // Whether every byte between nodes is proven to come from its rank, so that a change on the way is an error. It costs
  // the time of SHA-256 on either side, and does not encrypt. Also on where the environment's is 1.
  bool authenticate_frames = false;
  // When ranks of several nodes connect: "all" while the group is made; "on_demand", each pair as soon as one
  // has something for the other; "automatic": the environment's, else on demand in groups of more than 128 ranks.
  std::string connections{kAutomaticConnections};
  // Ranks with equal host ids share memory. Empty: the environment's, else probed.
  std::string host_id;
  // Ranks of a node with equal domain ids are near each other: their CPUs share a cache, or the way to their memory.
  // Empty: the environment's, else probed. Used where all ranks of the node have one.
  std::string domain_id;
  // Nodes with equal rack ids share a rack. Empty: the environment's, else none. All ranks have one or none has.
  std::string rack_id;
  // A JSON file (backend/topology/topology_file.h) that says which hosts, by name or host id, are in which rack. The
  // same on every rank. Empty: the environment's, else none.
  std::string topology_file;
  // Whether a group on several nodes measures their links when it is made, in about 170 ms, and keeps them current
  // while it works, so that collectives follow them. That of rank 0 counts. What the topology file says is believed
  // instead, as is what the default group, or the parent of a split one, knows of the same nodes.
  bool measure_links = true;
  KnownLinks known_links;  // what they know; not the user's to set

  // Checks ranges and fills what is empty from the environment:
  //   ZEROPG_SECRET       the secret itself
  //   ZEROPG_SECRET_FILE  a file that holds it, readable by its owner only (mode 0600 or 0400)
  //   ZEROPG_AUTHENTICATE_FRAMES  1 or 0, as above
  //   ZEROPG_CONNECTIONS  when ranks connect, as above
  //   ZEROPG_UCX_ROOT     which UCX, as above
  //   ZEROPG_INTERFACE    network interfaces, as above
  //   ZEROPG_PORTS        TCP ports, as above
  //   ZEROPG_HOST_ID      this machine's identity, where the probe would be wrong (containers that share a boot id)
  //   ZEROPG_RACK_ID      this machine's rack
  //   ZEROPG_TOPOLOGY_FILE  which hosts are in which rack, as above
  //   ZEROPG_DOMAIN_ID    this process's domain, where the probe would be wrong (CPUs that are hidden or not bound)
  // Throws ValueError naming the option and the accepted range.
  void resolve();
};

}  // namespace zeropg
