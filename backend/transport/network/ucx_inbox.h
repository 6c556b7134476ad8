// Messages of one peer that have come over UCX, or are being fetched, until it is their turn: devices may let one
// overtake another.
#pragma once

#ifdef ZEROPG_WITH_UCX

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "backend/transport/network/ucx/ucx_buffers.h"
#include "backend/transport/network/ucx/ucx_worker.h"
#include "backend/transport/network/ucx_envelope.h"
#include "backend/transport/network/wire.h"

namespace zeropg {

class UcxInbox {
 public:
  struct Message {
    UcxInbox* inbox = nullptr;
    FrameHeader frame;
    Seal payload_digest{};
    // Where the payload is: one of them.
    Payload own;
    void* held = nullptr;  // UCX's own memory, until it is released
    std::optional<UcxBuffers::Buffer> fetched;
    bool has_come = false;
    bool is_checked = false;  // by the sink
    size_t placed = 0;

    std::span<const std::byte> payload() const;
  };

  // `owner`: whom callbacks find by it.
  UcxInbox(int32_t peer, void* owner) : peer_(peer), owner_(owner) {}

  void* owner() const { return owner_; }
  bool is_expected(uint64_t number) const { return number >= taken_ && !ahead_.contains(number); }
  // How many messages would overtake another if this one came now.
  uint64_t distance(uint64_t number) const { return number - taken_; }
  // A place for a message that is_expected(); it stays where it is.
  Message& expect(const Envelope& envelope);

  // Hands over what has come, in order. False: more is there, but the sink has enough. Throws what the sink throws.
  bool hand_over(UcxWorker& worker, UcxBuffers& buffers, FrameSink& sink);
  // But not what is being fetched, to which UCX still writes.
  void forget_all_that_came(UcxWorker& worker, UcxBuffers& buffers);

 private:
  using Numbered = std::map<uint64_t, Message>;

  Numbered::iterator forget(Numbered::iterator message, UcxWorker& worker, UcxBuffers& buffers);

  const int32_t peer_;
  void* const owner_;
  Numbered ahead_;
  uint64_t taken_ = 0;
};

}  // namespace zeropg

#endif
