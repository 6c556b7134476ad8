// Counts what a codec does: for the reports that users read.
#pragma once

#include <cstdint>
#include <memory>

#include "compression/compressor.h"

namespace zeropg {

// Sums since the codec was made, of all threads.
struct CodecCounters {
  int64_t plain_bytes = 0;    // of the floats that were encoded
  int64_t encoded_bytes = 0;  // of what they became
  int64_t encodings = 0;
  double encode_seconds = 0;  // selections included
  double decode_seconds = 0;  // additions of what was decoded included
};

// Another codec, and what it has done so far. The bytes are the same.
class Metered : public Compressor {
 public:
  virtual CodecCounters counters() const = 0;
};
std::shared_ptr<const Metered> metered(std::shared_ptr<const Compressor> codec);

}  // namespace zeropg
