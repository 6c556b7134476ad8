#include "backend/transport/network/ucx_wire.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

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
#include <deque>
#include <new>
#include <optional>
#include <thread>

#include "backend/transport/network/ucx/ucx_buffers.h"
#include "backend/transport/network/ucx/ucx_library.h"
#include "backend/transport/network/ucx/ucx_outbox.h"
#include "backend/transport/network/ucx/ucx_worker.h"
#include "backend/transport/network/ucx_inbox.h"
#include "backend/transport/rank_state.h"

namespace zeropg {
namespace {

constexpr unsigned kMessageId = 7;
constexpr uint64_t kMostAhead = 1 << 18;  // messages that may overtake another: more than a window holds
constexpr size_t kFetchedBytes = 64 << 10;
constexpr size_t kHeldBytes = 4 << 10;  // payloads from this size on stay where UCX has them, until somebody wants them
constexpr size_t kMostInFlight = 1 << 20;  // bytes to one peer, beyond which a sender has to wait
constexpr size_t kMostInFlightOfAll = 64 << 20;
constexpr const char* kNoMemory = "this rank has no memory left for messages";
constexpr int32_t kMostLikelyPeers = 128;  // in larger groups a rank talks to few of the others

// Of a lack of memory, or of what may be registered.
const char* text_of(const std::exception& error) noexcept {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : kNoMemory;
}

class UcxWireOverLibrary final : public UcxWire {
 public:
  UcxWireOverLibrary(const UcxLibrary& ucx, UcxWireOptions options);
  ~UcxWireOverLibrary() override;

  std::string_view name() const override { return "ucx"; }
  bool has_met(int32_t peer) const override;
  bool send(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) override;
  bool progress(int32_t peer, FrameSink& sink) override;
  bool has_unfinished() const override { return outbox_->in_flight_bytes() > 0 || !eventful_.empty(); }
  int descriptor() const override { return worker_ ? worker_->descriptor() : -1; }
  bool arm() override;
  void close(std::chrono::milliseconds patience) override;
  std::string address() const override { return worker_->address(); }
  void introduce(int32_t peer, std::string address) override;
  uint64_t dropped() const override { return dropped_; }

 private:
  struct Peer {
    Peer(UcxWireOverLibrary* owner, int32_t own_rank) : wire(owner), rank(own_rank), inbox(own_rank, this) {}
    std::string why_lost() const;

    UcxWireOverLibrary* const wire;
    const int32_t rank;
    std::string address;  // empty: nobody to talk to
    ucp_ep_h endpoint = nullptr;
    uint64_t sent = 0;
    size_t in_flight_bytes = 0;
    UcxInbox inbox;
    ucs_status_t failure = UCS_OK;  // the first one; told to the sink by progress()
    std::string loss;               // what is known of it beside
    bool is_lost = false;           // the sink knows
    bool is_heard = false;          // something came of it
    bool is_eventful = false;       // in eventful_
  };

  // What UCX calls, from within worker_->progress() or when something is sent.
  static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* parameters);
  static void on_fetched(void* request, ucs_status_t status, size_t bytes, void* message);
  static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  void note_sent(Peer& peer, size_t bytes, ucs_status_t status);

  bool connect(Peer& peer);
  Peer* sender_of(const Envelope& envelope);
  ucs_status_t take_message(Peer& peer, const Envelope& envelope, std::span<std::byte> data, uint64_t attributes);
  void fetch(Peer& peer, UcxInbox::Message& message, void* descriptor);
  void note_arrival(Peer& peer, UcxInbox::Message& message, ucs_status_t status);
  void note_event(Peer& peer);
  void lose(Peer& peer, ucs_status_t status, std::string_view reason = "") noexcept;
  void say_goodbye(Peer& peer);
  void post(Peer& peer, const FrameHeader& header, std::span<const std::byte> payload);
  bool has_unfetched() const;
  void close_endpoints(bool is_forced, std::chrono::steady_clock::time_point deadline);

  const UcxLibrary& ucx_;
  const UcxWireOptions options_;
  const size_t fetched_bytes_;
  std::deque<Peer> peers_;  // by rank; its elements never move: UCX holds pointers to them
  std::optional<UcxWorker> worker_;
  std::optional<UcxBuffers> buffers_;
  std::optional<UcxOutbox> outbox_;
  std::vector<int32_t> eventful_;  // peers of which progress() has something to tell; has room for all
  std::vector<int32_t> told_;      // those of which it is telling; likewise
  bool has_moved_ = false;
  uint64_t dropped_ = 0;
};

UcxWireOverLibrary::UcxWireOverLibrary(const UcxLibrary& ucx, UcxWireOptions options)
    : ucx_(ucx),
      options_(std::move(options)),
      fetched_bytes_(options_.fetched_bytes > 0 ? options_.fetched_bytes
                     : ucx_.has_rdma            ? kFetchedBytes
                                                : kMaxPayloadBytes + 1) {
  for (int32_t rank = 0; rank < options_.world_size; ++rank) peers_.emplace_back(this, rank);
  eventful_.reserve(peers_.size());
  told_.reserve(peers_.size());
  worker_.emplace(ucx_, UcxWorker::Plan{.devices = options_.devices,
                                        .likely_peers = std::min(options_.world_size, kMostLikelyPeers),
                                        .message_id = kMessageId,
                                        .on_message = on_message,
                                        .receiver = this});
  buffers_.emplace(ucx_, worker_->context(), kMaxPayloadBytes);
  outbox_.emplace(ucx_, *buffers_, [this](int32_t peer, size_t bytes, ucs_status_t status) {
    note_sent(peers_[static_cast<size_t>(peer)], bytes, status);
  });
}

UcxWireOverLibrary::~UcxWireOverLibrary() { close(std::chrono::milliseconds(0)); }

void UcxWireOverLibrary::introduce(int32_t peer, std::string address) {
  peers_.at(static_cast<size_t>(peer)).address = std::move(address);
}

bool UcxWireOverLibrary::has_met(int32_t peer) const {
  const Peer& known = peers_[static_cast<size_t>(peer)];
  return known.endpoint != nullptr || known.is_heard;
}

// UCX itself connects with the first message.
bool UcxWireOverLibrary::connect(Peer& peer) {
  if (peer.endpoint != nullptr) return true;
  ucp_ep_params_t endpoint{};
  endpoint.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  endpoint.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  endpoint.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  endpoint.err_handler = {on_error, &peer};
  const ucs_status_t status = ucx_.ep_create(worker_->handle(), &endpoint, &peer.endpoint);
  if (status == UCS_OK) return true;
  peer.endpoint = nullptr;
  lose(peer, status);
  return false;
}

void UcxWireOverLibrary::note_event(Peer& peer) {
  if (!std::exchange(peer.is_eventful, true)) eventful_.push_back(peer.rank);
}

// Also from within UCX's callbacks, through which nothing may be thrown.
void UcxWireOverLibrary::lose(Peer& peer, ucs_status_t status, std::string_view reason) noexcept {
  if (peer.failure == UCS_OK) {
    peer.failure = status;
    try {
      peer.loss = reason;
    } catch (const std::bad_alloc&) {
      peer.failure = UCS_ERR_NO_MEMORY;
    }
  }
  note_event(peer);
}

// UCX tells apart neither who has left from who died, nor either from who cannot be reached.
std::string UcxWireOverLibrary::Peer::why_lost() const {
  if (!loss.empty()) return loss;
  if (failure == UCS_ERR_NO_MEMORY) return kNoMemory;
  const char* reason = wire->ucx_.status_string(failure);
  return is_heard ? c10::str("UCX lost it: ", reason)
                  : c10::str("UCX never reached it: ", reason, "; it may have left the group");
}

void UcxWireOverLibrary::on_error(void* peer, ucp_ep_h, ucs_status_t status) {
  auto* lost = static_cast<Peer*>(peer);
  lost->wire->lose(*lost, status);
}

// It is heard no more, but still hears: otherwise it would wait for this rank until its time is up.
void UcxWireOverLibrary::say_goodbye(Peer& peer) {
  if (!connect(peer)) return;
  const std::string text = c10::str("[zeropg rank ", options_.rank, "/", options_.world_size, "] it lost rank ",
                                    peer.rank, " (", peer.loss, ").");
  post(peer, {FrameKind::kState, 0, 0, static_cast<uint32_t>(text.size()), static_cast<uint64_t>(RankState::kFailed)},
       std::as_bytes(std::span(text)));
}

bool UcxWireOverLibrary::send(int32_t peer_rank, const FrameHeader& header, std::span<const std::byte> payload,
                              Urgency urgency) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (peer.failure != UCS_OK || peer.address.empty()) return false;
  const bool has_room = peer.in_flight_bytes == 0 ||
                        (peer.in_flight_bytes < kMostInFlight && outbox_->in_flight_bytes() < kMostInFlightOfAll);
  if (urgency == Urgency::kCanWait && !has_room) return false;
  if (connect(peer)) post(peer, header, payload);
  return peer.failure == UCS_OK;
}

void UcxWireOverLibrary::post(Peer& peer, const FrameHeader& header, std::span<const std::byte> payload) {
  Envelope envelope{.from = options_.rank, .to = peer.rank, .number = peer.sent++, .frame = header};
  if (options_.authenticates_payloads) envelope.payload_digest = digest_of(payload);
  envelope.seal = options_.seal(options_.rank, peer.rank, envelope.sealed());
  const size_t bytes = sizeof envelope + payload.size();
  peer.in_flight_bytes += bytes;
  try {
    outbox_->post(peer.rank, peer.endpoint, kMessageId, std::as_bytes(std::span<const Envelope, 1>(&envelope, 1)),
                  payload, payload.size() >= fetched_bytes_);
  } catch (const std::exception& error) {  // no memory to be fetched from; the peer would wait for this number
    peer.in_flight_bytes -= bytes;
    lose(peer, UCS_ERR_NO_MEMORY, text_of(error));
  }
}

void UcxWireOverLibrary::note_sent(Peer& peer, size_t bytes, ucs_status_t status) {
  peer.in_flight_bytes -= bytes;
  has_moved_ = true;
  if (status != UCS_OK) lose(peer, status);
}

ucs_status_t UcxWireOverLibrary::on_message(void* self, const void* header, size_t header_bytes, void* data,
                                            size_t bytes, const ucp_am_recv_param_t* parameters) {
  auto* wire = static_cast<UcxWireOverLibrary*>(self);
  Envelope envelope;
  Peer* peer = nullptr;
  if (header_bytes == sizeof envelope) {
    std::memcpy(&envelope, header, sizeof envelope);
    peer = wire->sender_of(envelope);
  }
  // What is not fetched UCX drops, at both ends.
  if (peer == nullptr || peer->failure != UCS_OK || !peer->inbox.is_expected(envelope.number)) {
    ++wire->dropped_;
    return UCS_OK;
  }
  wire->has_moved_ = true;
  if (envelope.frame.payload_bytes != bytes || bytes > kMaxPayloadBytes ||
      peer->inbox.distance(envelope.number) > kMostAhead) {
    wire->lose(*peer, UCS_ERR_INVALID_PARAM, "it sent a message that contradicts itself");
    return UCS_OK;
  }
  try {
    return wire->take_message(*peer, envelope, {static_cast<std::byte*>(data), bytes}, parameters->recv_attr);
  } catch (const std::exception& error) {  // which must not pass through UCX
    wire->lose(*peer, UCS_ERR_NO_MEMORY, text_of(error));
    return UCS_ERR_NO_MEMORY;
  }
}

ucs_status_t UcxWireOverLibrary::take_message(Peer& peer, const Envelope& envelope, std::span<std::byte> data,
                                              uint64_t attributes) {
  UcxInbox::Message& message = peer.inbox.expect(envelope);
  if ((attributes & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    fetch(peer, message, data.data());
    return UCS_INPROGRESS;
  }
  const bool is_held = data.size() >= kHeldBytes && (attributes & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
  if (is_held) {
    message.held = data.data();
  } else {
    message.own = {std::make_unique_for_overwrite<std::byte[]>(data.size()), data.size()};
    if (!data.empty()) std::memcpy(message.own.data.get(), data.data(), data.size());
  }
  note_arrival(peer, message, UCS_OK);
  return is_held ? UCS_INPROGRESS : UCS_OK;
}

// nullptr: it is not sealed by a peer.
UcxWireOverLibrary::Peer* UcxWireOverLibrary::sender_of(const Envelope& envelope) {
  if (envelope.to != options_.rank || envelope.from < 0 || envelope.from >= options_.world_size) return nullptr;
  Peer& peer = peers_[static_cast<size_t>(envelope.from)];
  const bool is_sealed =
      !peer.address.empty() && is_same(envelope.seal, options_.seal(envelope.from, envelope.to, envelope.sealed()));
  return is_sealed ? &peer : nullptr;
}

void UcxWireOverLibrary::fetch(Peer& peer, UcxInbox::Message& message, void* descriptor) {
  message.fetched = buffers_->take();
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  parameters.cb.recv_am = on_fetched;
  parameters.user_data = &message;
  parameters.memh = message.fetched->registration;
  ucs_status_ptr_t request = ucx_.am_recv_data_nbx(worker_->handle(), descriptor, message.fetched->data,
                                                   message.frame.payload_bytes, &parameters);
  if (!UCS_PTR_IS_PTR(request)) note_arrival(peer, message, UCS_PTR_STATUS(request));
}

void UcxWireOverLibrary::on_fetched(void* request, ucs_status_t status, size_t, void* message) {
  auto* fetched = static_cast<UcxInbox::Message*>(message);
  auto* peer = static_cast<Peer*>(fetched->inbox->owner());
  peer->wire->note_arrival(*peer, *fetched, status);
  peer->wire->ucx_.request_free(request);
}

void UcxWireOverLibrary::note_arrival(Peer& peer, UcxInbox::Message& message, ucs_status_t status) {
  message.has_come = true;
  has_moved_ = true;
  if (status != UCS_OK) {
    lose(peer, status);
  } else if (options_.authenticates_payloads && !is_same(message.payload_digest, digest_of(message.payload()))) {
    lose(peer, UCS_ERR_REJECTED, "a frame's tag did not match: its bytes were changed on the way");
  }
  note_event(peer);
}

// A sink may throw, which must not pass through UCX: so nothing is handed over from within its callbacks.
bool UcxWireOverLibrary::progress(int32_t, FrameSink& sink) {
  has_moved_ = false;
  worker_->progress();
  told_.clear();
  std::swap(told_, eventful_);
  for (const int32_t rank : told_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.is_eventful = false;
    try {
      if (peer.failure == UCS_OK) {
        if (!std::exchange(peer.is_heard, true)) sink.note_connected(rank);
        has_moved_ = true;
        if (!peer.inbox.hand_over(*worker_, *buffers_, sink)) note_event(peer);
      }
    } catch (const c10::DistNetworkError& error) {
      lose(peer, UCS_ERR_REJECTED, error.what_without_backtrace());
    }
    if (peer.failure != UCS_OK) {
      peer.inbox.forget_all_that_came(*worker_, *buffers_);
      has_moved_ = true;
      if (!std::exchange(peer.is_lost, true)) {
        sink.lose_peer(rank, peer.why_lost());
        if (!peer.loss.empty()) say_goodbye(peer);
      }
    }
  }
  return has_moved_;
}

bool UcxWireOverLibrary::arm() { return eventful_.empty() && worker_->arm(); }

void UcxWireOverLibrary::close(std::chrono::milliseconds patience) {
  if (!worker_) return;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  // With a flush at first, which waits for what was sent, but not for what is to be fetched; then without.
  while (has_unfetched() && std::chrono::steady_clock::now() < deadline) {
    worker_->progress();
    std::this_thread::yield();
  }
  if (patience.count() > 0) close_endpoints(/*is_forced=*/false, deadline);
  close_endpoints(/*is_forced=*/true, std::chrono::steady_clock::now() + std::chrono::seconds(1));
  for (Peer& peer : peers_) peer.inbox.forget_all_that_came(*worker_, *buffers_);
  worker_->stop();
  buffers_.reset();
  worker_.reset();
}

bool UcxWireOverLibrary::has_unfetched() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.failure == UCS_OK && peer.in_flight_bytes > 0; });
}

void UcxWireOverLibrary::close_endpoints(bool is_forced, std::chrono::steady_clock::time_point deadline) {
  std::vector<ucs_status_ptr_t> requests;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr || (!is_forced && peer.failure != UCS_OK)) continue;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = is_forced ? static_cast<uint32_t>(UCP_EP_CLOSE_FLAG_FORCE) : 0U;
    ucs_status_ptr_t request = ucx_.ep_close_nbx(std::exchange(peer.endpoint, nullptr), &parameters);
    if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
  }
  while (!requests.empty() && std::chrono::steady_clock::now() < deadline) {
    ucx_.worker_progress(worker_->handle());
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
                     .authenticates_payloads = options.authenticates_frames,
                     .devices = "",
                     .fetched_bytes = 0});
  std::vector<PeerContact> contacts = out_of_band.exchange_addresses(wire->address());
  for (const int32_t peer : options.peers) {
    PeerContact& contact = contacts.at(static_cast<size_t>(peer));
    (*keys)[static_cast<size_t>(peer)] = std::move(contact.key);
    wire->introduce(peer, std::move(contact.address));
  }
  return wire;
}

}  // namespace zeropg
