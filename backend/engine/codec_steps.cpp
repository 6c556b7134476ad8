#include "backend/engine/codec_steps.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "backend/collectives/schedule/encodings.h"
#include "backend/platform/cpu/ieee_arithmetic.h"

namespace zeropg {
namespace {

std::span<const float> floats_at(const std::byte* address, int64_t bytes) {
  return {reinterpret_cast<const float*>(address), static_cast<size_t>(bytes / kFloatBytes)};
}

float result_factor(const PlannedCollective& collective) {
  const bool averages = collective.call.reduce_op == static_cast<uint32_t>(ReduceOp::kAverage);
  return averages ? static_cast<float>(collective.factor.real()) : 1.0f;
}

// Adds the seconds of its life.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  double& seconds_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace

CodecSteps::CodecSteps(const PlannedCollective& collective)
    : collective_(collective), residuals_(*collective.schedule, collective.compression, result_factor(collective)) {}

void CodecSteps::select(const Step& step, const std::byte* source) {
  const IeeeArithmetic rules;
  const Timer timer(counters_.encode_seconds);
  selection_ = residuals_.select(codec_of(*collective_.spec.codec, step.hop), floats_at(source, step.bytes), step.hop,
                                 step.source.offset_bytes / kFloatBytes);
  has_selection_ = true;
}

void CodecSteps::encode(const Step& step, const std::byte* source, std::byte* destination) {
  const IeeeArithmetic rules;
  const Timer timer(counters_.encode_seconds);
  const Compressor& codec = codec_of(*collective_.spec.codec, step.hop);
  const auto values = floats_at(source, step.bytes);
  const int64_t size_bytes = codec.has_fixed_size() ? 0 : kSizeBytes;
  const std::span encoded(destination + size_bytes,
                          static_cast<size_t>(codec.capacity_bytes(static_cast<int64_t>(values.size()))));
  const bool is_selected = has_selection_ && step.hop == kContributionHop;
  const Selection selection = selection_.at(step.source.offset_bytes / kFloatBytes);
  int64_t length = 0;
  if (step.residual.space == Space::kResidual) {
    length = residuals_.encode(codec, is_selected ? &selection : nullptr, values, step.hop,
                               step.residual.offset_bytes / kFloatBytes, encoded);
  } else {
    length = is_selected ? codec.encode_selected(selection, values, {}, encoded) : codec.encode(values, {}, encoded);
  }
  if (size_bytes > 0) put_size({destination, kSizeBytes}, length);
  counters_.plain_bytes += static_cast<int64_t>(values.size_bytes());
  counters_.encoded_bytes += length;
}

void CodecSteps::decode(const Step& step, const std::byte* source, std::byte* destination) {
  const IeeeArithmetic rules;
  const Timer timer(counters_.decode_seconds);
  const Compressor& codec = codec_of(*collective_.spec.codec, step.hop);
  const int64_t count = step.bytes / kFloatBytes;
  const std::span<const std::byte> encoded =
      codec.has_fixed_size() ? std::span(source, static_cast<size_t>(codec.capacity_bytes(count)))
                             : std::span(source + kSizeBytes, static_cast<size_t>(get_size({source, kSizeBytes})));
  const std::span values(reinterpret_cast<float*>(destination), static_cast<size_t>(count));
  if (step.kind == StepKind::kDecodeAdd) {
    codec.decode_add(encoded, values);
  } else {
    codec.decode(encoded, values);
  }
}

CodecCounters CodecSteps::counters() const {
  CodecCounters counters = counters_;
  counters.calls = 1;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  counters.wire_seconds = std::max(0.0, seconds - counters.encode_seconds - counters.decode_seconds);
  return counters;
}

}  // namespace zeropg
