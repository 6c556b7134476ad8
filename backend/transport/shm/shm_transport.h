// Byte streams between two ranks of a node: one ring in the arena per ordered pair and lane.
//
// The sender alone writes the ring and counts `sent`, the receiver alone counts `received`; both counts only grow, so
// full (sent - received == size) and empty (equal) are never confused.
#pragma once

#include <vector>

#include "backend/transport/shm/shm_arena.h"
#include "backend/transport/transport.h"

namespace zeropg {

class ShmTransport final : public Transport {
 public:
  // The arena outlives it; one per arena and rank. `ranks`: those of the arena by the numbers that peers are called by
  // here, ascending; empty: the arena's own.
  explicit ShmTransport(ShmArena& arena, std::vector<int32_t> ranks = {});

  std::string_view name() const override { return "shm"; }
  bool can_reach(int32_t peer) const override;
  size_t try_send(int32_t peer, Lane lane, std::span<const std::byte> data) override;
  size_t try_receive(int32_t peer, Lane lane, std::span<std::byte> data) override;

 private:
  // This rank's end of one stream. Its own count is kept here and only copied to the arena: what a peer scribbles over
  // there cannot move it. Streams have a cache line each, since different threads may use different ones.
  struct alignas(64) End {
    std::byte* ring = nullptr;
    MailboxCounters* counters = nullptr;
    uint64_t own_count = 0;
    uint64_t peer_count = 0;  // as last seen; the shared word is read only when this does not suffice
  };

  int32_t place_of(int32_t peer) const;                                    // in the arena; -1: not there
  std::span<std::byte> next_piece(const End& stream, size_t bytes) const;  // of the ring, from the own count on
  End& end(std::vector<End>& ends, int32_t place, Lane lane) const;
  void throw_if_gone(int32_t place) const;
  [[noreturn]] void throw_broken(int32_t place) const;

  ShmArena& arena_;
  uint64_t ring_bytes_ = 0;
  std::vector<int32_t> ranks_;  // by place in the arena
  std::vector<End> outgoing_;   // [place][lane]
  std::vector<End> incoming_;
};

}  // namespace zeropg
