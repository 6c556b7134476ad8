#include "sharding/module/gradient_access.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "sharding/comm/digest.h"
#include "sharding/module/clip.h"

namespace zeropg {

namespace {

// NaN is itself.
bool has_same_bits(const std::array<double, 2>& one, const std::array<double, 2>& other) {
  return std::memcmp(one.data(), other.data(), sizeof(one)) == 0;
}

}  // namespace

void GradientAccess::check_reduced(const char* operation, const char* before_what) {
  backward_.recover();
  TORCH_CHECK(!backward_.is_running(), communicator_.context(operation), "called inside a backward; call it after.");
  reducer_.check_not_lost(communicator_.context(operation));
  TORCH_CHECK(!reducer_.has_unreduced_gradients(), communicator_.context(operation),
              "gradients were accumulated inside no_sync, or before the boundary of an accumulation, and have not been "
              "reduced; expected the last backward before ",
              before_what, " to run outside of zeropg.no_sync(model), as the one at a boundary does.");
}

at::Tensor GradientAccess::of(int64_t flat) {
  check_reduced("step", "a step");
  return reducer_.gradient(*units_.flats()[flat]);
}

bool GradientAccess::has(int64_t flat, int64_t slot) const {
  return units_.flats()[flat]->slots()[slot].has_gradient();
}

int64_t GradientAccess::digest() const {
  if (!reducer_.context().averages) return 0;
  std::vector<uint8_t> has_gradient;
  for (const auto& flat : units_.flats()) {
    for (const ParameterSlot& slot : flat->slots()) has_gradient.push_back(slot.has_gradient() ? 1 : 0);
  }
  return static_cast<int64_t>(zeropg::digest(std::as_bytes(std::span(has_gradient))) | 1U);
}

void GradientAccess::zero() {
  backward_.recover();
  reducer_.zero();
}

void GradientAccess::scale(double factor, const std::vector<at::Tensor>* parameters) {
  at::NoGradGuard no_grad;
  backward_.recover();
  reducer_.scale(factor, parameters);
}

void GradientAccess::show_full() {
  check_reduced("full_gradients", "it");
  reducer_.show_full();
}

void GradientAccess::hide_full() { reducer_.hide_full(); }

double GradientAccess::clip_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  check_reduced("clip_grad_norm_", "it");
  at::NoGradGuard no_grad;
  std::vector<int64_t> trainable;
  for (size_t i = 0; i < units_.flats().size(); ++i) {
    if (units_.flats()[i]->is_trainable()) {
      trainable.push_back(static_cast<int64_t>(i));
    }
  }
  // One value per flat parameter and rank, of the slice that the rank owns in every stage; behind them the arguments.
  const int64_t count = static_cast<int64_t>(trainable.size());
  at::Tensor mine = at::zeros({count + 2}, at::kDouble);
  mine.mutable_data_ptr<double>()[count] = max_norm;
  mine.mutable_data_ptr<double>()[count + 1] = norm_type;
  for (int64_t i = 0; i < count; ++i) {
    const FlatParameter& flat = *units_.flats()[trainable[i]];
    const at::Tensor averaged = of(trainable[i]);
    if (averaged.defined()) {
      const at::Tensor slice = averaged.narrow(0, flat.shard_start() - flat.master.start, flat.layout().shard_numel);
      mine.mutable_data_ptr<double>()[i] = norm_contribution(slice, norm_type);
    }
  }
  // Every shard's, and the norm of all.
  at::Tensor everybodys = mine;
  if (communicator_.shards() > 1 && count > 0) {
    const c10::Device device = units_.flats().front()->device();
    everybodys = at::empty({communicator_.shards() * (count + 2)}, mine.options().device(device));
    communicator_.wait(communicator_.gather_slices(everybodys, mine.to(device)));
    everybodys = everybodys.cpu();
  }
  const double* row = everybodys.const_data_ptr<double>();
  std::vector<double> contributions;
  std::map<int64_t, std::vector<double>> of_parts;  // by split: what this rank's parts of tensors contribute
  const std::array<double, 2> own = {max_norm, norm_type};
  std::array<double, 2> arguments = own;  // another rank's, where they differ
  for (int64_t shard = 0; shard < everybodys.numel() / (count + 2); ++shard, row += count + 2) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t split = units_.flats()[trainable[i]]->slots().front().split;
      (split == 0 ? contributions : of_parts[split]).push_back(row[i]);
    }
    if (has_same_bits(arguments, own)) arguments = {row[count], row[count + 1]};
  }
  if (communicator_.groups().parts != nullptr && count > 0) {
    const auto bits = std::bit_cast<std::array<int64_t, 2>>(arguments);
    const at::Tensor all = gather_values_of_parts(communicator_, bits, units_.flats().front()->device());
    for (int64_t rank = 0; rank < all.size(0) && has_same_bits(arguments, own); ++rank) {
      std::memcpy(arguments.data(), all.const_data_ptr<int64_t>() + 2 * rank, sizeof(arguments));
    }
  }
  TORCH_CHECK_VALUE(has_same_bits(arguments, own), communicator_.context("clip_grad_norm_"), "max_norm is ", max_norm,
                    " and norm_type ", norm_type, " on this rank, but ", arguments[0], " and ", arguments[1],
                    " on another; expected the same on every rank, and no gradient was changed.");
  for (auto& [split, values] : of_parts) {
    const auto all = gather_over_split(communicator_, split, std::move(values), units_.flats().front()->device());
    contributions.insert(contributions.end(), all.begin(), all.end());
  }
  const double norm = combine_norms(contributions, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm), communicator_.context("clip_grad_norm_"),
              "the total norm of order ", norm_type, " is ", norm,
              "; expected a finite number. To scale by it anyway pass error_if_nonfinite=False.");
  const double coefficient = max_norm / (norm + 1e-6);
  if (!(coefficient >= 1.0)) {
    reducer_.scale(coefficient);
  }
  return norm;
}

}  // namespace zeropg
