// A collective algorithm as data.
//
// An algorithm is a pure function (specification, rank) -> Schedule. Three things consume a schedule: the engine runs
// it on shared memory and transports, the simulator runs all ranks of it in one process, the tests check it as a list.
// All three read it with a ScheduleCursor (schedule_cursor.h), which runs its loops.
//
// Steps of one rank run in the order of Note [Loops]. Ranks meet only in kBarrier (every rank of the node) and in
// kSend / kReceive (pairs of any nodes; a stream of bytes per ordered pair, so the n-th byte sent is the n-th byte
// received).
//
// Note [Loops]
// How long a schedule is depends on the ranks, not on the bytes: a tensor is cut into chunks, and a schedule is a row
// of loops over chunks. In iteration t of a loop, each of its steps, in list order, works on chunk t - lag of its own
// count of chunks (Step::lag, Step::chunks), if that is one. So steps of different lags work on different chunks
// between two barriers, as the stages of a pipeline do, and filling and draining the pipeline takes no steps of its
// own. A loop ends when no step has a chunk left; most schedules have one loop, and a step that happens once has one
// chunk.
//
// What is done to a chunk is done to each alike: a region moves on by its stride from chunk to chunk, or changes banks,
// and the last chunk, which may be shorter, takes the first `last_bytes` of what a step does to others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/collectives/reduce/reduce_op.h"
#include "compression/error_feedback.h"

namespace zeropg {

// Where bytes live.
enum class Space : uint8_t {
  kInput,    // the caller's input tensors; Region::index says which
  kOutput,   // the caller's output tensors; may alias the input (in-place collectives)
  kScratch,  // private memory of this rank, Schedule::scratch_bytes long
  kStaging,  // memory that all ranks of the node share: one slot per rank (Region::index, its rank in the group) and
             // two banks of CollectiveSpec::bank_bytes each (Region::bank). Slots of other nodes cannot be reached
  // The tensor of another rank of the node (Region::index), where it lies in memory that all of them share: in
  // schedules of direct algorithms only, which all ranks run or none (Note [Direct schedules] in direct_access.h).
  kPeerInput,  // in all_to_all, from the start of the block for this rank
  kPeerOutput,
  kResidual,  // what this rank's encodings have lost so far (error feedback): Region::index is the hop, the offset
              // counts from the start of the request's range
};

struct Region {
  Space space = Space::kInput;
  uint8_t bank = 0;  // staging only: logical bank of the first chunk, 0 or 1; of the next chunk it is the other one.
                     // See Note [Banks].
  int32_t index = 0;
  int64_t offset_bytes = 0;  // for the first chunk
  // From chunk to chunk; of scratch from even chunks to odd ones, as two are under way; none in staging.
  int64_t stride_bytes = 0;
};

enum class StepKind : uint8_t {
  kCopy,     // destination <- source, `bytes` long; nothing to do where both are the same memory
  kReduce,   // destination <- op over Schedule::sources[first_source, first_source + source_count), in that order;
             // the same to Schedule::echoes[first_echo, first_echo + echo_count)
  kBarrier,  // no rank passes before every rank has arrived; what was written before is visible after
  kSend,     // source -> peer
  kReceive,  // destination <- peer
  // With CollectiveSpec::codec, on floats. `bytes` counts the floats' bytes; an encoding of theirs takes up to
  // room_of_encoding (encodings.h).
  kEncode,     // destination <- encoding of source + residual; residual <- what the encoding lost
  kDecode,     // destination <- decoded source
  kDecodeAdd,  // destination <- destination + decoded source
  kSelect,     // looks at source + residual, from which the encodings that follow (of this hop) choose
};

struct Step {
  StepKind kind = StepKind::kBarrier;
  bool is_final = false;  // reduce: this result is complete, so an average divides here (but see divides_average)
  // reduce: the sources are results of other reductions, so a premul_sum does not multiply them again
  bool has_partial_sources = false;
  ReduceForm form = ReduceForm::kWhole;  // reduce: `bytes` counts elements of the collective's dtype whatever this says
  bool is_streaming = false;             // copy: past the caches (copy.h)
  bool is_sized = false;                 // send, receive: Note [Sized messages]
  ResidualHop hop = kContributionHop;    // encode, decode, decode_add, select
  int32_t peer = -1;                     // rank in the group
  Region destination{};
  Region source{};
  Region residual{};       // encode, select: of the space kResidual, or any other for none
  int64_t bytes = 0;       // of each chunk but the last; a multiple of the element size in reducing steps
  int64_t last_bytes = 0;  // of the last chunk where there are several
  int64_t chunks = 1;
  int32_t lag = 0;  // the iteration of its loop in which it works on the first chunk
  int32_t first_source = 0;
  int32_t source_count = 0;
  int32_t first_echo = 0;
  int32_t echo_count = 0;
};

// Whether an average divides where this step reduces. In fp16 it is where values of ranks become a result in fp16: the
// sum of a node's ranks need not fit. With a codec, decoding divides.
inline bool divides_average(const Step& step, DType dtype, bool is_encoded) {
  if (dtype != DType::kFloat16 || is_encoded || step.form == ReduceForm::kToAccumulators) return step.is_final;
  return step.form == ReduceForm::kFromAccumulators || !step.has_partial_sources;
}

// Note [Sized messages]
// How long an encoding is may depend on the values. Then its first four bytes say how many follow (little-endian), and
// `bytes` of a step that sends or receives it is the room that is planned for both. The receiver never takes a length
// beyond that room: it is an error that names the peer.
inline constexpr int64_t kSizeBytes = 4;

// Note [Banks]
// A rank may start to fill its staging slot for the next chunk while a slow peer still reads the previous one. So chunk
// k uses bank k % 2, and bank reuse is separated by a barrier. `banks_used` counts the bank switches of a schedule; the
// engine starts the next schedule on the other bank than the one that was used last, which makes it legal to end a
// schedule without a barrier after the last read.
struct Schedule {
  std::string algorithm;  // e.g. "all_reduce_staged"; appears in logs and errors
  std::vector<Step> steps{};
  std::vector<size_t> loop_ends{};  // the step behind each loop but the last one, which takes the rest
  std::vector<Region> sources{};
  std::vector<Region> echoes{};
  int64_t scratch_bytes = 0;
  int32_t banks_used = 0;
  bool is_direct = false;  // uses the tensors of other ranks
};

}  // namespace zeropg
