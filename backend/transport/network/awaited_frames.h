// Which frames the thread that reads from a wire waits for itself, and where their bytes go. The mutex of the
// RemoteTransport that has it guards it.
//
// Note [Other people's frames]
// Whoever reads from a peer's connection gets whatever comes next on it, also what another thread sleeps for: the
// progress thread, which may poll the descriptor, would not notice. So others() counts what nobody awaited, and the
// reader wakes that thread by its bell.
//
// Note [Bytes in place]
// While RemoteTransport::try_receive() reads, bytes of its stream go straight to the caller's memory, provided that
// none are queued before them. What progress() reads is queued and copied once more, also when an operation waits for
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/transport/network/frame.h"

namespace zeropg {

class AwaitedFrames {
 public:
  // What is awaited until the next call of it.
  void await(FrameKind kind, int32_t peer, uint8_t index) {
    kind_ = kind;
    peer_ = peer;
    index_ = index;
  }
  bool includes(int32_t peer, const FrameHeader& header) const {
    return header.kind == kind_ && peer == peer_ && header.index == index_;
  }

  void note_other() { ++others_; }
  uint64_t others() const { return others_; }

  // Runs `read`; meanwhile bytes that are awaited may go to `place`. Returns how many lie there.
  template <typename Read>
  size_t read_into(std::span<std::byte> place, Read&& read) {
    struct Scope {
      AwaitedFrames& frames;
      ~Scope() {
        frames.has_place_ = false;
        frames.place_ = {};
      }
    } scope{*this};
    has_place_ = true;
    place_ = place;
    read();
    return place.size() - place_.size();
  }
  // What is left of the place; empty where there is none.
  std::span<std::byte> place() const { return place_; }
  bool is_place_full() const { return has_place_ && place_.empty(); }
  void note_placed(size_t bytes) { place_ = place_.subspan(bytes); }

 private:
  FrameKind kind_ = FrameKind::kPing;
  int32_t peer_ = -1;
  uint8_t index_ = 0;
  bool has_place_ = false;  // inside read_into()
  std::span<std::byte> place_;
  uint64_t others_ = 0;
};

}  // namespace zeropg
