#include "backend/transport/network/frame_decoder.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace zeropg {
namespace {

constexpr int32_t kPeer = 1;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

FrameHeader header_of(const std::string& payload) {
  return {FrameKind::kData, 0, 0, static_cast<uint32_t>(payload.size()), 0};
}

std::string frame_of(const std::string& payload, FrameTags* tags = nullptr) {
  const FrameHeader header = header_of(payload);
  std::string head(reinterpret_cast<const char*>(&header), sizeof header);
  if (tags == nullptr) return head + payload;
  std::string frame;
  for (const std::string& part : {head, payload}) {
    tags->update(bytes_of(part));
    const Tag tag = tags->next();
    frame += part + std::string(tag.begin(), tag.end());
  }
  return frame;
}

// Takes a stream of which some bytes are wanted in places of its own, and the others come with their frames.
class Stream final : public FrameSink {
 public:
  void want(size_t bytes) { wanted_.assign(bytes, '.'); }
  // What is still to come to the place counts as not wanted any more.
  void stop_wanting() {
    arrived_ += wanted_.substr(0, placed_);
    wanted_.clear();
    placed_ = 0;
  }
  const std::string& arrived() const { return arrived_; }
  size_t placed_bytes() const { return placed_in_all_; }

  void check_frame(int32_t, const FrameHeader&) override {}
  void take_frame(int32_t, const FrameHeader&, Payload payload) override {
    stop_wanting();  // these bytes come behind those that were placed
    const auto rest = payload.span();
    arrived_.append(reinterpret_cast<const char*>(rest.data()), rest.size());
  }
  std::span<std::byte> place_for(int32_t, const FrameHeader&) override {
    return std::as_writable_bytes(std::span(wanted_)).subspan(placed_);
  }
  void note_placed(int32_t, const FrameHeader&, size_t bytes) override {
    placed_ += bytes;
    placed_in_all_ += bytes;
  }
  bool has_enough() const override { return placed_ == wanted_.size(); }
  void lose_peer(int32_t, const std::string&) override {}
  void note_sign_of_life(int32_t) override {}

 private:
  std::string wanted_;
  size_t placed_ = 0;
  size_t placed_in_all_ = 0;
  std::string arrived_;
};

// As a wire does: into the room that there is, and what is behind it from elsewhere.
void feed(FrameDecoder& decoder, std::span<const std::byte> bytes, Stream& stream) {
  const std::span<std::byte> room = decoder.payload_room(kPeer, stream);
  const size_t part = std::min(room.size(), bytes.size());
  std::copy_n(bytes.begin(), part, room.begin());
  if (part > 0) decoder.take_payload(kPeer, part, stream);
  decoder.take(kPeer, bytes.subspan(part), stream);
}

TEST(FrameDecoder, BytesComeOnceAndInOrderWhereverTheyArePlaced) {
  std::mt19937 random(7);
  const auto below = [&](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random); };
  size_t placed_bytes = 0;
  for (int round = 0; round < 500; ++round) {
    std::string sent, frames;
    for (size_t count = 1 + below(4); count > 0; --count) {
      std::string payload(below(60), ' ');
      std::generate(payload.begin(), payload.end(), [&] { return static_cast<char>('a' + below(26)); });
      sent += payload;
      frames += frame_of(payload);
    }
    FrameDecoder decoder;
    Stream stream;
    for (size_t at = 0; at < frames.size();) {
      // Sometimes a place, shorter or longer than what comes; sometimes it goes before it is full.
      if (below(3) == 0) stream.stop_wanting();
      if (stream.has_enough() && below(2) == 0) {
        stream.stop_wanting();
        stream.want(below(40));
      }
      const size_t part = std::min(1 + below(50), frames.size() - at);
      feed(decoder, bytes_of(frames).subspan(at, part), stream);
      at += part;
    }
    stream.stop_wanting();
    ASSERT_EQ(stream.arrived(), sent) << "round " << round;
    placed_bytes += stream.placed_bytes();
  }
  EXPECT_GT(placed_bytes, 1000U);
}

TEST(FrameDecoder, BytesWithTagsAreNotPlacedBeforeTheyAreProven) {
  const std::string key(32, 'k');
  FrameTags tags(key);
  std::string frame = frame_of("payload", &tags);
  Stream stream;
  stream.want(7);
  FrameDecoder decoder{FrameTags(key)};
  feed(decoder, bytes_of(frame), stream);
  EXPECT_EQ(stream.placed_bytes(), 0U);
  EXPECT_EQ(stream.arrived(), "payload");

  FrameTags again(key);
  frame = frame_of("payload", &again);
  frame[sizeof(FrameHeader) + sizeof(Tag)] ^= 1;
  Stream untouched;
  untouched.want(7);
  FrameDecoder wary{FrameTags(key)};
  EXPECT_THROW(feed(wary, bytes_of(frame), untouched), c10::DistNetworkError);
  EXPECT_EQ(untouched.placed_bytes(), 0U);
  EXPECT_EQ(untouched.arrived(), "");
}

}  // namespace
}  // namespace zeropg
