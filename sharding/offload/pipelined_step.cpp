#include "sharding/offload/pipelined_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string>

namespace zeropg {
namespace {

struct Chunk {
  const TieredFlat* flat;
  int64_t index;
  int64_t start;  // elements
  int64_t stop;
};

// The tiered vectors of a flat parameter: those that must be moved, or worked on in place.
std::vector<TieredVector*> streams_of(const TieredFlat& flat) {
  std::vector<TieredVector*> streams;
  if (flat.tiered_master != nullptr) streams.push_back(flat.tiered_master.get());
  for (const auto& slot : flat.state) {
    streams.push_back(slot.get());
  }
  return streams;
}

std::vector<Chunk> chunks_of(const Offload& offload, const std::vector<TieredFlat>& flats) {
  std::vector<Chunk> chunks;
  for (const TieredFlat& flat : flats) {
    const std::vector<TieredVector*> streams = streams_of(flat);
    const int64_t numel = flat.gradient.numel();
    TORCH_CHECK_VALUE(static_cast<int64_t>(streams.size()) <= kMaxStreams, "[zeropg] offload: ", streams.size(),
                      " vectors of one flat parameter, expected at most ", kMaxStreams);
    for (const TieredVector* stream : streams) {
      TORCH_CHECK_VALUE(stream->numel() == entries_of(stream->format(), numel) && &*stream->offload() == &offload &&
                            stream->chunk_elements() == streams.front()->chunk_elements(),
                        "[zeropg] offload: vectors of one step that differ in size, dtype or tier");
    }
    const int64_t chunk_numel = streams.empty() ? numel : streams.front()->chunk_elements();
    for (int64_t start = 0, index = 0; start < numel; start += chunk_numel, ++index) {
      const int64_t stop = std::min(numel, start + chunk_numel);
      const bool is_stepped = std::any_of(flat.runs.begin(), flat.runs.end(),
                                          [&](const StepRun& run) { return run.start < stop && start < run.stop; });
      if (is_stepped) chunks.push_back({&flat, index, start, stop});
    }
  }
  return chunks;
}

// One of the places that chunks pass through in turn. Its transfers end before it does.
class Stage {
 public:
  Stage(Offload& offload, int64_t index) : offload_(offload), index_(index) {}

  void read(const Chunk& chunk) {
    finish();  // what passed here before is still being written
    chunk_ = chunk;
    streams_ = streams_of(*chunk.flat);
    values_.clear();
    for (size_t i = 0; i < streams_.size(); ++i) {
      const StateFormat format = streams_[i]->format();
      const int64_t entries = entries_of(format, chunk.stop - chunk.start);
      if (const at::Tensor all = streams_[i]->in_place(); all.defined()) {
        values_.push_back(all.narrow(0, entries_of(format, chunk.start), entries));
        continue;
      }
      std::byte* const buffer = offload_.staging(index_, static_cast<int64_t>(i));
      transfers_[i] = streams_[i]->read_chunk(chunk.index, buffer);
      values_.push_back(at::from_blob(buffer, {entries}, at::dtype(streams_[i]->dtype())));
    }
  }

  void step() {
    finish();
    const TieredFlat& flat = *chunk_.flat;
    const auto chunk_of = [&](const at::Tensor& all) {
      return all.narrow(0, chunk_.start, chunk_.stop - chunk_.start);
    };
    const bool has_tiered_master = flat.tiered_master != nullptr;
    const at::Tensor gradient = chunk_of(flat.gradient).cpu();  // itself, on the CPU
    FlatView view{.master = has_tiered_master ? values_.front() : chunk_of(flat.master).cpu(),
                  .gradient = gradient,
                  .state = {values_.begin() + (has_tiered_master ? 1 : 0), values_.end()},
                  .parameter_out = {}};
    if (flat.parameter_out.defined()) view.parameter_out = chunk_of(flat.parameter_out).cpu();
    for (const StepRun& run : flat.runs) {
      const int64_t start = std::max(run.start, chunk_.start) - chunk_.start;
      const int64_t stop = std::min(run.stop, chunk_.stop) - chunk_.start;
      if (start < stop) step(view, run, start, stop);
    }
    if (!has_tiered_master) copy_back(view.master, chunk_of(flat.master));
    if (flat.parameter_out.defined()) copy_back(view.parameter_out, chunk_of(flat.parameter_out));
  }

  void write() {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (!streams_[i]->in_place().defined()) {
        transfers_[i] = streams_[i]->write_chunk(chunk_.index, offload_.staging(index_, static_cast<int64_t>(i)));
      }
    }
  }

  // Whether what passes here is, with other state, the same elements of one master in a tier: param groups of one flat
  // parameter may keep state of different formats.
  bool holds_master_of(const Chunk& chunk) const {
    return chunk_.flat != nullptr && chunk.flat->tiered_master != nullptr &&
           chunk_.flat->tiered_master == chunk.flat->tiered_master && chunk_.index == chunk.index;
  }

  void finish() {
    for (Transfer& transfer : transfers_) {
      transfer.wait();
    }
  }

 private:
  static void copy_back(const at::Tensor& computed, const at::Tensor& home) {
    if (!home.is_cpu()) home.copy_(computed);
  }

  static void step(FlatView chunk, const StepRun& run, int64_t start, int64_t stop) {
    chunk.state.resize(run.slots);
    run.optimizer->step(cut(chunk, run.optimizer->state_slots(run.arguments.hyperparameters), start, stop),
                        run.arguments);
  }

  Offload& offload_;
  const int64_t index_;
  Chunk chunk_{};
  std::vector<TieredVector*> streams_;
  std::vector<at::Tensor> values_;               // one per stream: the chunk's elements
  std::array<Transfer, kMaxStreams> transfers_;  // under way from or to the staging buffers
};

}  // namespace

void pipelined_step(Offload& offload, const std::vector<TieredFlat>& flats) {
  at::NoGradGuard no_grad;
  const std::vector<Chunk> chunks = chunks_of(offload, flats);
  std::array<Stage, kChunksInFlight> stages{Stage(offload, 0), Stage(offload, 1), Stage(offload, 2)};
  static_assert(kChunksInFlight == 3);
  const auto read = [&](size_t i) {
    for (Stage& stage : stages) {
      if (stage.holds_master_of(chunks[i])) stage.finish();  // what it writes is what this reads
    }
    stages[i % stages.size()].read(chunks[i]);
  };
  if (!chunks.empty()) read(0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    Stage& stage = stages[i % stages.size()];
    const bool has_next = i + 1 < chunks.size();
    const bool reads_ahead = has_next && !stage.holds_master_of(chunks[i + 1]);
    if (reads_ahead) read(i + 1);
    stage.step();
    stage.write();
    if (has_next && !reads_ahead) read(i + 1);
  }
  for (Stage& stage : stages) {
    stage.finish();
  }
}

}  // namespace zeropg
