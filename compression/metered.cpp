#include "compression/metered.h"

#include <atomic>
#include <chrono>
#include <utility>

namespace zeropg {

namespace {

using Clock = std::chrono::steady_clock;

struct Sums {
  std::atomic<int64_t> plain_bytes = 0;
  std::atomic<int64_t> encoded_bytes = 0;
  std::atomic<int64_t> encodings = 0;
  std::atomic<int64_t> encode_nanoseconds = 0;
  std::atomic<int64_t> decode_nanoseconds = 0;
};

// Adds the time of its life.
class Timer {
 public:
  explicit Timer(std::atomic<int64_t>& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Timer() {
    const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_);
    nanoseconds_.fetch_add(taken.count(), std::memory_order_relaxed);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  std::atomic<int64_t>& nanoseconds_;
  const Clock::time_point start_ = Clock::now();
};

class MeteredCodec final : public Metered {
 public:
  MeteredCodec(std::shared_ptr<const Compressor> held, const Compressor& codec, std::shared_ptr<Sums> sums)
      : held_(std::move(held)), codec_(codec), sums_(std::move(sums)) {
    if (&codec_.for_results() != &codec_) {
      for_results_ = std::make_unique<MeteredCodec>(held_, codec_.for_results(), sums_);
    }
  }

  std::string description() const override { return codec_.description(); }
  int64_t block_elements() const override { return codec_.block_elements(); }
  int64_t capacity_bytes(int64_t count) const override { return codec_.capacity_bytes(count); }
  bool has_fixed_size() const override { return codec_.has_fixed_size(); }
  int64_t typical_bytes(int64_t count) const override { return codec_.typical_bytes(count); }
  bool selects() const override { return codec_.selects(); }
  const Compressor& for_results() const override { return for_results_ ? *for_results_ : *this; }

  int64_t encode(std::span<const float> values, std::span<float> residual,
                 std::span<std::byte> encoded) const override {
    const Timer timer(sums_->encode_nanoseconds);
    return count(values, codec_.encode(values, residual, encoded));
  }
  void decode(std::span<const std::byte> encoded, std::span<float> values) const override {
    const Timer timer(sums_->decode_nanoseconds);
    codec_.decode(encoded, values);
  }
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override {
    const Timer timer(sums_->decode_nanoseconds);
    codec_.decode_add(encoded, values);
  }
  Selection select(std::span<const SelectionRange> ranges) const override {
    const Timer timer(sums_->encode_nanoseconds);
    return codec_.select(ranges);
  }
  int64_t encode_selected(const Selection& selection, std::span<const float> values, std::span<float> residual,
                          std::span<std::byte> encoded) const override {
    const Timer timer(sums_->encode_nanoseconds);
    return count(values, codec_.encode_selected(selection, values, residual, encoded));
  }

  CodecCounters counters() const override {
    const auto seconds = [](const std::atomic<int64_t>& nanoseconds) {
      return 1e-9 * static_cast<double>(nanoseconds.load(std::memory_order_relaxed));
    };
    return {sums_->plain_bytes, sums_->encoded_bytes, sums_->encodings, seconds(sums_->encode_nanoseconds),
            seconds(sums_->decode_nanoseconds)};
  }

 private:
  int64_t count(std::span<const float> values, int64_t length) const {
    sums_->plain_bytes.fetch_add(static_cast<int64_t>(values.size_bytes()), std::memory_order_relaxed);
    sums_->encoded_bytes.fetch_add(length, std::memory_order_relaxed);
    sums_->encodings.fetch_add(1, std::memory_order_relaxed);
    return length;
  }

  const std::shared_ptr<const Compressor> held_;  // codec_, or what codec_ is part of
  const Compressor& codec_;
  const std::shared_ptr<Sums> sums_;  // of results too
  std::unique_ptr<const MeteredCodec> for_results_;
};

}  // namespace

std::shared_ptr<const Metered> metered(std::shared_ptr<const Compressor> codec) {
  const Compressor& itself = *codec;
  return std::make_shared<MeteredCodec>(std::move(codec), itself, std::make_shared<Sums>());
}

}  // namespace zeropg
