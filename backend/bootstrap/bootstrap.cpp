#include "backend/bootstrap/bootstrap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "backend/bootstrap/join_network.h"
#include "backend/bootstrap/link_probe.h"
#include "backend/bootstrap/node_admission.h"
#include "backend/bootstrap/sockets/authentication.h"
#include "backend/bootstrap/store_exchange.h"
#include "backend/bootstrap/with_peer.h"
#include "backend/cryptography/derived_keys.h"
#include "backend/diagnostics/peer_lost.h"
#include "backend/platform/memory/pages.h"
#include "backend/platform/process/doorbell.h"
#include "backend/topology/cpu_domain_probe.h"
#include "backend/topology/topology.h"
#include "backend/topology/topology_file.h"
#include "backend/topology/topology_probe.h"

namespace zeropg {

// The leader holds a connection to every other rank of the node, in rank order; the others hold one to the leader.
class DescriptorChannel {
 public:
  DescriptorChannel(int32_t rank, int32_t world_size, std::vector<Member> peers, bool is_leader)
      : rank(rank), world_size(world_size), peers(std::move(peers)), is_leader(is_leader) {}

  const int32_t rank;
  const int32_t world_size;
  std::vector<Member> peers;
  const bool is_leader;
};

namespace {

constexpr size_t kDescriptorsPerMessage = 64;

void send_descriptors(Member& peer, const std::vector<int>& descriptors, Clock::time_point deadline) {
  with_peer(peer.rank, [&] {
    for (size_t i = 0; i < descriptors.size(); i += kDescriptorsPerMessage) {
      const std::span<const int> rest = std::span(descriptors).subspan(i);
      peer.connection.send(MessageKind::kDescriptors, "", rest.first(std::min(rest.size(), kDescriptorsPerMessage)),
                           deadline);
    }
  });
}

std::vector<Descriptor> receive_descriptors(Member& peer, size_t count, Clock::time_point deadline,
                                            const std::function<void()>& tick) {
  std::vector<Descriptor> descriptors;
  while (descriptors.size() < count) {
    const size_t expected = std::min(count - descriptors.size(), kDescriptorsPerMessage);
    Packet packet = with_peer(
        peer.rank, [&] { return peer.connection.receive(MessageKind::kDescriptors, expected, deadline, tick); });
    if (packet.descriptors.size() != expected) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str("rank ", peer.rank, " sent ", packet.descriptors.size(), " descriptors, expected ",
                               expected, "; this process may have run into its limit of open files (ulimit -n)"));
    }
    for (Descriptor& fd : packet.descriptors) descriptors.push_back(std::move(fd));
  }
  return descriptors;
}

struct Session {
  int32_t rank;
  int32_t local_rank;
  int32_t world_size;
  std::string group;          // a name that no other group has
  std::vector<int32_t> node;  // the ranks of this node
  Clock::time_point deadline;
  Tick tick;
  MeetingPlace place;
  ArenaGeometry geometry;
  int64_t pool_bytes;  // for each rank, or kShareOfMemory
  LinkModel known_links;
  bool measures_links;
};

Descriptor create_pool(int32_t world_size, int64_t pool_bytes) {
  const bool is_automatic = pool_bytes == BootstrapOptions::kShareOfMemory;
  return Descriptor(
      TensorPool::create(world_size, is_automatic ? TensorPool::share_of_memory(world_size) : pool_bytes));
}

std::shared_ptr<TensorPool> map_pool(const Descriptor& fd, const Session& session) {
  std::shared_ptr<TensorPool> pool;
  try {
    pool = std::make_shared<TensorPool>(fd.get(), session.local_rank, static_cast<int32_t>(session.node.size()));
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("tensor pool: ", error.what_without_backtrace(),
                             "; give BackendOptions(pool_bytes=...) a smaller value, or 0, on every rank"));
  }
  const int64_t wanted = session.pool_bytes;
  TORCH_CHECK_WITH(DistBackendError,
                   wanted == BootstrapOptions::kShareOfMemory ||
                       (wanted <= pool->bytes_per_rank() && pool->bytes_per_rank() < wanted + kSmallPageBytes),
                   "tensor pool: it has ", pool->bytes_per_rank(), " bytes for each rank, expected ", wanted,
                   "; give every rank the same pool_bytes");
  return pool;
}

std::function<void()> tick_for(int32_t peer, const Session& session) {
  return [&tick = session.tick, awaited = std::vector{peer}] { tick(awaited); };
}

// Leader: agrees with those of other nodes on what the links carry, and tells its own node.
void share_links(const Session& session, std::vector<Member>& members, BootstrapResult* result) {
  Topology& topology = result->topology;
  if (topology.is_one_node()) return;
  topology.links = agree_on_links(
      *result->network, {topology, session.known_links, session.measures_links, session.deadline, session.tick});
  const std::string encoded = encode_links(topology.links, topology);
  for (Member& member : members) {
    with_peer(member.rank, [&] {
      for (size_t i = 0; i < encoded.size(); i += AuthenticatedSocket::kMaxBodyBytes) {
        member.connection.send(MessageKind::kLinks, encoded.substr(i, AuthenticatedSocket::kMaxBodyBytes), {},
                               session.deadline);
      }
    });
  }
}

void receive_links(const Session& session, Member& leader, Topology* topology) {
  if (topology->is_one_node()) return;
  std::string encoded;
  while (encoded.size() < encoded_links_bytes(*topology)) {
    encoded +=
        with_peer(leader.rank, [&] {
          return leader.connection.receive(MessageKind::kLinks, 0, session.deadline, tick_for(leader.rank, session));
        }).bytes;
  }
  topology->links = decode_links(encoded, *topology);
}

// Leader: lets the members in, hands out arena and doorbells, and waits until everybody has mapped them.
void host(const Session& session, StoreExchange& store_exchange, const Descriptor& listener, BootstrapResult* result) {
  std::vector<int32_t> others = session.node;
  std::erase(others, session.rank);
  std::vector<Member> members = admit_members(listener, session.place, others, session.deadline, session.tick);

  Descriptor arena(ShmArena::create(session.geometry));
  const Descriptor pool = create_pool(session.geometry.world_size, session.pool_bytes);
  std::vector<int> handed_out{arena.get(), pool.get()};
  for (const int32_t rank : session.node) {
    const auto member = std::find_if(members.begin(), members.end(), [&](const Member& m) { return m.rank == rank; });
    handed_out.push_back(member == members.end() ? process_doorbell() : member->doorbell.get());
  }
  for (Member& member : members) send_descriptors(member, handed_out, session.deadline);
  result->arena = std::make_unique<ShmArena>(arena.release(), session.geometry, session.local_rank);
  result->pool = map_pool(pool, session);
  for (Member& member : members) {
    with_peer(member.rank, [&] {
      return member.connection.receive(MessageKind::kReady, 0, session.deadline, tick_for(member.rank, session));
    });
  }
  share_links(session, members, result);
  if (session.rank == 0) store_exchange.clean_up();  // rank 0 leads its node, and is connected to all other nodes
  for (Member& member : members) {
    with_peer(member.rank, [&] { member.connection.send(MessageKind::kGo, "", {}, session.deadline); });
  }
  std::vector<Descriptor> doorbells(session.node.size());
  for (Member& member : members) {
    doorbells[static_cast<size_t>(result->topology.local_rank[member.rank])] = std::move(member.doorbell);
  }
  result->arena->set_doorbells(std::move(doorbells));
  result->channel = std::make_shared<DescriptorChannel>(session.rank, session.world_size, std::move(members), true);
}

void join(const Session& session, BootstrapResult* result) {
  const int32_t leader_rank = session.node[0];
  std::vector<Member> peers(1);
  Member& leader = peers[0];
  const std::function<void()> tick = tick_for(leader_rank, session);
  leader.rank = leader_rank;
  leader.connection = with_peer(leader_rank, [&] {
    return join_leader(session.place, session.rank, process_doorbell(), session.deadline, tick);
  });
  std::vector<Descriptor> received = receive_descriptors(leader, 2 + session.node.size(), session.deadline, tick);
  result->arena = std::make_unique<ShmArena>(received[0].release(), session.geometry, session.local_rank);
  result->pool = map_pool(received[1], session);
  received.erase(received.begin(), received.begin() + 2);
  received[session.local_rank].reset();
  with_peer(leader_rank, [&] { leader.connection.send(MessageKind::kReady, "", {}, session.deadline); });
  receive_links(session, leader, &result->topology);
  with_peer(leader_rank, [&] { return leader.connection.receive(MessageKind::kGo, 0, session.deadline, tick); });
  result->arena->set_doorbells(std::move(received));
  result->channel = std::make_shared<DescriptorChannel>(session.rank, session.world_size, std::move(peers), false);
}

// The first ranks of nodes meet rank 0, so that what is in the way between machines is found while the group is made.
std::vector<int32_t> first_met_on_demand(const Topology& topology) {
  const std::vector<int32_t>& own_node = topology.nodes[topology.node_rank[topology.rank]];
  std::vector<int32_t> met;
  if (topology.rank == own_node[0] && topology.rank != 0) met.push_back(0);
  if (topology.rank == 0) {
    for (const std::vector<int32_t>& node : topology.nodes) {
      if (node[0] != 0) met.push_back(node[0]);
    }
  }
  return met;
}

NetworkPlan plan_network(const Session& session, const Topology& topology, const BootstrapOptions& options) {
  NetworkPlan plan{.rank = session.rank,
                   .world_size = session.world_size,
                   .peers = {},
                   .first_met = {},
                   .window_bytes = shared_window_bytes(options.window_bytes, session.world_size),
                   .group = session.group,
                   .key = session.place.key,
                   .interfaces = options.interfaces,
                   .ports = options.ports,
                   .library_root = options.library_root,
                   .authenticates_frames = options.authenticates_frames,
                   .connects_on_demand = connects_on_demand(options.connections, session.world_size),
                   .deadline = session.deadline,
                   .tick = session.tick};
  for (int32_t peer = 0; peer < session.world_size; ++peer) {
    if (topology.node_rank[peer] != topology.node_rank[session.rank]) plan.peers.push_back(peer);
  }
  plan.first_met = plan.connects_on_demand ? first_met_on_demand(topology) : plan.peers;
  return plan;
}

int32_t largest_node(const Topology& topology) {
  const auto by_size = [](const auto& one, const auto& other) { return one.size() < other.size(); };
  return static_cast<int32_t>(std::max_element(topology.nodes.begin(), topology.nodes.end(), by_size)->size());
}

RankPlace place_of(const BootstrapOptions& options) {
  return {.host_id = options.host_id.empty() ? probe_host_id() : options.host_id,
          .domain_id = options.domain_id.empty() ? probe_domain_id() : options.domain_id,
          .rack_id = options.rack_id};
}

// Finds this host in the topology file, and writes its rack into the record. Returns all racks of the file.
std::vector<Rack> look_up_rack(const BootstrapOptions& options, RankRecord* own) {
  TopologyFile file;
  try {
    file = read_topology_file(options.topology_file);
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  const std::string start = "topology file " + options.topology_file + ": ";
  own->host_name = options.host_id.empty() ? probe_host_name() : options.host_id;
  own->topology_digest = to_hex(sha256(file.text));
  const Rack* rack = find_rack(file.racks, own->host_name);
  TORCH_CHECK_WITH(DistBackendError, rack != nullptr, start, "no rack has the host ", own->host_name,
                   ", on which this rank runs; name it in the hosts of a rack as `hostname` does, or as ZEROPG_HOST_ID "
                   "where that is set");
  TORCH_CHECK_WITH(DistBackendError, own->place.rack_id.empty() || own->place.rack_id == rack->name, start, "host ",
                   own->host_name, " is in rack ", rack->name, ", but ZEROPG_RACK_ID is ", own->place.rack_id,
                   "; correct one of them, or leave one out");
  own->place.rack_id = rack->name;
  return file.racks;
}

constexpr int32_t kMostFollowedRanks = 256;  // larger groups have equal shares anyhow

// What the topology file says counts more than what was measured before. Links are followed where shares of nodes can
// be: of two nodes they are equal, and what crosses racks says little about a node's link.
LinkModel links_before_measuring(const Topology& topology, const std::vector<Rack>& racks,
                                 const BootstrapOptions& options) {
  LinkModel links = declared_links(topology, racks);
  links.is_followed = options.measures_links && links.node_bytes_per_us.empty() && topology.node_count() > 2 &&
                      topology.world_size() <= kMostFollowedRanks && topology.racks.size() < 2;
  LinkModel before = links_of(topology, options.known_links);
  if (links.node_bytes_per_us.empty()) links.node_bytes_per_us = std::move(before.node_bytes_per_us);
  if (links.uplink_bytes_per_us.empty()) links.uplink_bytes_per_us = std::move(before.uplink_bytes_per_us);
  return links;
}

RankRecord describe(int32_t world_size, const BootstrapOptions& options, const WireOffer& offer,
                    const DerivedKey& known_key) {
  RankRecord own;
  own.world_size = world_size;
  own.bank_bytes = options.bank_bytes;
  own.mailbox_bytes = options.mailbox_bytes;
  own.window_bytes = options.window_bytes;
  own.network = options.network;
  own.wires = offer.names();
  own.authenticates_frames = options.authenticates_frames ? 1 : 0;
  own.connections = options.connections;
  own.has_secret = options.secret.empty() ? 0 : 1;
  own.known_salt = known_key.salt;
  own.place = place_of(options);
  own.socket_name = "zeropg-" + random_hex(16);
  return own;
}

// What proves membership. `known` is the key whose salt this rank told the others.
std::string group_key(const std::string& secret, const DerivedKey& known, const GroupMap& map) {
  if (secret.empty()) return map.secret;
  if (map.salt.empty()) return derive_key(secret, salt_of(map)).key;
  TORCH_CHECK_WITH(DistBackendError, map.salt == known.salt,
                   "the map in the store names a salt that this rank does not know; somebody else writes to it");
  return known.key;
}

void connect(StoreExchange& store_exchange, int32_t rank, int32_t world_size, const BootstrapOptions& options,
             Clock::time_point deadline, BootstrapResult* result) {
  const WireOffer offer = offer_wires(options.network, options.library_root);
  const DerivedKey known_key = last_derived_key(options.secret);
  RankRecord own = describe(world_size, options, offer, known_key);
  const std::vector<Rack> racks = options.topology_file.empty() ? std::vector<Rack>() : look_up_rack(options, &own);
  // Everybody listens before anybody knows who leads, so no member ever knocks at a door that is not there yet.
  Descriptor listener = listen_unix(own.socket_name);
  GroupMap map = [&] {
    try {
      return store_exchange.exchange(own);
    } catch (const c10::DistNetworkError& error) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str("the rendezvous store: ", error.what_without_backtrace(),
                               "; the process that serves it (rank 0 or the launcher) may have ended"));
    }
  }();

  TORCH_CHECK_WITH(DistBackendError, map.socket_names[rank] == own.socket_name,
                   "the map in the store is not made from what this rank wrote; somebody else writes to it, or another "
                   "group meets there under the same name");
  result->topology = make_topology(map.places, rank);
  const LinkModel known_links = links_before_measuring(result->topology, racks, options);
  const std::vector<int32_t>& node = result->topology.nodes[result->topology.node_rank[rank]];
  Session session{.rank = rank,
                  .local_rank = result->topology.local_rank[rank],
                  .world_size = world_size,
                  .group = map.socket_names[0],
                  .node = node,
                  .deadline = deadline,
                  .tick = [&](const std::vector<int32_t>& awaited) { store_exchange.look_around(awaited); },
                  .place = {map.socket_names[node[0]], group_key(options.secret, known_key, map)},
                  .geometry = {static_cast<int32_t>(node.size()), options.bank_bytes,
                               shared_mailbox_bytes(options.mailbox_bytes, largest_node(result->topology))},
                  .pool_bytes = options.pool_bytes,
                  .known_links = known_links,
                  .measures_links = options.measures_links && known_links.node_bytes_per_us.empty()};
  if (result->topology.node_count() > 1) {
    const WireEntry& wire = chosen_wire(map.network, offer, rank, world_size);
    join_network(wire, plan_network(session, result->topology, options), store_exchange, &result->network);
  }
  if (session.local_rank == 0) {
    host(session, store_exchange, listener, result);
  } else {
    listener.reset();
    join(session, result);
  }
}

BootstrapResult bootstrap_alone(const BootstrapOptions& options) {
  BootstrapResult result;
  RankRecord own;
  own.place = place_of(options);
  if (!options.topology_file.empty()) look_up_rack(options, &own);
  result.topology = make_topology({own.place}, 0);
  const ArenaGeometry geometry{1, options.bank_bytes, options.mailbox_bytes};
  result.arena = std::make_unique<ShmArena>(ShmArena::create(geometry), geometry, 0);
  result.arena->set_doorbells(std::vector<Descriptor>(1));
  result.pool = std::make_shared<TensorPool>(create_pool(1, options.pool_bytes).get(), 0, 1);
  result.channel = std::make_shared<DescriptorChannel>(0, 1, std::vector<Member>(), true);
  return result;
}

}  // namespace

BootstrapResult bootstrap(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                          const BootstrapOptions& options) {
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size, "bootstrap: rank ", rank, " of world_size ",
                    world_size, ", expected 0 <= rank < world_size");
  ArenaGeometry{world_size, options.bank_bytes, shared_mailbox_bytes(options.mailbox_bytes, world_size)}
      .total_bytes();  // throws ValueError
  if (world_size == 1) return bootstrap_alone(options);
  const auto deadline = deadline_after(options.timeout);
  StoreExchange store_exchange(store, rank, world_size, deadline);
  BootstrapResult result;
  // Others may wait for this rank's answer, and in their first operation for this rank, while it still meets its node.
  store_exchange.set_meanwhile([&](const std::vector<int32_t>& awaited) {
    if (result.network) {
      result.network->liveness().note_wait(Lane::kCollective, awaited);
      result.network->progress();
    }
    if (result.arena && !awaited.empty())
      result.arena->notes_of(result.arena->rank()).note_wait(Lane::kCollective, awaited[0]);
  });
  std::string failure;
  std::optional<int32_t> lost;
  try {
    connect(store_exchange, rank, world_size, options, deadline, &result);
    return result;
  } catch (const PeerLost& error) {
    failure = error.what_without_backtrace();
    lost = error.rank();
  } catch (const c10::DistNetworkError& error) {
    failure = error.what_without_backtrace();
    lost = -1;
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {  // what a signal's handler threw, or no memory
    const std::string text = error.what();
    store_exchange.report_failure("interrupted: " + text.substr(0, text.find('\n')));
    throw;
  }
  failure = store_exchange.find_cause(failure, lost);
  store_exchange.report_failure(failure);
  const std::string text = c10::str("[zeropg rank ", rank, "/", world_size, options.members, "] bootstrap: ", failure);
  // Peers that were told to go on already wait for this rank in their first operation.
  if (result.arena) result.arena->set_state(RankState::kFailed, text);
  if (result.network) result.network->tell_state(RankState::kFailed, text);
  C10_THROW_ERROR(DistBackendError, text);
}

int share_descriptor(DescriptorChannel& channel, const std::function<int()>& create, std::chrono::milliseconds timeout,
                     const std::function<void()>& tick) {
  const auto deadline = deadline_after(timeout);
  try {
    if (!channel.is_leader) {
      return receive_descriptors(channel.peers[0], 1, deadline, tick)[0].release();
    }
    Descriptor fd;
    try {
      fd.reset(create());
    } catch (const c10::Error& error) {
      for (Member& peer : channel.peers) {
        with_peer(peer.rank,
                  [&] { peer.connection.send(MessageKind::kError, error.what_without_backtrace(), {}, deadline); });
      }
      throw;
    }
    for (Member& peer : channel.peers) send_descriptors(peer, {fd.get()}, deadline);
    return fd.release();
  } catch (const c10::DistError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("[zeropg rank ", channel.rank, "/", channel.world_size,
                                               "] share_descriptor: ", error.what_without_backtrace()));
  }
}

}  // namespace zeropg
