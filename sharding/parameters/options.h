// What a user decides about a sharded model. Plain data; the same on every rank, but for the place of an offload and
// for what the residuals hold.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "compression/codec_meter.h"
#include "compression/codec_table.h"
#include "compression/error_feedback.h"
#include "sharding/comm/communicate.h"
#include "sharding/offload/offload.h"
#include "sharding/parameters/unit_limits.h"
#include "sharding/stage.h"

namespace zeropg {

struct ShardingOptions {
  Stage stage = kStages[3];
  std::optional<c10::ScalarType> param_dtype;   // computation; default: the parameter's own
  std::optional<c10::ScalarType> reduce_dtype;  // gradients on the wire; default: the master's (fp32, fp64 for fp64)
  CodecTable codecs;                            // of gradients between ranks
  std::shared_ptr<ResidualStore> residuals;     // this rank's, of these codecs; null: no error feedback
  Compression weights;                          // of updated weights between ranks, without residuals
  std::shared_ptr<CodecMeter> meter;            // of gradients; null: the group's
  bool reshard_after_forward = true;            // false: a unit stays whole from its forward to its backward
  UnitLimits limits;                            // where units are gathered
  c10::intrusive_ptr<c10d::Store> store;        // of this model alone, for PathWatch; null: none
  std::shared_ptr<Offload> optimizer_offload;   // where masters go that are apart from the parameters; null: memory
};

// Parameters of 16 bits and less are updated in fp32: their own dtype loses small updates.
inline c10::ScalarType master_dtype_of(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

}  // namespace zeropg
