#include "backend/rendezvous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "backend/authentication.h"
#include "backend/transport/network_kind.h"
#include "backend/transport/rank_names.h"

namespace zeropg {
namespace {

constexpr std::chrono::microseconds kShortestPause{100};  // between two questions to the store
constexpr std::chrono::milliseconds kLongestPause{10};
constexpr std::chrono::microseconds kPausePerRank{50};  // many ranks share one store
constexpr size_t kMaxTextBytes = 1 << 16;
const char* const kMapKey = "zeropg/map";
const char* const kFailureKey = "zeropg/failure";

std::string address_key(int32_t rank) { return "zeropg/address/" + std::to_string(rank); }
std::string rank_key(int32_t rank) { return "zeropg/rank/" + std::to_string(rank); }

class Writer {
 public:
  Writer& put(int64_t number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
    return *this;
  }
  Writer& put(std::string_view text) {
    put(static_cast<int64_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Whatever the store holds, this reads within bounds or throws.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  int64_t number() {
    int64_t value = 0;
    const std::string_view field = take(sizeof value);
    std::memcpy(&value, field.data(), sizeof value);
    return value;
  }
  std::string text() {
    const int64_t bytes = number();
    if (bytes < 0 || static_cast<size_t>(bytes) > kMaxTextBytes) fail();
    return std::string(take(static_cast<size_t>(bytes)));
  }
  void finish() const {
    if (!bytes_.empty()) fail();
  }

 private:
  std::string_view take(size_t bytes) {
    if (bytes > bytes_.size()) fail();
    const std::string_view field = bytes_.substr(0, bytes);
    bytes_.remove_prefix(bytes);
    return field;
  }
  [[noreturn]] static void fail() {
    C10_THROW_ERROR(DistBackendError, "a record in the store is damaged; do all ranks run the same version of zeropg?");
  }

  std::string_view bytes_;
};

std::string encode(const RankRecord& record) {
  Writer writer;
  writer.put(record.protocol).put(record.world_size).put(record.bank_bytes).put(record.mailbox_bytes);
  writer.put(record.window_bytes).put(record.network).put(record.has_rdma);
  return writer.put(record.has_secret).put(record.host_id).put(record.socket_name).bytes();
}

RankRecord decode_record(std::string_view bytes) {
  Reader reader(bytes);
  RankRecord record;
  record.protocol = reader.number();
  record.world_size = reader.number();
  record.bank_bytes = reader.number();
  record.mailbox_bytes = reader.number();
  record.window_bytes = reader.number();
  record.network = reader.number();
  record.has_rdma = reader.number();
  record.has_secret = reader.number();
  record.host_id = reader.text();
  record.socket_name = reader.text();
  reader.finish();
  return record;
}

std::string encode(const GroupMap& map) {
  Writer writer;
  writer.put(map.error).put(map.secret).put(map.network);
  for (const std::string& host : map.host_ids) writer.put(host);
  for (const std::string& name : map.socket_names) writer.put(name);
  return writer.bytes();
}

GroupMap decode_map(std::string_view bytes, int32_t world_size) {
  Reader reader(bytes);
  GroupMap map;
  map.error = reader.text();
  map.secret = reader.text();
  map.network = reader.number();
  if (!map.error.empty()) return map;
  for (int32_t rank = 0; rank < world_size; ++rank) map.host_ids.push_back(reader.text());
  for (int32_t rank = 0; rank < world_size; ++rank) map.socket_names.push_back(reader.text());
  reader.finish();
  return map;
}

struct SharedField {
  const char* name;
  int64_t RankRecord::*value;
};

// These must be the same on every rank; `records` are in rank order.
void check_same(const std::vector<RankRecord>& records) {
  static constexpr SharedField kFields[] = {{"the version of zeropg's bootstrap", &RankRecord::protocol},
                                            {"world_size", &RankRecord::world_size},
                                            {"bank_bytes", &RankRecord::bank_bytes},
                                            {"mailbox_bytes", &RankRecord::mailbox_bytes},
                                            {"window_bytes", &RankRecord::window_bytes},
                                            {"network", &RankRecord::network},
                                            {"whether a secret is given", &RankRecord::has_secret}};
  for (const auto& [name, value] : kFields) {
    std::vector<int32_t> differing;
    for (size_t rank = 1; rank < records.size(); ++rank) {
      if (records[rank].*value != records[0].*value) differing.push_back(static_cast<int32_t>(rank));
    }
    if (differing.empty()) continue;
    C10_THROW_ERROR(DistBackendError,
                    c10::str(name, " is ", records[0].*value, " on rank 0 but ", records[differing[0]].*value, " on ",
                             format_ranks(differing), "; give every rank the same options"));
  }
}

GroupMap make_map(std::vector<RankRecord> records) {
  check_same(records);
  GroupMap map;
  if (records[0].has_secret == 0) map.secret = random_hex(32);
  const bool have_all_rdma =
      std::all_of(records.begin(), records.end(), [](const RankRecord& record) { return record.has_rdma != 0; });
  map.network = records[0].network;
  if (map.network == static_cast<int64_t>(NetworkKind::kAutomatic)) {
    map.network = static_cast<int64_t>(have_all_rdma ? NetworkKind::kUcx : NetworkKind::kTcp);
  }
  for (RankRecord& record : records) {
    map.host_ids.push_back(std::move(record.host_id));
    map.socket_names.push_back(std::move(record.socket_name));
  }
  return map;
}

Digest sign(const AddressKey& key, int32_t rank, std::string_view address) {
  return hmac_sha256(key.secret, Writer().put("zeropg address1").put(key.group).put(rank).put(address).bytes());
}

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t world_size,
                       Clock::time_point deadline)
    : store_(std::move(store)), rank_(rank), world_size_(world_size), deadline_(deadline) {}

GroupMap Rendezvous::exchange(const RankRecord& own) {
  GroupMap map;
  if (rank_ == 0) {
    try {
      map = make_map(collect(own));
    } catch (const c10::Error& error) {
      map.error = error.what_without_backtrace();
    }
    store_->set(kMapKey, encode(map));
  } else {
    store_->set(rank_key(rank_), encode(own));
    wait_for({kMapKey});
    store_->deleteKey(rank_key(rank_));  // rank 0 has read it, or there would be no map
    map = decode_map(to_text(store_->get(kMapKey)), world_size_);
  }
  if (!map.error.empty()) C10_THROW_ERROR(DistBackendError, map.error);
  return map;
}

std::vector<RankRecord> Rendezvous::collect(const RankRecord& own) {
  std::vector<std::string> keys;
  for (int32_t rank = 1; rank < world_size_; ++rank) keys.push_back(rank_key(rank));
  wait_for(keys);
  std::vector<std::vector<uint8_t>> values;
  if (store_->hasExtendedApi()) {
    values = store_->multiGet(keys);
  } else {
    for (const std::string& key : keys) values.push_back(store_->get(key));
  }
  std::vector<RankRecord> records{own};
  for (const auto& value : values) records.push_back(decode_record(to_text(value)));
  return records;
}

// Asks instead of Store::wait: that one cannot be interrupted by a failure elsewhere, and a TCPStore writes warnings to
// the log whenever a wait runs out. The pauses grow with the time waited, so they add a quarter to it at most.
void Rendezvous::wait_for(const std::vector<std::string>& keys) {
  const auto start = Clock::now();
  const auto longest_pause = kLongestPause + world_size_ * kPausePerRank;
  auto next_look = start + kTick;
  while (!store_->check(keys)) {
    const auto now = Clock::now();
    if (now >= next_look) {
      throw_if_a_rank_failed();
      next_look = now + kTick;
    }
    if (now >= deadline_) throw_late();
    const auto pause = std::clamp<Clock::duration>((now - start) / 4, kShortestPause, longest_pause);
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline_ - now));
  }
}

void Rendezvous::throw_late() {
  const std::vector<int32_t> missing = missing_ranks();
  C10_THROW_ERROR(DistBackendError, c10::str(missing.empty() ? "rank 0" : format_ranks(missing),
                                             " did not come to the store in time; look at what those ranks were doing, "
                                             "or raise the timeout"));
}

std::vector<int32_t> Rendezvous::missing_ranks() {
  std::vector<int32_t> missing;
  for (int32_t rank = 1; rank < world_size_; ++rank) {
    if (!store_->check({rank_key(rank)})) missing.push_back(rank);
  }
  return missing;
}

std::vector<std::string> Rendezvous::exchange_addresses(const std::string& own, const std::vector<int32_t>& peers,
                                                        const AddressKey& key) {
  const Digest own_signature = sign(key, rank_, own);
  store_->set(address_key(rank_), std::string(own_signature.begin(), own_signature.end()) + own);
  std::vector<std::string> keys;
  for (const int32_t peer : peers) keys.push_back(address_key(peer));
  if (!keys.empty()) wait_for(keys);
  std::vector<std::string> addresses(static_cast<size_t>(world_size_));
  for (const int32_t peer : peers) {
    const std::string value = to_text(store_->get(address_key(peer)));
    std::string& address = addresses[static_cast<size_t>(peer)];
    if (value.size() > sizeof(Digest)) address = value.substr(sizeof(Digest));
    Digest signature{};
    std::memcpy(signature.data(), value.data(), std::min(value.size(), sizeof(Digest)));
    if (!is_same_digest(signature, sign(key, peer, address))) {
      C10_THROW_ERROR(DistBackendError, c10::str("the address of rank ", peer,
                                                 " in the store does not prove the group's secret; set the "
                                                 "same ZEROPG_SECRET on every rank"));
    }
  }
  return addresses;
}

void Rendezvous::withdraw_address() { store_->deleteKey(address_key(rank_)); }

void Rendezvous::report_failure(const std::string& error) noexcept {
  try {
    if (!store_->check({kFailureKey})) store_->set(kFailureKey, "rank " + std::to_string(rank_) + ": " + error);
  } catch (const std::exception&) {
    // The store is what failed, or it is gone; the others have their deadlines.
  }
}

void Rendezvous::throw_if_a_rank_failed() {
  if (store_->check({kFailureKey})) {
    const std::string text = to_text(store_->get(kFailureKey)).substr(0, kMaxTextBytes);
    C10_THROW_ERROR(DistBackendError, text);
  }
}

void Rendezvous::clean_up() { store_->deleteKey(kMapKey); }

}  // namespace zeropg
