#include "sharding/offload/tiered_vector.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "sharding/flat_layout.h"

namespace zeropg {

TieredVector::TieredVector(std::shared_ptr<Offload> offload, const std::string& what, int64_t numel,
                           c10::ScalarType dtype)
    : TieredVector(std::move(offload), what, numel, dtype, StateFormat::kMaster) {}

TieredVector::TieredVector(std::shared_ptr<Offload> offload, const std::string& what, int64_t elements,
                           c10::ScalarType master, StateFormat format)
    : offload_(std::move(offload)),
      numel_(entries_of(format, elements)),
      dtype_(entry_dtype(format, master)),
      format_(format),
      chunk_elements_(offload_->chunk_bytes() / static_cast<int64_t>(c10::elementSize(master))),
      chunk_numel_(entries_of(format, chunk_elements_)),
      reservation_(
          new Reservation{offload_, offload_->tier().allocate(numel_ / chunk_numel_ * padded_bytes(chunk_numel_) +
                                                                  numel_ % chunk_numel_ * c10::elementSize(dtype_),
                                                              what)}),
      is_zero_(chunk_count(), true) {}

uint64_t TieredVector::padded_bytes(int64_t numel) const {
  return static_cast<uint64_t>(round_up(numel * static_cast<int64_t>(c10::elementSize(dtype_)),
                                        static_cast<int64_t>(offload_->tier().alignment())));
}

at::Tensor TieredVector::view(std::byte* buffer, int64_t numel) const {
  return at::from_blob(buffer, {numel}, at::TensorOptions().dtype(dtype_));
}

at::Tensor TieredVector::in_place() const {
  if (numel_ == 0) return {};
  std::byte* const address = offload_->tier().address(reservation_->extent);
  if (address == nullptr) return {};
  return at::from_blob(
      address, {numel_}, [keep = reservation_](void*) {}, at::TensorOptions().dtype(dtype_));
}

Transfer TieredVector::read_chunk(int64_t chunk, std::byte* buffer) {
  const std::span<std::byte> bytes{buffer, padded_bytes_of(chunk)};
  if (is_zero_.at(chunk)) {
    std::memset(bytes.data(), 0, bytes.size());
    return {};
  }
  return offload_->tier().read(reservation_->extent, place_of(chunk), bytes);
}

Transfer TieredVector::write_chunk(int64_t chunk, const std::byte* buffer) {
  is_zero_.at(chunk) = false;
  return offload_->tier().write(reservation_->extent, place_of(chunk), {buffer, padded_bytes_of(chunk)});
}

void TieredVector::check_range(int64_t start, int64_t stop) const {
  TORCH_CHECK_VALUE(0 <= start && start <= stop && stop <= numel_, "[zeropg] offload: elements [", start, ", ", stop,
                    ") of a vector of ", numel_);
}

void TieredVector::read(int64_t start, int64_t stop, const std::function<void(int64_t, const at::Tensor&)>& take) {
  check_range(start, stop);
  at::NoGradGuard no_grad;
  if (const at::Tensor all = in_place(); all.defined() || start == stop) {
    if (start < stop) take(start, all.narrow(0, start, stop - start));
    return;
  }
  std::byte* const buffer = offload_->staging(0, 0);
  for (int64_t chunk = start / chunk_numel_; chunk < chunk_count() && chunk_start(chunk) < stop; ++chunk) {
    read_chunk(chunk, buffer).wait();
    const int64_t from = std::max(start, chunk_start(chunk));
    const int64_t to = std::min(stop, chunk_stop(chunk));
    take(from, view(buffer, chunk_stop(chunk) - chunk_start(chunk)).narrow(0, from - chunk_start(chunk), to - from));
  }
}

at::Tensor TieredVector::read(int64_t start, int64_t stop) {
  check_range(start, stop);
  at::Tensor values = at::empty({stop - start}, at::TensorOptions().dtype(dtype_));
  read(start, stop,
       [&](int64_t from, const at::Tensor& part) { values.narrow(0, from - start, part.numel()).copy_(part); });
  return values;
}

void TieredVector::write(int64_t start, const at::Tensor& values) {
  const int64_t stop = start + values.numel();
  check_range(start, stop);
  at::NoGradGuard no_grad;
  const at::Tensor flat = values.detach().reshape({-1});
  if (const at::Tensor all = in_place(); all.defined() || start == stop) {
    if (start < stop) all.narrow(0, start, stop - start).copy_(flat);
    return;
  }
  std::byte* const buffer = offload_->staging(1, 0);  // not read's: its `take` may write
  for (int64_t chunk = start / chunk_numel_; chunk < chunk_count() && chunk_start(chunk) < stop; ++chunk) {
    const int64_t from = std::max(start, chunk_start(chunk));
    const int64_t to = std::min(stop, chunk_stop(chunk));
    if (to - from < chunk_stop(chunk) - chunk_start(chunk)) {
      read_chunk(chunk, buffer).wait();
    }
    view(buffer, chunk_stop(chunk) - chunk_start(chunk))
        .narrow(0, from - chunk_start(chunk), to - from)
        .copy_(flat.narrow(0, from - start, to - from));
    write_chunk(chunk, buffer).wait();
  }
}

void TieredVector::clear() {
  std::fill(is_zero_.begin(), is_zero_.end(), true);
  if (const at::Tensor all = in_place(); all.defined()) {
    at::NoGradGuard no_grad;
    all.zero_();
  }
}

}  // namespace zeropg
