// One parameter, and what the program has written to it since ranks last settled (write_ledger.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/watched_storage.h"

namespace zeropg {

struct WrittenParameter {
  FlatParameter* flat = nullptr;
  int64_t slot = 0;
  bool is_written = false;    // in place
  c10::Storage settled;       // what was there before, of flats that send differences
  c10::Storage before;        // what changes count from, of parameters that are renormalized and written in place
  bool had_forward = false;   // since ranks last settled
  int64_t digest_before = 0;  // of `before`; 0: as they left it
  c10::Storage copy;          // what WriteLedger::Answer::kInCopy has given
  at::Tensor positions;       // of what changed in a copy that was given up, [n]; undefined: nothing
  at::Tensor values;          // [n]

  ParameterSlot& place() const { return flat->slots()[slot]; }
  // Where it lies in the flat parameter, which is attached: as a tensor, [numel], and for a storage to point at.
  at::Tensor home() const;
  WatchedStorage::Target home_target() const;
  // `storage`, of a copy of the parameter, as a tensor: [numel].
  at::Tensor tensor_of(const c10::Storage& storage) const;
  at::Tensor settled_values() const;  // undefined where there are none

  bool has_news() const { return is_written || positions.defined(); }
  // The same on ranks that have written the same.
  int64_t digest_of_news() const;
  // Sets `positions` and `values` to where `after` differs from `before` and what it has there.
  void find_changes(const at::Tensor& after, const at::Tensor& before);
  void forget_changes();
};

// The same elements as integers: NaNs are compared as they are, and every dtype can be moved.
at::Tensor bits_of(const at::Tensor& tensor);

}  // namespace zeropg
