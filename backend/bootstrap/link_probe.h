// Measures the links between nodes: their leaders all send at once for a fixed short time, over the connections that
// are there, and count what comes.
//
//   leader -> first leader   one byte: it is ready
//   first leader -> leader   one byte: whether to measure
//   leader -> leader         bytes, in the lane of collectives; how many came, and how many there were, in the other
//   leader -> first leader   how busy it was, and what came from each node in each window
//   first leader -> leader   the model, which so is the same everywhere
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/remote_transport.h"

namespace zeropg {

struct LinkProbePlan {
  const Topology& topology;  // this rank leads its node
  // Of the first leader, whose word counts: what is known without measuring, and whether the speeds of nodes are to be
  // measured nevertheless. Known uplinks stay as they are.
  LinkModel known;
  bool measures = false;
  Clock::time_point deadline;
  const Tick& tick;
};

// Collective over the leaders of all nodes; takes about 170 ms if it measures. Errors as those of wait_on_network.
LinkModel agree_on_links(RemoteTransport& network, const LinkProbePlan& plan);

// As a leader hands it on to its node: of one length for a topology.
std::string encode_links(const LinkModel& links, const Topology& topology);
size_t encoded_links_bytes(const Topology& topology);
LinkModel decode_links(std::string_view bytes, const Topology& topology);  // DistBackendError where it is none

}  // namespace zeropg
