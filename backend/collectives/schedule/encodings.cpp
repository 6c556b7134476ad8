#include "backend/collectives/schedule/encodings.h"

#include <limits>
#include <stdexcept>

namespace zeropg {

namespace {

// No room for the encoding of nothing: there is no message then.
StepBytes rooms_of_encodings(const CollectiveSpec& spec, ResidualHop hop, StepBytes bytes) {
  const auto room = [&](int64_t each) { return each == 0 ? 0 : room_of_encoding(spec, hop, each); };
  return {room(bytes.bytes), room(bytes.last_bytes)};
}

}  // namespace

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

void add_encode(PipelineStage stage, ResidualHop hop, Region destination, Region source, Region residual,
                StepBytes bytes) {
  add_step(stage,
           {.kind = StepKind::kEncode, .hop = hop, .destination = destination, .source = source, .residual = residual},
           bytes);
}

void add_decode(PipelineStage stage, ResidualHop hop, Region destination, Region source, StepBytes bytes) {
  add_step(stage, {.kind = StepKind::kDecode, .hop = hop, .destination = destination, .source = source}, bytes);
}

void add_decode_add(PipelineStage stage, ResidualHop hop, Region destination, Region source, StepBytes bytes) {
  add_step(stage, {.kind = StepKind::kDecodeAdd, .hop = hop, .destination = destination, .source = source}, bytes);
}

void add_send_encoding(PipelineStage stage, const CollectiveSpec& spec, ResidualHop hop, int32_t peer, Region source,
                       StepBytes bytes) {
  add_step(stage,
           {.kind = StepKind::kSend,
            .is_sized = !codec_of(*spec.codec, hop).has_fixed_size(),
            .peer = peer,
            .source = source},
           rooms_of_encodings(spec, hop, bytes));
}

void add_receive_encoding(PipelineStage stage, const CollectiveSpec& spec, ResidualHop hop, int32_t peer,
                          Region destination, StepBytes bytes) {
  add_step(stage,
           {.kind = StepKind::kReceive,
            .is_sized = !codec_of(*spec.codec, hop).has_fixed_size(),
            .peer = peer,
            .destination = destination},
           rooms_of_encodings(spec, hop, bytes));
}

void add_select(PipelineStage stage, Region source, Region residual, int64_t bytes) {
  add_step(stage, {.kind = StepKind::kSelect, .source = source, .residual = residual}, bytes);
}

void add_round_trip(PipelineStage stage, ResidualHop hop, Region values, Region source, Region room, Region residual,
                    StepBytes bytes) {
  add_encode(stage, hop, room, source, residual, bytes);
  add_decode(stage, hop, values, room, bytes);
}

}  // namespace zeropg
