// How frames get from one process to another. A wire knows no stream, no credit and no collective: see
// remote_transport.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "backend/transport/network/frame.h"

namespace zeropg {

// Where a wire hands over what it received.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Before memory for the payload is found: throws c10::DistNetworkError when no honest peer sends such a frame. The
  // wire then loses the peer.
  virtual void check_frame(int32_t peer, const FrameHeader& header) = 0;
  virtual void take_frame(int32_t peer, const FrameHeader& header, Payload payload) = 0;
  // Where the next bytes of this frame's payload go if they need no memory of their own: Note [Bytes in place] in
  // awaited_frames.h. Asked before each read, and good for that read only; often empty.
  virtual std::span<std::byte> place_for(int32_t peer, const FrameHeader& header) = 0;
  // The next `bytes` of the payload lie in that place. take_frame() gets the rest, at the end of the frame.
  virtual void note_placed(int32_t peer, const FrameHeader& header, size_t bytes) = 0;
  // Whoever reads has what it asked for: what else has come can wait for a call that has a place for it.
  virtual bool has_enough() const = 0;
  // Once per peer: nothing will come from it any more, and nothing reaches it.
  virtual void lose_peer(int32_t peer, const std::string& reason) = 0;
  // This wire connects ranks on demand: from now on frames to `peer` are sent, and it may be lost.
  virtual void note_connected(int32_t /*peer*/) {}
  // Some bytes came from `peer`, though perhaps no whole frame.
  virtual void note_sign_of_life(int32_t peer) = 0;
};

enum class Urgency : uint8_t {
  kCanWait,   // may be refused while earlier frames to this peer wait
  kMustTake,  // is kept behind them; for small frames whose number is limited
};

// What a wire has brought to a peer so far, and how long the network took.
struct Delivery {
  uint64_t bytes = 0;  // that the peer's system has acknowledged
  std::chrono::microseconds busy{
      0};  // in which some were on their way, or waited for it, and the peer had room for more
};

// Frames arrive whole, once, unaltered and in order per peer, or the peer is lost. Peers have proven the group's secret
// before any byte of theirs is looked at. One thread at a time. Calls never wait, except close().
class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string_view name() const = 0;
  // Whether there is a connection to `peer`, or was one. Where not, to send makes one.
  virtual bool has_met(int32_t /*peer*/) const { return true; }
  // False: not taken. What is taken is sent or copied before the call returns.
  virtual bool send(int32_t peer, const FrameHeader& header, std::span<const std::byte> payload, Urgency urgency) = 0;
  // How many of the next `bytes` for `peer` are best sent now. More is taken as well, but its rest is copied, to be
  // sent later. 0: there was no room for some before, and there is hardly any now; the descriptor says when there is.
  virtual size_t room(int32_t /*peer*/, size_t bytes) const { return bytes; }
  // Sends what waits and receives what is there; from one peer only when `peer` >= 0. True when anything moved.
  virtual bool progress(int32_t peer, FrameSink& sink) = 0;
  // Something was taken and is not sent yet, or has come and is not handed over: progress() has to be called when the
  // descriptor says so, or arm() returns false.
  virtual bool has_unfinished() const { return false; }
  // Poll it for reading; ready whenever progress() has something to do, if arm() returned true before.
  virtual int descriptor() const = 0;
  virtual bool arm() = 0;
  // Loses peers whose machines have not acknowledged for long what was sent to them, where the wire would not notice by
  // itself. Cheap; to be called now and then.
  virtual void lose_unreachable(FrameSink& /*sink*/) {}
  // Empty: this wire, or this machine, does not count that.
  virtual std::optional<Delivery> delivery_to(int32_t /*peer*/) const { return std::nullopt; }
  // Gives what was sent up to `patience` to arrive, then lets go of every peer.
  virtual void close(std::chrono::milliseconds patience) = 0;
};

}  // namespace zeropg
