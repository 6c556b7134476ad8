// A vector of numbers that lives in a tier: the masters or one state slot of a flat parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/offload/offload.h"
#include "sharding/optim/state_format.h"

namespace zeropg {

// It is moved in chunks of a fixed number of elements, the last one shorter. One thread at a time.
class TieredVector {
 public:
  // Reserves room for `numel` zeros of `dtype`. `what` names it in messages: "masters of unit 'h.0'". TierError.
  TieredVector(std::shared_ptr<Offload> offload, const std::string& what, int64_t numel, c10::ScalarType dtype);
  // The same for a state slot of `elements` elements beside masters of `master`: its numbers are the entries, and its
  // chunks hold the elements that a chunk of the masters does.
  TieredVector(std::shared_ptr<Offload> offload, const std::string& what, int64_t elements, c10::ScalarType master,
               StateFormat format);
  TieredVector(const TieredVector&) = delete;
  TieredVector& operator=(const TieredVector&) = delete;

  int64_t numel() const { return numel_; }
  StateFormat format() const { return format_; }
  int64_t chunk_elements() const { return chunk_elements_; }
  c10::ScalarType dtype() const { return dtype_; }
  int64_t bytes() const { return static_cast<int64_t>(reservation_->extent.bytes); }
  const std::shared_ptr<Offload>& offload() const { return offload_; }

  int64_t chunk_numel() const { return chunk_numel_; }
  int64_t chunk_count() const { return (numel_ + chunk_numel_ - 1) / chunk_numel_; }
  int64_t chunk_start(int64_t chunk) const { return chunk * chunk_numel_; }
  int64_t chunk_stop(int64_t chunk) const { return std::min(numel_, (chunk + 1) * chunk_numel_); }

  // All of it, [numel] on the CPU, where the tier's bytes are used in place; undefined elsewhere. Keeps the bytes
  // alive.
  at::Tensor in_place() const;

  // Moves one chunk from or to `buffer`, which is aligned and chunk_bytes long. The padding after the last element
  // travels with it.
  Transfer read_chunk(int64_t chunk, std::byte* buffer);
  Transfer write_chunk(int64_t chunk, const std::byte* buffer);

  // --- between steps; they block and use the offload's staging buffers ---
  // Calls `take(first element, values)` for elements [start, stop) in order, in pieces that are valid during the call.
  void read(int64_t start, int64_t stop, const std::function<void(int64_t, const at::Tensor&)>& take);
  at::Tensor read(int64_t start, int64_t stop);  // a copy, [stop - start]
  // Sets elements [start, start + values.numel()) from a tensor of any dtype and device.
  void write(int64_t start, const at::Tensor& values);
  void clear();  // all zeros

 private:
  struct Reservation {
    std::shared_ptr<Offload> offload;
    TierExtent extent;
    ~Reservation() { offload->tier().free(extent); }
  };

  uint64_t padded_bytes(int64_t numel) const;
  uint64_t padded_bytes_of(int64_t chunk) const { return padded_bytes(chunk_stop(chunk) - chunk_start(chunk)); }
  uint64_t place_of(int64_t chunk) const { return chunk * padded_bytes(chunk_numel_); }
  at::Tensor view(std::byte* buffer, int64_t numel) const;
  void check_range(int64_t start, int64_t stop) const;

  std::shared_ptr<Offload> offload_;
  int64_t numel_;
  c10::ScalarType dtype_;
  StateFormat format_;
  int64_t chunk_elements_;
  int64_t chunk_numel_;
  std::shared_ptr<Reservation> reservation_;  // shared with tensors that show it in place
  std::vector<bool> is_zero_;                 // chunks that nothing was written to: they are not read
};

}  // namespace zeropg
