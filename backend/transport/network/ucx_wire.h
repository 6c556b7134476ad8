// Frames over UCX active messages. For RDMA: over TCP, UCX obeys whoever connects to its port (see README.md).
//
// Note [UCX and strangers]
// UCX names no sender, and an endpoint that proved something once cannot be told from another later. So every message
// begins with a seal: a keyed digest over its header and its number, under a key of the two ranks. What is not sealed
// is dropped and counted; a number that was taken before is too. The payload is covered where frames are to be
// authentic, by its digest in the header; otherwise who can change bytes inside the fabric can change numbers, as on
// any plain connection.
//
// Note [How payloads travel]
// Most come with their header (eager). With RDMA long ones wait at their sender, in memory that the device may read,
// until the receiver has seen the seal and fetches them (rendezvous): then each end copies them once, and no stranger
// can make a rank fetch anything. Over TCP nothing is fetched: UCX would cut it into messages all the same, after
// another round trip (1 MiB between two nodes: 3.5 ms instead of 0.4).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend/transport/network/ucx/rdma.h"
#include "backend/transport/network/ucx_envelope.h"
#include "backend/transport/network/wire.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

struct UcxWireOptions {
  std::string root;  // see ucx_library.h
  int32_t rank = 0;
  int32_t world_size = 1;
  // The seal of a message that goes from one rank to another. Used once the peer can be reached.
  std::function<Seal(int32_t from, int32_t to, std::span<const std::byte> message)> seal;
  bool authenticates_payloads = false;  // a payload that was changed on the way loses the peer
  std::string devices;                  // what UCX calls TLS; empty: RDMA where this machine has it, else TCP
  size_t fetched_bytes = 0;  // payloads from this size on are fetched; 0: from 64 KiB on with RDMA, else none
};

class UcxWire : public Wire {
 public:
  // DistBackendError where there is no UCX, or this was built without its headers.
  static std::unique_ptr<UcxWire> make(UcxWireOptions options);
  // Whether there is a UCX here that can use RDMA; where the machine has RDMA, and there is none, what is in the way.
  // Looks for devices before it loads anything.
  static WireProbe probe_rdma(const std::string& root, bool has_device = machine_has_rdma());

  // What peers need to reach this rank.
  virtual std::string address() const = 0;
  // From now on `peer` is heard, and connected with as soon as there is something for it. `address` must be proven to
  // be the peer's own: UCX believes it.
  virtual void introduce(int32_t peer, std::string address) = 0;
  virtual uint64_t dropped() const = 0;  // messages that were not sealed
};

// For the registry.
WireProbe probe_ucx(const std::string& library_root);
std::unique_ptr<Wire> join_ucx(const WireOptions& options, OutOfBand& out_of_band);

}  // namespace zeropg
