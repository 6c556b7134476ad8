#include "backend/collectives/schedule/encodings.h"

#include <limits>
#include <stdexcept>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {

const Compressor& codec_of(const Compressor& codec, ResidualHop hop) {
  return hop == kResultHop ? codec.for_results() : codec;
}

int64_t room_of_encoding(const CollectiveSpec& spec, ResidualHop hop, int64_t bytes) {
  const Compressor& codec = codec_of(*spec.codec, hop);
  return codec.capacity_bytes(bytes / kFloatBytes) + (codec.has_fixed_size() ? 0 : kSizeBytes);
}

void put_size(std::span<std::byte> message, int64_t length) {
  if (length < 0 || length > std::numeric_limits<uint32_t>::max()) throw std::length_error("an encoding of over 4 GiB");
  for (int64_t i = 0; i < kSizeBytes; ++i) message[i] = static_cast<std::byte>(length >> 8 * i);
}

int64_t get_size(std::span<const std::byte> message) {
  int64_t length = 0;
  for (int64_t i = 0; i < kSizeBytes; ++i) length |= std::to_integer<int64_t>(message[i]) << 8 * i;
  return length;
}

Region residual(const CollectiveSpec& spec, ResidualHop hop, int64_t offset_bytes) {
  if (!spec.has_residuals) return {};
  return {.space = Space::kResidual, .index = static_cast<int32_t>(hop), .offset_bytes = offset_bytes};
}

void add_encode(Schedule& schedule, ResidualHop hop, Region destination, Region source, Region residual,
                int64_t bytes) {
  if (bytes == 0) return;
  schedule.steps.push_back({.kind = StepKind::kEncode,
                            .hop = hop,
                            .destination = destination,
                            .source = source,
                            .residual = residual,
                            .bytes = bytes});
}

void add_decode(Schedule& schedule, ResidualHop hop, Region destination, Region source, int64_t bytes) {
  if (bytes == 0) return;
  schedule.steps.push_back(
      {.kind = StepKind::kDecode, .hop = hop, .destination = destination, .source = source, .bytes = bytes});
}

void add_decode_add(Schedule& schedule, ResidualHop hop, Region destination, Region source, int64_t bytes) {
  if (bytes == 0) return;
  schedule.steps.push_back(
      {.kind = StepKind::kDecodeAdd, .hop = hop, .destination = destination, .source = source, .bytes = bytes});
}

void add_send_encoding(Schedule& schedule, const CollectiveSpec& spec, ResidualHop hop, int32_t peer, Region source,
                       int64_t bytes) {
  if (bytes == 0) return;
  add_send(schedule, peer, source, room_of_encoding(spec, hop, bytes));
  schedule.steps.back().is_sized = !codec_of(*spec.codec, hop).has_fixed_size();
}

void add_receive_encoding(Schedule& schedule, const CollectiveSpec& spec, ResidualHop hop, int32_t peer,
                          Region destination, int64_t bytes) {
  if (bytes == 0) return;
  add_receive(schedule, peer, destination, room_of_encoding(spec, hop, bytes));
  schedule.steps.back().is_sized = !codec_of(*spec.codec, hop).has_fixed_size();
}

void add_select(Schedule& schedule, Region source, Region residual, int64_t bytes) {
  if (bytes == 0) return;
  schedule.steps.push_back({.kind = StepKind::kSelect, .source = source, .residual = residual, .bytes = bytes});
}

void add_round_trip(Schedule& schedule, ResidualHop hop, Region values, Region source, Region room, Region residual,
                    int64_t bytes) {
  add_encode(schedule, hop, room, source, residual, bytes);
  add_decode(schedule, hop, values, room, bytes);
}

}  // namespace zeropg
