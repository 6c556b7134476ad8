#include "backend/transport/network/ucx_wire.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cryptography/hmac_sha256.h"

#ifndef ZEROPG_WITH_UCX

namespace zeropg {

std::unique_ptr<UcxWire> UcxWire::make(UcxWireOptions) {
  C10_THROW_ERROR(DistBackendError,
                  "UCX: zeropg was built without its headers; run `pip install libucx-cu13` and build again, or choose "
                  "network=\"tcp\"");
}
WireProbe UcxWire::probe_rdma(const std::string&, bool has_device) {
  return {.is_viable = false, .obstacle = has_device ? "zeropg was built without UCX's headers" : ""};
}

}  // namespace zeropg

#else

#include <cstring>
#include <map>
#include <thread>

#include "backend/transport/network/ucx_library.h"

namespace zeropg {
namespace {

constexpr unsigned kMessageId = 7;
constexpr uint64_t kMostAhead = 4096;                   // messages that may overtake another
constexpr size_t kMostInFlightBytes = size_t{1} << 20;  // per peer, beyond which a sender has to wait

struct Envelope {
  Seal seal{};
  int32_t from = -1;
  int32_t to = -1;
  uint64_t number = 0;  // counts the messages of the pair
  FrameHeader frame;
  Seal payload_digest{};  // zeros where payloads are not authenticated

  std::span<const std::byte> sealed() const { return std::as_bytes(std::span(this, 1)).subspan(sizeof(Seal)); }
};
static_assert(sizeof(Envelope) == 64);

// The envelope's seal covers it, so it needs no key.
Seal digest_of(std::span<const std::byte> payload) {
  const Digest digest = sha256({reinterpret_cast<const char*>(payload.data()), payload.size()});
  Seal beginning;
  std::copy_n(digest.begin(), beginning.size(), beginning.begin());
  return beginning;
}

bool is_same(const Seal& a, const Seal& b) {
  return is_same_mac(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

class UcxWireOverLibrary final : public UcxWire {
 public:
  UcxWireOverLibrary(const UcxLibrary& ucx, UcxWireOptions options);
  ~UcxWireOverLibrary() override;

  std::string_view name() const override { return "ucx"; }
  bool send(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) override;
  bool progress(int32_t peer, FrameSink& sink) override;
  bool has_unsent() const override { return all_in_flight_bytes_ > 0; }
  int descriptor() const override { return descriptor_; }
  bool arm() override;
  void close(std::chrono::milliseconds patience) override;
  std::string address() const override { return address_; }
  void connect(int32_t peer, const std::string& address) override;
  uint64_t dropped() const override { return dropped_; }

 private:
  struct Message {
    FrameHeader frame;
    Payload payload;
  };
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    uint64_t sent = 0;
    uint64_t received = 0;
    size_t in_flight_bytes = 0;         // counted in all_in_flight_bytes_ as well
    std::map<uint64_t, Message> ahead;  // of their turn, by number
    std::string loss;                   // from UCX; told to the sink by progress()
    bool is_lost = false;
  };
  struct Outgoing {
    Envelope envelope;
    UcxWireOverLibrary* wire = nullptr;
    int32_t peer = -1;
    std::unique_ptr<std::byte[]> payload;
    size_t payload_bytes = 0;
  };

  static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* parameters);
  static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  static void on_sent(void* request, ucs_status_t status, void* outgoing);

  void start();
  void check(ucs_status_t status, const std::string& what) const;
  void take(const Envelope& envelope, const std::byte* data, size_t bytes);
  void finish(Outgoing* outgoing, ucs_status_t status);
  void close_endpoints(bool is_forced, std::chrono::steady_clock::time_point deadline);

  const UcxLibrary& ucx_;
  const UcxWireOptions options_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  std::string address_;
  std::vector<Peer> peers_;         // by rank; its elements never move, UCX holds pointers to them
  size_t all_in_flight_bytes_ = 0;  // to all peers
  bool has_moved_ = false;
  uint64_t dropped_ = 0;
};

UcxWireOverLibrary::UcxWireOverLibrary(const UcxLibrary& ucx, UcxWireOptions options)
    : ucx_(ucx), options_(std::move(options)), peers_(static_cast<size_t>(options_.world_size)) {
  try {
    start();
  } catch (...) {
    if (worker_ != nullptr) ucx_.worker_destroy(worker_);
    if (context_ != nullptr) ucx_.cleanup(context_);
    throw;
  }
}

void UcxWireOverLibrary::start() {
  ucp_config_t* config = nullptr;
  check(ucx_.config_read(nullptr, nullptr, &config), "read its configuration");
  ucx_.config_modify(config, "TLS", ucx_.has_rdma ? "ib" : "tcp");  // never shared memory: these are other nodes
  ucx_.config_modify(config, "TCP_PUT_ENABLE", "n");
  // Otherwise a thread that reaches a peer waits in the kernel, for minutes where nobody answers.
  ucx_.config_modify(config, "TCP_CONN_NB", "y");
  ucp_params_t context{};
  context.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  context.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  context.estimated_num_eps = static_cast<size_t>(options_.world_size);
  const ucs_status_t status = ucx_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &context, config, &context_);
  ucx_.config_release(config);
  check(status, "start");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucx_.worker_create(context_, &worker, &worker_), "make a worker");
  check(ucx_.worker_get_efd(worker_, &descriptor_), "be waited for");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = on_message;
  handler.arg = this;
  check(ucx_.worker_set_am_recv_handler(worker_, &handler), "receive");
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  check(ucx_.worker_query(worker_, &attributes), "tell its address");
  address_.assign(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucx_.worker_release_address(worker_, attributes.address);
}

UcxWireOverLibrary::~UcxWireOverLibrary() { close(std::chrono::milliseconds(0)); }

void UcxWireOverLibrary::check(ucs_status_t status, const std::string& what) const {
  if (status != UCS_OK) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("UCX at ", ucx_.path, " cannot ", what, ": ", ucx_.status_string(status)));
  }
}

void UcxWireOverLibrary::connect(int32_t peer, const std::string& address) {
  ucp_ep_params_t endpoint{};
  endpoint.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  endpoint.address = reinterpret_cast<const ucp_address_t*>(address.data());
  endpoint.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  endpoint.err_handler = {on_error, &peers_.at(static_cast<size_t>(peer))};
  check(ucx_.ep_create(worker_, &endpoint, &peers_[static_cast<size_t>(peer)].endpoint), c10::str("reach rank ", peer));
}

void UcxWireOverLibrary::on_error(void* peer, ucp_ep_h, ucs_status_t status) {
  // Called by worker_progress; the sink hears of it after that.
  static_cast<Peer*>(peer)->loss = c10::str("UCX says ", static_cast<int>(status));
}

bool UcxWireOverLibrary::send(int32_t peer_rank, const FrameHeader& header, std::span<const std::byte> payload,
                              Urgency urgency) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (peer.is_lost || !peer.loss.empty() || peer.endpoint == nullptr) return false;
  if (urgency == Urgency::kCanWait && peer.in_flight_bytes >= kMostInFlightBytes) return false;
  auto outgoing = std::make_unique<Outgoing>();
  outgoing->envelope.from = options_.rank;
  outgoing->envelope.to = peer_rank;
  outgoing->envelope.number = peer.sent++;
  outgoing->envelope.frame = header;
  if (options_.authenticates_payloads) outgoing->envelope.payload_digest = digest_of(payload);
  outgoing->envelope.seal = options_.seal(options_.rank, peer_rank, outgoing->envelope.sealed());
  outgoing->wire = this;
  outgoing->peer = peer_rank;
  outgoing->payload_bytes = payload.size();
  if (!payload.empty()) {
    outgoing->payload = std::make_unique_for_overwrite<std::byte[]>(payload.size());
    std::memcpy(outgoing->payload.get(), payload.data(), payload.size());
  }
  peer.in_flight_bytes += sizeof(Envelope) + payload.size();
  all_in_flight_bytes_ += sizeof(Envelope) + payload.size();
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  // Eager, so that the handler has the payload at once: no stranger can make this rank fetch memory from elsewhere.
  parameters.flags = UCP_AM_SEND_FLAG_EAGER;
  parameters.cb.send = on_sent;
  parameters.user_data = outgoing.get();
  Outgoing* raw = outgoing.release();  // until it is sent: finish() takes it back
  ucs_status_ptr_t request = ucx_.am_send_nbx(peer.endpoint, kMessageId, &raw->envelope, sizeof(Envelope),
                                              raw->payload.get(), raw->payload_bytes, &parameters);
  if (!UCS_PTR_IS_PTR(request)) finish(raw, UCS_PTR_STATUS(request));
  return true;
}

void UcxWireOverLibrary::on_sent(void* request, ucs_status_t status, void* outgoing) {
  auto* sent = static_cast<Outgoing*>(outgoing);
  UcxWireOverLibrary* wire = sent->wire;
  wire->finish(sent, status);
  wire->ucx_.request_free(request);
}

void UcxWireOverLibrary::finish(Outgoing* outgoing, ucs_status_t status) {
  const std::unique_ptr<Outgoing> owned(outgoing);
  Peer& peer = peers_[static_cast<size_t>(owned->peer)];
  peer.in_flight_bytes -= sizeof(Envelope) + owned->payload_bytes;
  all_in_flight_bytes_ -= sizeof(Envelope) + owned->payload_bytes;
  has_moved_ = true;
  if (status != UCS_OK && peer.loss.empty()) peer.loss = ucx_.status_string(status);
}

ucs_status_t UcxWireOverLibrary::on_message(void* self, const void* header, size_t header_bytes, void* data,
                                            size_t bytes, const ucp_am_recv_param_t* parameters) {
  auto* wire = static_cast<UcxWireOverLibrary*>(self);
  const bool is_rendezvous = (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (header_bytes != sizeof(Envelope) || is_rendezvous) {
    ++wire->dropped_;
    return UCS_OK;
  }
  Envelope envelope;
  std::memcpy(&envelope, header, sizeof envelope);
  wire->take(envelope, static_cast<const std::byte*>(data), bytes);
  return UCS_OK;
}

void UcxWireOverLibrary::take(const Envelope& envelope, const std::byte* data, size_t bytes) {
  const bool is_from_peer = envelope.to == options_.rank && envelope.from >= 0 && envelope.from < options_.world_size &&
                            peers_[static_cast<size_t>(envelope.from)].endpoint != nullptr;
  if (!is_from_peer || !is_same(envelope.seal, options_.seal(envelope.from, envelope.to, envelope.sealed()))) {
    ++dropped_;
    return;
  }
  Peer& peer = peers_[static_cast<size_t>(envelope.from)];
  const bool is_repeated = envelope.number < peer.received || peer.ahead.contains(envelope.number);
  if (is_repeated || peer.is_lost) {
    ++dropped_;
    return;
  }
  has_moved_ = true;
  if (envelope.frame.payload_bytes != bytes || bytes > kMaxPayloadBytes ||
      envelope.number - peer.received > kMostAhead) {
    if (peer.loss.empty()) peer.loss = "it sent a message that contradicts itself";
    return;
  }
  if (options_.authenticates_payloads && !is_same(envelope.payload_digest, digest_of({data, bytes}))) {
    if (peer.loss.empty()) peer.loss = "a frame's tag did not match: its bytes were changed on the way";
    return;
  }
  Message message{envelope.frame, {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes}};
  if (bytes > 0) std::memcpy(message.payload.data.get(), data, bytes);
  // Handed over by progress(): a sink may throw, which must not pass through UCX.
  peer.ahead.emplace(envelope.number, std::move(message));
}

bool UcxWireOverLibrary::progress(int32_t, FrameSink& sink) {
  has_moved_ = false;
  while (ucx_.worker_progress(worker_) != 0) {
  }
  for (int32_t rank = 0; rank < options_.world_size; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    try {
      while (!peer.is_lost && !peer.ahead.empty() && peer.ahead.begin()->first == peer.received) {
        Message message = std::move(peer.ahead.begin()->second);
        peer.ahead.erase(peer.ahead.begin());
        ++peer.received;
        sink.note_sign_of_life(rank);
        sink.check_frame(rank, message.frame);
        sink.take_frame(rank, message.frame, std::move(message.payload));
      }
    } catch (const c10::DistNetworkError& error) {
      peer.loss = error.what_without_backtrace();
    }
    if (!peer.loss.empty() && !peer.is_lost) {
      peer.is_lost = true;
      peer.ahead.clear();
      has_moved_ = true;
      sink.lose_peer(rank, peer.loss);
    }
  }
  return has_moved_;
}

bool UcxWireOverLibrary::arm() { return ucx_.worker_arm(worker_) == UCS_OK; }

void UcxWireOverLibrary::close(std::chrono::milliseconds patience) {
  if (worker_ == nullptr) return;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  // With a flush at first, which waits for what was sent; then without.
  if (patience.count() > 0) close_endpoints(/*is_forced=*/false, deadline);
  close_endpoints(/*is_forced=*/true, std::chrono::steady_clock::now() + std::chrono::seconds(1));
  ucx_.worker_destroy(std::exchange(worker_, nullptr));
  ucx_.cleanup(std::exchange(context_, nullptr));
}

void UcxWireOverLibrary::close_endpoints(bool is_forced, std::chrono::steady_clock::time_point deadline) {
  std::vector<ucs_status_ptr_t> requests;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr || (!is_forced && (peer.is_lost || !peer.loss.empty()))) continue;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = is_forced ? static_cast<uint32_t>(UCP_EP_CLOSE_FLAG_FORCE) : 0U;
    ucs_status_ptr_t request = ucx_.ep_close_nbx(std::exchange(peer.endpoint, nullptr), &parameters);
    if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
  }
  while (!requests.empty() && std::chrono::steady_clock::now() < deadline) {
    ucx_.worker_progress(worker_);
    std::erase_if(requests, [&](ucs_status_ptr_t request) {
      const bool is_done = ucx_.request_check_status(request) != UCS_INPROGRESS;
      if (is_done) ucx_.request_free(request);
      return is_done;
    });
    if (!requests.empty()) std::this_thread::yield();
  }
  for (ucs_status_ptr_t request : requests) ucx_.request_free(request);
}

}  // namespace

std::unique_ptr<UcxWire> UcxWire::make(UcxWireOptions options) {
  const UcxLibrary& library = ucx_library(options.root);
  return std::make_unique<UcxWireOverLibrary>(library, std::move(options));
}

WireProbe UcxWire::probe_rdma(const std::string& root, bool has_device) {
  if (!has_device) return {};
  try {
    const UcxLibrary& ucx = ucx_library(root);
    if (ucx.has_rdma) return {.is_viable = true, .obstacle = ""};
    return {.is_viable = false, .obstacle = "UCX at " + ucx.path + " can use none of its devices"};
  } catch (const c10::Error& error) {
    return {.is_viable = false, .obstacle = error.what_without_backtrace()};
  }
}

}  // namespace zeropg

#endif

namespace zeropg {
namespace {

Seal seal_with(std::string_view key, std::span<const std::byte> message) {
  const Digest digest = hmac_sha256(key, {reinterpret_cast<const char*>(message.data()), message.size()});
  Seal seal;
  std::copy_n(digest.begin(), seal.size(), seal.begin());
  return seal;
}

}  // namespace

WireProbe probe_ucx(const std::string& library_root) { return UcxWire::probe_rdma(library_root); }

std::unique_ptr<Wire> join_ucx(const WireOptions& options, OutOfBand& out_of_band) {
  // By peer; life shared with the wire.
  const auto keys = std::make_shared<std::vector<std::string>>(static_cast<size_t>(options.world_size));
  std::unique_ptr<UcxWire> wire =
      UcxWire::make({.root = options.library_root,
                     .rank = options.rank,
                     .world_size = options.world_size,
                     .seal =
                         [keys, rank = options.rank](int32_t from, int32_t to, std::span<const std::byte> message) {
                           return seal_with((*keys)[static_cast<size_t>(from == rank ? to : from)], message);
                         },
                     .authenticates_payloads = options.authenticates_frames});
  std::vector<PeerContact> contacts = out_of_band.exchange_addresses(wire->address());
  for (const int32_t peer : options.peers) {
    PeerContact& contact = contacts.at(static_cast<size_t>(peer));
    (*keys)[static_cast<size_t>(peer)] = std::move(contact.key);
    wire->connect(peer, contact.address);
  }
  return wire;
}

}  // namespace zeropg
