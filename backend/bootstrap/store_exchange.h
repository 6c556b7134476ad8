// What the ranks of a group tell each other through the c10d store before they are connected.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/bootstrap/store_client.h"
#include "backend/bootstrap/store_records.h"

namespace zeropg {

// Keys under the store's own prefix: "zeropg/rank/<r>" (a record), "zeropg/map", "zeropg/address/<r>",
// "zeropg/addresses", "zeropg/failure" (the first error of any rank, so that the others need not wait for their
// deadline), "zeropg/roll_call", "zeropg/present/<r>" (for whom r waits) and "zeropg/broken/<r>" (which rank r lost,
// and how). Rank 0 alone reads what each rank wrote, and publishes all of it in one value: so the questions to the
// store grow with the ranks, not with their pairs. Every wait ends at the deadline with DistBackendError naming the
// ranks that did not come; a store that is silent until then is a DistNetworkError (Note [A silent store]).
//
// Note [Roll call]
// Who runs into the deadline has waited for some rank, which may itself have waited for another one. So it calls the
// roll: every rank that is still in its bootstrap says at its next look at the store for whom it waits. Who is waited
// for, by whatever detour, and does not answer is what is wrong.
class StoreExchange {
 public:
  StoreExchange(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t world_size, Clock::time_point deadline);

  // Collective. Rank 0 compares the records and draws the secret where the users gave none.
  GroupMap exchange(const RankRecord& own);
  // Collective, once: publishes where this rank can be reached from other nodes, and waits for the same from all.
  // Entries are signed, so that nobody without the secret can lead a rank elsewhere. Returns those of `peers` by rank,
  // empty for the others.
  std::vector<std::string> exchange_addresses(const std::string& own, const std::vector<int32_t>& peers,
                                              const AddressKey& key);
  // What else is to be done now and then during every wait. It must not throw.
  void set_meanwhile(Tick meanwhile) { meanwhile_ = std::move(meanwhile); }
  // Now and then during every wait for `awaited`, as often as one likes: throws what another rank failed with or what a
  // signal's handler throws, and answers the roll call.
  void look_around(const std::vector<int32_t>& awaited);
  // What to report instead of `failure`, this rank's own error. Where that is a mere consequence, since the way to the
  // rank `lost` broke (-1: to the store): what another rank failed with, or lost whom before. At the deadline it adds
  // who holds up the ranks that this one waits for, which takes up to a second.
  std::string find_cause(const std::string& failure, std::optional<int32_t> lost) noexcept;
  void report_failure(const std::string& error) noexcept;
  // Rank 0, when everybody has read the map and the addresses and nobody has been told to go on: the secret should not
  // stay in the store, and a later group with the same prefix must find neither.
  void clean_up();

 private:
  std::vector<RankRecord> collect(const RankRecord& own);
  struct Awaited {
    int32_t rank = -1;
    std::string key;
  };
  static std::vector<std::string> keys_of(const std::vector<Awaited>& awaited);
  void wait_for(const std::vector<Awaited>& awaited);
  std::vector<int32_t> missing_of(const std::vector<Awaited>& awaited);  // empty: all is there by now
  [[noreturn]] void throw_late(const std::vector<int32_t>& missing);
  void wait_for_the_store();
  void look(const std::function<std::vector<int32_t>()>& awaited);
  std::string reported_failure();  // "": none
  std::string first_break(BreakRecord own);
  void answer_roll_call(const std::vector<int32_t>& awaited);
  std::string call_roll(const std::string& failure);

  StoreClient store_;
  int32_t rank_ = 0;
  int32_t world_size_ = 1;
  Clock::time_point deadline_;
  Clock::duration patience_;     // with who broke a connection
  bool names_the_late_ = false;  // the error of this rank does
  std::vector<int32_t> awaited_;
  std::optional<std::vector<int32_t>> answered_;  // to the roll call
  Tick meanwhile_ = [](const std::vector<int32_t>&) {};
  Clock::time_point next_look_{};
};

}  // namespace zeropg
