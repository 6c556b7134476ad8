// Messages that UCX may still read: what was sent, and has not arrived or left yet.
#pragma once

#ifdef ZEROPG_WITH_UCX

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "backend/transport/network/ucx/ucx_buffers.h"
#include "backend/transport/network/ucx/ucx_library.h"

namespace zeropg {

// To outlive the worker of its endpoints.
class UcxOutbox {
 public:
  static constexpr size_t kHeaderBytes = 64;
  using Header = std::span<const std::byte, kHeaderBytes>;

  // A message of that many bytes with its header went to `peer`, or could not. Called by the worker, and by post().
  using OnDone = std::function<void(int32_t peer, size_t bytes, ucs_status_t status)>;

  // `buffers` belongs to somebody who outlives this.
  UcxOutbox(const UcxLibrary& ucx, UcxBuffers& buffers, OnDone on_done)
      : ucx_(ucx), buffers_(buffers), on_done_(std::move(on_done)) {}

  // Copies both. `is_fetched`: the payload waits until the receiver fetches it.
  void post(int32_t peer, ucp_ep_h endpoint, unsigned message_id, Header header, std::span<const std::byte> payload,
            bool is_fetched);

  size_t in_flight_bytes() const { return in_flight_bytes_; }

 private:
  struct Message {
    UcxOutbox* outbox = nullptr;
    int32_t peer = -1;
    std::array<std::byte, kHeaderBytes> header{};
    std::vector<std::byte> payload;                // of one that is not fetched
    std::optional<UcxBuffers::Buffer> registered;  // of another
    size_t bytes = 0;                              // with the header
  };

  static void on_sent(void* request, ucs_status_t status, void* message);
  void finish(Message& message, ucs_status_t status);

  const UcxLibrary& ucx_;
  UcxBuffers& buffers_;
  const OnDone on_done_;
  std::deque<Message> messages_;  // its elements never move: UCX holds pointers to them
  std::vector<Message*> idle_;    // of these
  size_t in_flight_bytes_ = 0;
};

}  // namespace zeropg

#endif
