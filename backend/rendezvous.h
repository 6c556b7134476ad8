// What the ranks of a group tell each other through the c10d store before they are connected.
#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/local_socket.h"

namespace zeropg {

// What a rank says of itself.
struct RankRecord {
  int64_t protocol = 2;  // of the bootstrap; all ranks must have the same
  int64_t world_size = 0;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t window_bytes = 0;
  int64_t network = 0;     // NetworkKind: what the user asked for
  int64_t has_rdma = 0;    // whether UCX with RDMA can be used here
  int64_t has_secret = 0;  // whether the user gave one
  std::string host_id;
  std::string socket_name;
};

// What rank 0 makes of the records; the same bytes on every rank.
struct GroupMap {
  std::string error;  // the others are empty when there is one
  std::vector<std::string> host_ids;
  std::vector<std::string> socket_names;
  std::string secret;   // random, empty when the users gave theirs
  int64_t network = 0;  // NetworkKind: what is used between nodes
};

// Signs addresses.
struct AddressKey {
  std::string group;  // a name that no other group has
  std::string secret;
};

// Keys under the store's own prefix: "zeropg/rank/<r>" (a record), "zeropg/map", "zeropg/address/<r>", "zeropg/failure"
// (the first error of any rank, so that the others need not wait for their deadline). Every wait ends at the deadline
// with DistBackendError naming the ranks that did not come.
class Rendezvous {
 public:
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t world_size, Clock::time_point deadline);

  // Collective. Rank 0 compares the records and draws the secret where the users gave none.
  GroupMap exchange(const RankRecord& own);
  // Collective over ranks of several nodes: publishes where this rank can be reached from other nodes, and waits for
  // the same from `peers`. Entries are signed, so that nobody without the secret can lead a rank elsewhere. Returns
  // them by rank, empty for the others.
  std::vector<std::string> exchange_addresses(const std::string& own, const std::vector<int32_t>& peers,
                                              const AddressKey& key);
  void withdraw_address();  // when all who need it have it
  void report_failure(const std::string& error) noexcept;
  void throw_if_a_rank_failed();
  // Rank 0, when everybody has read the map and nobody has been told to go on: the secret should not stay in the store,
  // and a later group with the same prefix must not find it.
  void clean_up();

 private:
  std::vector<RankRecord> collect(const RankRecord& own);
  void wait_for(const std::vector<std::string>& keys);
  [[noreturn]] void throw_late();
  std::vector<int32_t> missing_ranks();

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_ = 0;
  int32_t world_size_ = 1;
  Clock::time_point deadline_;
};

}  // namespace zeropg
