// Masters: the values of highest precision, which the optimizer updates and checkpoints save.
#pragma once

#include <functional>

#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"

namespace zeropg {

// Reserves room in the tier for masters that are apart from the parameters. TierError.
void reserve_master(FlatParameter& flat, const ShardingOptions& options);

// Sets the masters of `flat` for flat range [start, start + home.numel()): `home` itself (the same range in the
// parameters' dtype) where that is the master's dtype, otherwise a copy from `values` [total_numel] beside it, in the
// tier where reserve_master() has made room. Fills `home`.
void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start);

// `home` is other memory with the same values: what shows flat range [start, ...) as make_master() had it, is there.
void move_home(FlatParameter& flat, const at::Tensor& home);

// Calls `take(first, values)` for elements [start, stop) of the masters in order, in pieces: live views where they are
// in memory, otherwise copies that are valid during the call.
void for_each_master_piece(const FlatParameter& flat, int64_t start, int64_t stop,
                           const std::function<void(int64_t, const at::Tensor&)>& take);

int64_t resident_master_bytes(const FlatParameter& flat);  // beside the parameters

}  // namespace zeropg
