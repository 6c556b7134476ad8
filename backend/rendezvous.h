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
  int64_t protocol = 1;  // of the bootstrap; all ranks must have the same
  int64_t world_size = 0;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t has_secret = 0;  // whether the user gave one
  std::string host_id;
  std::string socket_name;
};

// What rank 0 makes of the records; the same bytes on every rank.
struct GroupMap {
  std::string error;  // the others are empty when there is one
  std::vector<std::string> host_ids;
  std::vector<std::string> socket_names;
  std::string secret;  // random, empty when the users gave theirs
};

// Keys under the store's own prefix: "zeropg/rank/<r>" (a record), "zeropg/map", "zeropg/failure" (the first error of
// any rank, so that the others need not wait for their deadline). Every wait ends at the deadline with DistBackendError
// naming the ranks that did not come.
class Rendezvous {
 public:
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t world_size, Clock::time_point deadline);

  // Collective. Rank 0 compares the records and draws the secret where the users gave none.
  GroupMap exchange(const RankRecord& own);
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
