// What encodings have saved and cost: for the reports that users read.
#pragma once

#include <cstdint>
#include <mutex>

namespace zeropg {

// Of one call, or sums of several.
struct CodecCounters {
  int64_t calls = 0;
  int64_t plain_bytes = 0;    // of the floats that this rank encoded
  int64_t encoded_bytes = 0;  // of what they became
  double encode_seconds = 0;  // selections included
  double decode_seconds = 0;  // additions of what was decoded included
  double wire_seconds = 0;    // the rest of the calls: copies, the wire, and waiting for ranks

  CodecCounters& operator+=(const CodecCounters& other) {
    calls += other.calls;
    plain_bytes += other.plain_bytes;
    encoded_bytes += other.encoded_bytes;
    encode_seconds += other.encode_seconds;
    decode_seconds += other.decode_seconds;
    wire_seconds += other.wire_seconds;
    return *this;
  }
};

// Sums of what the calls of one model, or of one group, have counted. Any thread.
class CodecMeter {
 public:
  void add(const CodecCounters& counters) {
    const std::lock_guard lock(mutex_);
    sums_ += counters;
  }
  CodecCounters counters() const {
    const std::lock_guard lock(mutex_);
    return sums_;
  }

 private:
  mutable std::mutex mutex_;
  CodecCounters sums_;  // guarded by mutex_
};

}  // namespace zeropg
