// Turns a range of floats into fewer bytes and back. A compressor knows no rank, no tensor and no name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeropg {

// What a codec that chooses among values (top-k) has found in all that a rank contributes: encodings of its parts send
// the values at these places.
struct Selection {
  std::shared_ptr<const std::vector<int64_t>> places;  // in all that was selected from, rising; null: none
  bool is_finite = true;  // false: an infinity or NaN is among the values, so every part decodes to NaN
  int64_t start = 0;      // where the part that is encoded begins

  // The same for a part whose first value is `first` of this one.
  Selection at(int64_t first) const { return {places, is_finite, start + first}; }
};

// A stretch of what is selected from: values, and their residuals or none.
struct SelectionRange {
  std::span<const float> values;
  std::span<float> residual;
};

// One codec with its parameters. Immutable, so that one object serves any number of threads and ranges.
//
// A schedule is planned from the most bytes that an encoding may take; where its length depends on the values it
// travels in front of the bytes (Note [Sized messages] in backend/collectives/schedule/schedule.h).
// Invariant: the encoding of a range depends on that range's values alone (and on the selection, where there is one),
// and decoding the same bytes gives the same bits on every machine.
class Compressor {
 public:
  virtual ~Compressor() = default;

  // Name and parameters, e.g. "block_quant(bits=4, block=256)". Equal descriptions mean equal encodings: ranks compare
  // them before they exchange bytes.
  virtual std::string description() const = 0;

  // Elements that are encoded together. Ranges that start at a multiple of it may be encoded one by one; with the same
  // result as at once where the size is fixed.
  virtual int64_t block_elements() const = 0;

  // The most bytes that an encoding of `count` values takes. Monotonic in `count`; 0 for 0.
  virtual int64_t capacity_bytes(int64_t count) const = 0;
  // Whether every encoding of `count` values is capacity_bytes(count) long.
  virtual bool has_fixed_size() const { return true; }
  // What an encoding of `count` gradients takes as a rule: for estimates, never for memory.
  virtual int64_t typical_bytes(int64_t count) const { return capacity_bytes(count); }

  // encoded <- values + residual, where there is a residual (as long as `values`); it then keeps what the encoding
  // loses: values + residual - decode(encoded). `encoded` is capacity_bytes(values.size()) long; nothing overlaps.
  // Returns the length of the encoding.
  virtual int64_t encode(std::span<const float> values, std::span<float> residual,
                         std::span<std::byte> encoded) const = 0;

  // values <- decoded / values <- values + decoded. `encoded` came from a peer: any bytes must be survived, where the
  // size is not fixed any number of them, and what is no encoding makes every value NaN.
  virtual void decode(std::span<const std::byte> encoded, std::span<float> values) const = 0;
  virtual void decode_add(std::span<const std::byte> encoded, std::span<float> values) const = 0;

  // Codecs that choose among all values of a contribution, not only among those of one message. select() adds the
  // values to the residuals, unless one is not finite; encode_selected() then takes residual, or where there is none
  // values, and leaves in the residual what it has not sent.
  virtual bool selects() const { return false; }
  virtual Selection select(std::span<const SelectionRange> /*ranges*/) const { throw std::logic_error(description()); }
  virtual int64_t encode_selected(const Selection& /*selection*/, std::span<const float> /*values*/,
                                  std::span<float> /*residual*/, std::span<std::byte> /*encoded*/) const {
    throw std::logic_error(description());
  }

  // How the owner of a range sends back what it has summed up (kResultHop): as contributions travel, unless a sum of
  // several is better sent in another way.
  virtual const Compressor& for_results() const { return *this; }
};

}  // namespace zeropg
