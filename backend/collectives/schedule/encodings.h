// The words that planner functions use for what travels encoded (CollectiveSpec::codec).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/schedule/steps.h"
#include "compression/compressor.h"

namespace zeropg {

inline constexpr int64_t kFloatBytes = 4;

// The codec of a hop: the owner of a range may send its sum in another way than contributions travel.
const Compressor& codec_of(const Compressor& codec, ResidualHop hop);

// Room for an encoding of floats of `bytes` in all, with its size in front where that varies.
int64_t room_of_encoding(const CollectiveSpec& spec, ResidualHop hop, int64_t bytes);

// The size in front of an encoding: Note [Sized messages]. put: std::length_error for one that four bytes cannot hold.
void put_size(std::span<std::byte> message, int64_t length);
int64_t get_size(std::span<const std::byte> message);

// Of elements from `offset_bytes` of the request's range; none, where there are none.
Region residual(const CollectiveSpec& spec, ResidualHop hop, int64_t offset_bytes);

// Each adds one step; those without bytes are left out. `bytes`: of the floats.
void add_encode(PipelineStage stage, ResidualHop hop, Region destination, Region source, Region residual,
                StepBytes bytes);
void add_decode(PipelineStage stage, ResidualHop hop, Region destination, Region source, StepBytes bytes);
void add_decode_add(PipelineStage stage, ResidualHop hop, Region destination, Region source, StepBytes bytes);
void add_send_encoding(PipelineStage stage, const CollectiveSpec& spec, ResidualHop hop, int32_t peer, Region source,
                       StepBytes bytes);
void add_receive_encoding(PipelineStage stage, const CollectiveSpec& spec, ResidualHop hop, int32_t peer,
                          Region destination, StepBytes bytes);

// Before the first encoding of contributions, for a codec that selects: all of `source`.
void add_select(PipelineStage stage, Region source, Region residual, int64_t bytes);
// `values` <- what others would decode of `source`, which may be the same memory. For what a rank adds of its own to a
// sum where the codec selects: the sum then is as sparse as what was sent. With other codecs it stays exact. `room`:
// for the encoding.
void add_round_trip(PipelineStage stage, ResidualHop hop, Region values, Region source, Region room, Region residual,
                    StepBytes bytes);

}  // namespace zeropg
