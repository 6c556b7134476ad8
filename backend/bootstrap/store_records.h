// What the ranks of a group write to the c10d store, and how it is read back. Anybody may write to a store, so whatever
// bytes come from there are read within bounds or refused with DistBackendError.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/topology/topology.h"

namespace zeropg {

// What a rank says of itself.
struct RankRecord {
  int64_t protocol = 9;  // of the bootstrap; all ranks must have the same
  int64_t world_size = 0;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t window_bytes = 0;
  int64_t has_secret = 0;  // whether the user gave one
  std::string known_salt;  // of the key that was last derived from it; empty: none yet
  int64_t authenticates_frames = 0;
  std::string connections;         // when ranks of several nodes connect, as the user asked for it
  std::string network;             // what the user asked for: "automatic" or a wire's name
  std::vector<std::string> wires;  // names of those between nodes that can be used here
  RankPlace place;
  std::string host_name;        // by which the topology file knows this host; empty: there is no such file
  std::string topology_digest;  // of that file
  std::string socket_name;
};

// What rank 0 makes of the records; the same bytes on every rank.
struct GroupMap {
  std::string error;              // the others are empty when there is one
  std::vector<RankPlace> places;  // by rank
  std::vector<std::string> socket_names;
  std::string secret;   // random, empty when the users gave theirs
  std::string salt;     // with which all ranks have derived a key from it; empty: a new one, see salt_of()
  std::string network;  // the name of the wire to use between nodes; empty: no wire can be used on all ranks
};

// How a rank lost another one.
struct BreakRecord {
  int64_t lost = -1;
  std::string text;
};

// Signs addresses.
struct AddressKey {
  std::string group;  // a name that no other group has
  std::string key;
};

std::string encode(const RankRecord& record);
RankRecord decode_record(std::string_view bytes);

std::string encode(const GroupMap& map);
GroupMap decode_map(std::string_view bytes, int32_t world_size);
// Every rank's own random name is in it, so it is new to all of them, whoever made the map.
std::string salt_of(const GroupMap& map);

std::string encode(const BreakRecord& record);
BreakRecord decode_break(std::string_view bytes);

std::string encode_texts(const std::vector<std::string>& texts);
std::vector<std::string> decode_texts(std::string_view bytes, int32_t count);

std::string encode_ranks(const std::vector<int32_t>& ranks);
std::vector<int32_t> decode_ranks(std::string_view bytes, int32_t world_size);

// An address with its signature in front.
std::string sign_address(const AddressKey& key, int32_t rank, std::string_view address);
// The address. DistBackendError where `signed_address` was not made by `rank` with the same key.
std::string verify_address(const AddressKey& key, int32_t rank, std::string_view signed_address);

}  // namespace zeropg
