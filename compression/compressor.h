// Turns a range of floats into fewer bytes and back. A compressor knows no rank, no tensor and no name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeropg {

// One codec with its parameters. Immutable, so that one object serves any number of threads and ranges.
//
// Sizes are known beforehand: a schedule is planned from them, and a receiver never believes a length that a peer sent.
// Invariant: the encoding of a range depends on that range's values alone, and decoding the same bytes gives the same
// bits on every machine.
class Compressor {
 public:
  virtual ~Compressor() = default;

  // Name and parameters, e.g. "block_quant(bits=4, block=256)". Equal descriptions mean equal encodings: ranks compare
  // them before they exchange bytes.
  virtual std::string description() const = 0;

  // Elements that are encoded together. Ranges that start at a multiple of it may be encoded one by one with the same
  // result as at once.
  virtual int64_t block_elements() const = 0;

  // The exact number of bytes that `count` values take. Monotonic in `count`.
  virtual int64_t encoded_bytes(int64_t count) const = 0;

  // encoded <- values + residual, where there is a residual (as long as `values`); it then keeps what the encoding
  // loses: values + residual - decode(encoded). `encoded` is encoded_bytes(values.size()) long; nothing overlaps.
  virtual void encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const = 0;

  // values <- decoded / values <- values + decoded. `encoded` came from a peer: any bytes must be survived.
  virtual void decode(std::span<const std::byte> encoded, std::span<float> values) const = 0;
  virtual void decode_add(std::span<const std::byte> encoded, std::span<float> values) const = 0;
};

}  // namespace zeropg
