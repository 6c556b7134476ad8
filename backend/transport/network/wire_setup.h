// How a wire comes to be: whether it can carry bytes here, and what the ranks' bootstrap lends it to find its peers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/platform/process/descriptor.h"

namespace zeropg {

// What a wire says of this machine.
struct WireProbe {
  bool is_viable = false;
  std::string obstacle;  // what is in the way where the machine seems made for this wire; empty: it does not
};

struct WireOptions {
  int32_t rank = 0;
  int32_t world_size = 1;
  std::vector<int32_t> peers;  // those on other nodes
  std::string library_root;    // a folder with the library to load, for wires that load one; empty: they look for it
  bool authenticates_frames = false;  // whether every byte is to be proven: a change on the way loses the peer
  bool connects_on_demand = false;    // with each peer as soon as there is something for it, not with all at once
};

// How to reach a peer.
struct PeerContact {
  std::string address;  // proven to be the peer's own
  std::string key;      // known to the two ranks only; every group and every wire has others
};

// A TCP connection whose other end has proven the group's secret. Non-blocking.
struct PeerConnection {
  Descriptor socket;
  std::string key;  // known to the two ranks only; every connection has another
};

struct ConnectorNews {
  struct Made {
    int32_t peer = -1;
    PeerConnection connection;
  };
  struct Lost {
    int32_t peer = -1;
    std::string reason;
    bool has_left = false;  // nobody listens any more where it did
  };
  std::vector<Made> made;  // by this rank's call or the peer's; each peer once
  std::vector<Lost> lost;  // called in vain; each peer once, and never one of those that were made
};

// Makes connections to other ranks while a group lives, for a wire that has none at first. One thread at a time. No
// call waits.
class Connector {
 public:
  virtual ~Connector() = default;
  // Readable when advance() has something to do.
  virtual int descriptor() const = 0;
  // A connection with `peer` is wanted; nothing where one is made, or being made.
  virtual void call(int32_t peer) = 0;
  virtual ConnectorNews advance() = 0;
};

// What ranks can do for each other before there is a wire. Collective over all peers; DistBackendError at the
// bootstrap's deadline, naming those that did not come.
class OutOfBand {
 public:
  virtual ~OutOfBand() = default;
  // To every peer, by rank.
  virtual std::vector<PeerConnection> connect_to_peers() = 0;
  // Makes those that are asked for, later. Waits until every peer can be called.
  virtual std::unique_ptr<Connector> connect_on_demand() = 0;
  // Publishes where this rank can be reached. Returns the same of every peer, by rank.
  virtual std::vector<PeerContact> exchange_addresses(const std::string& own) = 0;
};

}  // namespace zeropg
