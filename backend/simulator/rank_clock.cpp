#include "backend/simulator/rank_clock.h"

#include "backend/collectives/schedule/encodings.h"

namespace zeropg {

int64_t memory_bytes_of(const Step& step, DType dtype, const Compressor* codec) {
  const int64_t residual_bytes = step.residual.space == Space::kResidual ? step.bytes : 0;
  const auto encoded_bytes = [&] { return codec_of(*codec, step.hop).typical_bytes(step.bytes / kFloatBytes); };
  switch (step.kind) {
    case StepKind::kCopy:
      return 2 * step.bytes;
    case StepKind::kReduce: {
      const Widening times = widening(dtype, step.form);
      return (step.source_count * times.of_sources + (1 + step.echo_count) * times.of_destination) * step.bytes;
    }
    case StepKind::kEncode:
      return step.bytes + encoded_bytes() + 2 * residual_bytes;
    case StepKind::kDecode:
      return encoded_bytes() + step.bytes;
    case StepKind::kDecodeAdd:
      return encoded_bytes() + 2 * step.bytes;
    case StepKind::kSelect:
      return 4 * step.bytes;
    case StepKind::kBarrier:
    case StepKind::kSend:
    case StepKind::kReceive:
      break;
  }
  return 0;
}

int64_t typical_message_bytes(const Step& step, const Compressor* codec) {
  if (!step.is_sized) return step.bytes;
  constexpr int64_t kMany = 1 << 20;
  const Compressor& of_hop = codec_of(*codec, step.hop);
  return std::max(kSizeBytes, step.bytes * of_hop.typical_bytes(kMany) / of_hop.capacity_bytes(kMany));
}

}  // namespace zeropg
