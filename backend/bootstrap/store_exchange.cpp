#include "backend/bootstrap/store_exchange.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend/bootstrap/sockets/authentication.h"
#include "backend/diagnostics/format_ranks.h"
#include "backend/diagnostics/notices.h"
#include "backend/diagnostics/printable.h"
#include "backend/diagnostics/wait_graph.h"
#include "backend/platform/process/signal_check.h"
#include "backend/transport/network/registry.h"

namespace zeropg {
namespace {

constexpr std::chrono::microseconds kShortestPause{100};  // between two questions to the store
constexpr std::chrono::milliseconds kLongestPause{10};
constexpr std::chrono::microseconds kPausePerRank{50};  // many ranks share one store
constexpr std::chrono::milliseconds kPause{20};         // between two looks for what others say of a failure
constexpr size_t kMaxFailureBytes = 1 << 16;
const char* const kMapKey = "zeropg/map";
const char* const kAddressesKey = "zeropg/addresses";
const char* const kFailureKey = "zeropg/failure";
const char* const kRollCallKey = "zeropg/roll_call";
constexpr std::chrono::milliseconds kLookInterval{250};  // at the store; many ranks share one
constexpr std::chrono::milliseconds kRollCall{1'000};    // for everybody to come by
// For the rank that broke a connection to say why: at most this, and half of the time for all, since others may already
// be waiting for this rank.
constexpr std::chrono::milliseconds kCausePatience{5'000};

std::string address_key(int32_t rank) { return "zeropg/address/" + std::to_string(rank); }
std::string rank_key(int32_t rank) { return "zeropg/rank/" + std::to_string(rank); }
std::string present_key(int32_t rank) { return "zeropg/present/" + std::to_string(rank); }
std::string broken_key(int32_t rank) { return "zeropg/broken/" + std::to_string(rank); }

std::string shown(int64_t value) { return std::to_string(value); }
std::string shown(const std::string& text) {
  constexpr size_t kMaxShownBytes = 64;
  return text.empty() ? "none" : printable(text, kMaxShownBytes);
}

// `records` are in rank order.
template <typename Value>
void check_same(const std::vector<RankRecord>& records, const char* name, Value RankRecord::*value) {
  std::vector<int32_t> differing;
  for (size_t rank = 1; rank < records.size(); ++rank) {
    if (records[rank].*value != records[0].*value) differing.push_back(static_cast<int32_t>(rank));
  }
  if (differing.empty()) return;
  C10_THROW_ERROR(DistBackendError, c10::str(name, " is ", shown(records[0].*value), " on rank 0 but ",
                                             shown(records[differing[0]].*value), " on ", format_ranks(differing),
                                             "; give every rank the same options"));
}

void check_same(const std::vector<RankRecord>& records) {
  check_same(records, "the version of zeropg's bootstrap", &RankRecord::protocol);
  check_same(records, "world_size", &RankRecord::world_size);
  check_same(records, "bank_bytes", &RankRecord::bank_bytes);
  check_same(records, "mailbox_bytes", &RankRecord::mailbox_bytes);
  check_same(records, "window_bytes", &RankRecord::window_bytes);
  check_same(records, "network", &RankRecord::network);
  check_same(records, "authenticate_frames", &RankRecord::authenticates_frames);
  check_same(records, "connections", &RankRecord::connections);
  check_same(records, "whether a secret is given", &RankRecord::has_secret);
  check_same(records, "the SHA-256 of the topology file", &RankRecord::topology_digest);
}

// Nodes are told apart by host ids, and found in a topology file by the names of their hosts.
void check_host_names(const std::vector<RankRecord>& records) {
  std::map<std::string, size_t> rank_of_name;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const RankRecord& record = records[rank];
    if (record.host_name.empty()) continue;
    const size_t first = rank_of_name.try_emplace(record.host_name, rank).first->second;
    if (records[first].place.host_id == record.place.host_id) continue;
    C10_THROW_ERROR(DistBackendError, c10::str("ranks ", first, " and ", rank, " are on different hosts that are both ",
                                               "called ", shown(record.host_name), ", which the topology file cannot ",
                                               "tell apart; give them host names or ZEROPG_HOST_IDs of their own"));
  }
}

void check_racks(const std::vector<RankRecord>& records) {
  const auto text_of = [](const std::string& rack) { return rack.empty() ? "in no rack" : "in rack " + shown(rack); };
  std::map<std::string, size_t> rank_of_host;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const RankPlace& place = records[rank].place;
    const size_t first = rank_of_host.try_emplace(place.host_id, rank).first->second;
    const std::string& other = records[first].place.rack_id;
    TORCH_CHECK_WITH(DistBackendError, place.rack_id == other, "ranks ", first, " and ", rank, " share the node ",
                     shown(place.host_id), ", but one is ", text_of(other), " and the other one ",
                     text_of(place.rack_id), "; give all ranks of a node the same ZEROPG_RACK_ID");
    TORCH_CHECK_WITH(DistBackendError, place.rack_id.empty() == records[0].place.rack_id.empty(), "rank 0 is ",
                     text_of(records[0].place.rack_id), ", but rank ", rank, " is ", text_of(place.rack_id),
                     "; give every rank a ZEROPG_RACK_ID, or none");
  }
}

GroupMap make_map(std::vector<RankRecord> records) {
  check_same(records);
  check_host_names(records);
  check_racks(records);
  GroupMap map;
  if (records[0].has_secret == 0) map.secret = random_hex(32);
  const bool know_the_same = std::all_of(records.begin(), records.end(), [&](const RankRecord& record) {
    return record.known_salt == records[0].known_salt;
  });
  if (know_the_same) map.salt = records[0].known_salt;
  std::vector<std::vector<std::string>> offers;
  for (RankRecord& record : records) offers.push_back(std::move(record.wires));
  if (const WireEntry* wire = common_wire(offers)) map.network = wire->name;
  for (RankRecord& record : records) {
    map.places.push_back(std::move(record.place));
    map.socket_names.push_back(std::move(record.socket_name));
  }
  return map;
}

// A FileStore only ever appends, so what was in it stays in its file, which torch lets everybody read. Ranks write to
// it: who may read and not write is none, and loses the right to read.
void close_to_readers(c10::intrusive_ptr<c10d::Store> store, int32_t world_size) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) store = prefixed->getUnderlyingNonPrefixStore();
  const auto* file = dynamic_cast<c10d::FileStore*>(store.get());
  struct stat status {};
  if (file == nullptr || ::stat(file->getPath().c_str(), &status) != 0) return;
  const mode_t readers = status.st_mode & (S_IRGRP | S_IROTH);
  const mode_t writers = (status.st_mode & (S_IWGRP | S_IWOTH)) << 1;  // as the bits that let them read
  const mode_t strangers = readers & ~writers;
  const bool are_out = strangers == 0 || ::chmod(file->getPath().c_str(), status.st_mode & 07777 & ~strangers) == 0;
  if (are_out && (readers & writers) == 0) return;
  notice("store", c10::str("[zeropg rank 0/", world_size, "] other users may read ", file->getPath(),
                           ", where the ranks meet, and with it the group's secret; chmod 600 it, or give every rank "
                           "a secret of your own (ZEROPG_SECRET_FILE)."));
}

}  // namespace

StoreExchange::StoreExchange(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t world_size,
                             Clock::time_point deadline)
    : store_(std::move(store), deadline, [this] { wait_for_the_store(); }),
      rank_(rank),
      world_size_(world_size),
      deadline_(deadline),
      patience_(std::min<Clock::duration>(kCausePatience, (deadline - Clock::now()) / 2)) {}

GroupMap StoreExchange::exchange(const RankRecord& own) {
  GroupMap map;
  if (rank_ == 0) {
    store_.set(rank_key(0), "");  // so that the others know who came, should there be no map
    try {
      map = make_map(collect(own));
    } catch (const c10::Error& error) {
      map.error = error.what_without_backtrace();
    }
    if (!map.secret.empty()) close_to_readers(store_.store(), world_size_);
    store_.set(kMapKey, encode(map));
    store_.remove(rank_key(0));
  } else {
    store_.set(rank_key(rank_), encode(own));
    wait_for({{0, kMapKey}});
    store_.remove(rank_key(rank_));  // rank 0 has read it, or there would be no map
    map = decode_map(store_.get(kMapKey), world_size_);
  }
  if (!map.error.empty()) C10_THROW_ERROR(DistBackendError, map.error);
  return map;
}

std::vector<RankRecord> StoreExchange::collect(const RankRecord& own) {
  std::vector<Awaited> awaited;
  for (int32_t rank = 1; rank < world_size_; ++rank) awaited.push_back({rank, rank_key(rank)});
  wait_for(awaited);
  std::vector<RankRecord> records{own};
  for (const std::string& value : store_.get_all(keys_of(awaited))) records.push_back(decode_record(value));
  return records;
}

std::vector<std::string> StoreExchange::keys_of(const std::vector<Awaited>& awaited) {
  std::vector<std::string> keys;
  for (const Awaited& entry : awaited) keys.push_back(entry.key);
  return keys;
}

// Asks instead of Store::wait: that one cannot be interrupted by a failure elsewhere, and a TCPStore writes warnings to
// the log whenever a wait runs out. The pauses grow with the time waited, so they add a quarter to it at most.
void StoreExchange::wait_for(const std::vector<Awaited>& awaited) {
  const std::vector<std::string> keys = keys_of(awaited);
  const auto start = Clock::now();
  const auto longest_pause = kLongestPause + world_size_ * kPausePerRank;
  next_look_ = start + kLookInterval;
  while (!store_.check(keys)) {
    look([&] { return missing_of(awaited); });
    const auto now = Clock::now();
    if (now >= deadline_) {
      const std::vector<int32_t> missing = missing_of(awaited);
      if (!missing.empty()) throw_late(missing);
      return;
    }
    const auto pause = std::clamp<Clock::duration>((now - start) / 4, kShortestPause, longest_pause);
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline_ - now));
  }
}

std::vector<int32_t> StoreExchange::missing_of(const std::vector<Awaited>& awaited) {
  std::vector<int32_t> missing;
  // Rank 0 cannot write these before it has heard from everybody.
  const bool is_map = awaited[0].key == kMapKey;
  if (is_map || awaited[0].key == kAddressesKey) {
    for (int32_t rank = 0; rank < world_size_; ++rank) {
      if (!store_.check({is_map ? rank_key(rank) : address_key(rank)})) missing.push_back(rank);
    }
    if (missing.empty()) missing.push_back(0);
  } else {
    for (const Awaited& entry : awaited) {
      if (!store_.check({entry.key})) missing.push_back(entry.rank);
    }
  }
  // Once all is there, ranks go on, and take back what they wrote.
  if (store_.check(keys_of(awaited))) missing.clear();
  return missing;
}

void StoreExchange::throw_late(const std::vector<int32_t>& missing) {
  names_the_late_ = true;
  C10_THROW_ERROR(DistBackendError, c10::str(format_ranks(missing),
                                             " did not come to the store in time; look at what those ranks were"
                                             " doing, or raise the timeout"));
}

std::vector<std::string> StoreExchange::exchange_addresses(const std::string& own, const std::vector<int32_t>& peers,
                                                           const AddressKey& key) {
  store_.set(address_key(rank_), sign_address(key, rank_, own));
  if (rank_ == 0) {
    std::vector<Awaited> awaited;
    for (int32_t rank = 0; rank < world_size_; ++rank) awaited.push_back({rank, address_key(rank)});
    wait_for(awaited);
    store_.set(kAddressesKey, encode_texts(store_.get_all(keys_of(awaited))));
  } else {
    wait_for({{0, kAddressesKey}});
  }
  store_.remove(address_key(rank_));  // rank 0 has read it
  const std::vector<std::string> all = decode_texts(store_.get(kAddressesKey), world_size_);
  std::vector<std::string> addresses(static_cast<size_t>(world_size_));
  for (const int32_t peer : peers) {
    const auto index = static_cast<size_t>(peer);
    addresses[index] = verify_address(key, peer, all[index]);
  }
  return addresses;
}

void StoreExchange::look_around(const std::vector<int32_t>& awaited) {
  awaited_ = awaited;
  meanwhile_(awaited_);
  look([&] { return awaited_; });
}

void StoreExchange::wait_for_the_store() {
  check_signals();
  meanwhile_(awaited_);
}

void StoreExchange::look(const std::function<std::vector<int32_t>()>& awaited) {
  check_signals();
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookInterval;
  const std::string failure = reported_failure();
  if (!failure.empty()) {
    names_the_late_ = true;
    C10_THROW_ERROR(DistBackendError, failure);
  }
  if (answered_ ? *answered_ != awaited() : store_.check({kRollCallKey})) answer_roll_call(awaited());
}

std::string StoreExchange::reported_failure() {
  return store_.check({kFailureKey}) ? printable(store_.get(kFailureKey), kMaxFailureBytes) : "";
}

void StoreExchange::answer_roll_call(const std::vector<int32_t>& awaited) {
  answered_ = awaited;
  store_.set(present_key(rank_), encode_ranks(awaited));
}

std::string StoreExchange::call_roll(const std::string& failure) {
  if (awaited_.empty()) return failure;
  store_.set(kRollCallKey, "");
  answer_roll_call(awaited_);
  std::vector<int32_t> silent;
  const WaitsOf waits_of = [&](int32_t rank) -> std::vector<int32_t> {
    if (store_.check({present_key(rank)})) return decode_ranks(store_.get(present_key(rank)), world_size_);
    silent.push_back(rank);
    return {};
  };
  const auto end = Clock::now() + kRollCall;
  while (true) {
    const bool is_last = Clock::now() >= end;  // before the look: on a busy machine a pause may outlast the time
    if (const std::string cause = reported_failure(); !cause.empty()) return cause;  // and its rank may be gone by now
    silent.clear();
    const WaitCulprits found = find_culprits(rank_, awaited_, waits_of);
    if (silent.empty() || is_last) {
      const std::string absent = silent.empty() ? "" : "; no sign of life from " + format_ranks(silent);
      return failure + found.chain + absent + "; " + advise_to_look_at(found.culprits);
    }
    meanwhile_(awaited_);
    std::this_thread::sleep_for(kPause);
  }
}

std::string StoreExchange::find_cause(const std::string& failure, std::optional<int32_t> lost) noexcept {
  try {
    if (lost && *lost >= 0) awaited_ = {*lost};
    if (names_the_late_) return failure;
    if (Clock::now() >= deadline_) return call_roll(failure);
    if (!lost) return failure;
    store_.set(broken_key(rank_), encode(BreakRecord{*lost, failure}));
    const auto start = Clock::now();
    const auto end = std::min(start + patience_, std::max(deadline_, start + kRollCall));
    for (bool is_last = false; !is_last; std::this_thread::sleep_for(kPause)) {
      is_last = Clock::now() >= end;
      if (const std::string cause = reported_failure(); !cause.empty()) return cause;
      meanwhile_(awaited_);
      if (!answered_ && store_.check({kRollCallKey})) answer_roll_call(awaited_);
    }
    // The rank that is lost may have left at its deadline.
    return store_.check({kRollCallKey}) ? call_roll(failure) : first_break({*lost, failure});
  } catch (const std::exception&) {
    // The store is what failed, or it is gone.
  }
  return failure;
}

// A rank that loses a peer lets go of its own peers, who lose it. Nobody gives a cause where a process died: then it is
// the rank that is said to be lost and does not itself say whom it lost.
std::string StoreExchange::first_break(BreakRecord first) {
  std::set<int64_t> known{rank_, first.lost};
  while (first.lost >= 0 && first.lost < world_size_) {
    const std::string key = broken_key(static_cast<int32_t>(first.lost));
    if (!store_.check({key})) break;
    BreakRecord next = decode_break(store_.get(key));
    if (!known.insert(next.lost).second) break;
    first = std::move(next);
  }
  const std::string text = printable(first.text, kMaxFailureBytes);
  return first.lost < 0
             ? text
             : text + "; look for the error of rank " + std::to_string(first.lost) + " or a kill (out of memory?)";
}

// The map is written over, so that no secret stays, and not deleted: a rank that saw it may just be going to read it.
void StoreExchange::report_failure(const std::string& error) noexcept {
  try {
    const std::string text = "rank " + std::to_string(rank_) + ": " + error;
    try {
      store_.compare_set(kFailureKey, "", text);  // the first one stays
    } catch (const std::exception&) {             // a store that cannot
      if (!store_.check({kFailureKey})) store_.set(kFailureKey, text);
    }
    GroupMap map;
    map.error = text;
    if (rank_ == 0) store_.set(kMapKey, encode(map));
  } catch (const std::exception&) {
    // The store is what failed, or it is gone; the others have their deadlines.
  }
}

void StoreExchange::clean_up() {
  store_.remove(kMapKey);
  store_.remove(kAddressesKey);
}

}  // namespace zeropg
