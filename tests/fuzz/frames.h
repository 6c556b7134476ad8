// What a peer on another node may send: any bytes, cut anywhere, to a rank with streams of its own.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string_view>

#include "backend/transport/network/frame_decoder.h"
#include "backend/transport/network/remote_transport.h"

namespace zeropg::fuzz {

// Hands over `input` in pieces; what is sent goes nowhere.
class ScriptedWire final : public Wire {
 public:
  ScriptedWire(std::span<const uint8_t> input, size_t piece_bytes)
      : rest_(std::as_bytes(input)), piece_bytes_(piece_bytes) {}

  std::string_view name() const override { return "scripted"; }
  bool send(int32_t, const FrameHeader&, std::span<const std::byte>, Urgency) override { return true; }
  bool progress(int32_t, FrameSink& sink) override {
    if (rest_.empty() || is_lost_) return false;
    std::span<const std::byte> piece = rest_.first(std::min(rest_.size(), piece_bytes_));
    rest_ = rest_.subspan(piece.size());
    sink.note_sign_of_life(1);
    try {
      const std::span<std::byte> room = decoder_.payload_room(1, sink);  // as a wire that receives into place
      if (!room.empty()) {
        const size_t part = std::min(room.size(), piece.size());
        std::copy_n(piece.begin(), part, room.begin());
        piece = piece.subspan(part);
        decoder_.take_payload(1, part, sink);
      }
      decoder_.take(1, piece, sink);
    } catch (const c10::DistNetworkError& error) {
      is_lost_ = true;
      sink.lose_peer(1, error.what_without_backtrace());
    }
    return true;
  }
  int descriptor() const override { return -1; }
  bool arm() override { return true; }
  void close(std::chrono::milliseconds) override {}

 private:
  std::span<const std::byte> rest_;
  size_t piece_bytes_;
  bool is_lost_ = false;
  FrameDecoder decoder_;
};

// The first byte says how large the pieces are; the rest comes from the peer.
inline void frames(std::span<const uint8_t> input) {
  if (input.empty()) return;
  constexpr int64_t kWindowBytes = 4096;
  RemoteTransport network(std::make_unique<ScriptedWire>(input.subspan(1), size_t{1} + input[0]),
                          {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = kWindowBytes});
  std::array<std::byte, 300> heard{};
  try {
    const std::array<std::byte, 64> words{};
    network.try_send(1, Lane::kCollective, words);
    while (network.progress()) {
      for (const Lane lane : {Lane::kCollective, Lane::kPointToPoint}) {
        if (network.try_receive(1, lane, heard) > heard.size()) std::abort();
      }
    }
  } catch (const c10::DistError&) {
    // The peer is lost, failed, left or refused: what it can reach by whatever it sends.
  }
  if (network.liveness().state_of(1).failure.size() > kFailureBytes) std::abort();
}

}  // namespace zeropg::fuzz
