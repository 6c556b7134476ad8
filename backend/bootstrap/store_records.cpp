#include "backend/bootstrap/store_records.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "backend/bootstrap/sockets/authentication.h"
#include "backend/diagnostics/printable.h"

namespace zeropg {
namespace {

constexpr size_t kMaxTextBytes = 1 << 16;
constexpr int64_t kMaxWires = 64;

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
  Writer& put(const std::vector<std::string>& texts) {
    put(static_cast<int64_t>(texts.size()));
    for (const std::string& text : texts) put(text);
    return *this;
  }
  Writer& put_raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

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
  std::vector<std::string> texts(int64_t most) {
    const int64_t count = number();
    if (count < 0 || count > most) fail();
    std::vector<std::string> texts;
    for (int64_t i = 0; i < count; ++i) texts.push_back(text());
    return texts;
  }
  void finish() const {
    if (!bytes_.empty()) fail();
  }
  [[noreturn]] static void fail() {
    C10_THROW_ERROR(DistBackendError, "a record in the store is damaged; do all ranks run the same version of zeropg?");
  }

 private:
  std::string_view take(size_t bytes) {
    if (bytes > bytes_.size()) fail();
    const std::string_view field = bytes_.substr(0, bytes);
    bytes_.remove_prefix(bytes);
    return field;
  }

  std::string_view bytes_;
};

void put(Writer& writer, const RankPlace& place) { writer.put(place.host_id).put(place.domain_id).put(place.rack_id); }

RankPlace read_place(Reader& reader) {
  RankPlace place;
  place.host_id = reader.text();
  place.domain_id = reader.text();
  place.rack_id = reader.text();
  return place;
}

// Every rank reads them all, and ranks of a node have the same ones: each once, and then which one each rank has.
void put_places(Writer& writer, const std::vector<RankPlace>& places) {
  std::map<std::string, int64_t> number_of;
  std::vector<int64_t> numbers;
  Writer distinct;
  for (const RankPlace& place : places) {
    Writer one;
    put(one, place);
    const auto [entry, is_new] = number_of.try_emplace(one.bytes(), static_cast<int64_t>(number_of.size()));
    if (is_new) put(distinct, place);
    numbers.push_back(entry->second);
  }
  writer.put(static_cast<int64_t>(number_of.size())).put_raw(distinct.bytes());
  for (const int64_t number : numbers) writer.put(number);
}

std::vector<RankPlace> read_places(Reader& reader, int32_t world_size) {
  const int64_t count = reader.number();
  if (count < 1 || count > world_size) Reader::fail();
  std::vector<RankPlace> distinct;
  for (int64_t i = 0; i < count; ++i) distinct.push_back(read_place(reader));
  std::vector<RankPlace> places;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    const int64_t number = reader.number();
    if (number < 0 || number >= count) Reader::fail();
    places.push_back(distinct[static_cast<size_t>(number)]);
  }
  return places;
}

Digest signature_of(const AddressKey& key, int32_t rank, std::string_view address) {
  return hmac_sha256(key.key, Writer().put("zeropg address1").put(key.group).put(rank).put(address).bytes());
}

}  // namespace

std::string encode(const RankRecord& record) {
  Writer writer;
  writer.put(record.protocol).put(record.world_size).put(record.bank_bytes).put(record.mailbox_bytes);
  writer.put(record.window_bytes).put(record.has_secret).put(record.known_salt).put(record.authenticates_frames);
  writer.put(record.connections);
  writer.put(record.network).put(record.wires);
  put(writer, record.place);
  return writer.put(record.host_name).put(record.topology_digest).put(record.socket_name).bytes();
}

RankRecord decode_record(std::string_view bytes) {
  Reader reader(bytes);
  RankRecord record;
  record.protocol = reader.number();
  record.world_size = reader.number();
  record.bank_bytes = reader.number();
  record.mailbox_bytes = reader.number();
  record.window_bytes = reader.number();
  record.has_secret = reader.number();
  record.known_salt = reader.text();
  record.authenticates_frames = reader.number();
  record.connections = reader.text();
  record.network = reader.text();
  record.wires = reader.texts(kMaxWires);
  record.place = read_place(reader);
  record.host_name = reader.text();
  record.topology_digest = reader.text();
  record.socket_name = reader.text();
  reader.finish();
  return record;
}

std::string encode(const GroupMap& map) {
  Writer writer;
  writer.put(map.error).put(map.secret).put(map.salt).put(map.network);
  put_places(writer, map.places);
  for (const std::string& name : map.socket_names) writer.put(name);
  return writer.bytes();
}

GroupMap decode_map(std::string_view bytes, int32_t world_size) {
  Reader reader(bytes);
  GroupMap map;
  map.error = printable(reader.text(), kMaxTextBytes);
  map.secret = reader.text();
  map.salt = reader.text();
  map.network = reader.text();
  if (!map.error.empty()) return map;
  map.places = read_places(reader, world_size);
  for (int32_t rank = 0; rank < world_size; ++rank) map.socket_names.push_back(reader.text());
  reader.finish();
  return map;
}

std::string salt_of(const GroupMap& map) {
  const Digest salt = sha256(Writer().put("zeropg salt1").put(map.socket_names).bytes());
  return {salt.begin(), salt.end()};
}

std::string encode(const BreakRecord& record) { return Writer().put(record.lost).put(record.text).bytes(); }

BreakRecord decode_break(std::string_view bytes) {
  Reader reader(bytes);
  BreakRecord record;
  record.lost = reader.number();
  record.text = reader.text();
  reader.finish();
  return record;
}

std::string encode_texts(const std::vector<std::string>& texts) { return Writer().put(texts).bytes(); }

std::vector<std::string> decode_texts(std::string_view bytes, int32_t count) {
  Reader reader(bytes);
  std::vector<std::string> texts = reader.texts(count);
  reader.finish();
  if (texts.size() != static_cast<size_t>(count)) Reader::fail();
  return texts;
}

std::string encode_ranks(const std::vector<int32_t>& ranks) {
  Writer writer;
  writer.put(static_cast<int64_t>(ranks.size()));
  for (const int32_t rank : ranks) writer.put(static_cast<int64_t>(rank));
  return writer.bytes();
}

std::vector<int32_t> decode_ranks(std::string_view bytes, int32_t world_size) {
  Reader reader(bytes);
  const int64_t count = reader.number();
  if (count < 0 || count > world_size) Reader::fail();
  std::vector<int32_t> ranks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = reader.number();
    if (rank < 0 || rank >= world_size) Reader::fail();
    ranks.push_back(static_cast<int32_t>(rank));
  }
  reader.finish();
  return ranks;
}

std::string sign_address(const AddressKey& key, int32_t rank, std::string_view address) {
  const Digest signature = signature_of(key, rank, address);
  return std::string(signature.begin(), signature.end()).append(address);
}

std::string verify_address(const AddressKey& key, int32_t rank, std::string_view signed_address) {
  Digest signature{};
  const size_t signature_bytes = std::min(signed_address.size(), signature.size());
  std::memcpy(signature.data(), signed_address.data(), signature_bytes);
  const std::string_view address = signed_address.substr(signature_bytes);
  if (!is_same_mac(signature, signature_of(key, rank, address))) {
    C10_THROW_ERROR(DistBackendError, c10::str("the address of rank ", rank,
                                               " in the store does not prove the group's secret; set the same "
                                               "ZEROPG_SECRET on every rank"));
  }
  return std::string(address);
}

}  // namespace zeropg
