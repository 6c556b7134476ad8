// Where a unit's parameters live between steps and how a rank gets them whole.
//
// The implementations are in registry.cpp.
#pragma once

#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

class Fetch {
 public:
  virtual ~Fetch() = default;
  virtual const char* name() const = 0;

  // Gives a flat parameter its home and its master, filled from `values`, which FlatParameter::take_over has returned.
  // Collective: once for each, on all ranks in the same order. end_adoption comes after the last.
  virtual void adopt(FlatParameter& flat, const at::Tensor& values) = 0;
  virtual void end_adoption() {}

  // What a flat parameter is made whole for: a unit's forward and backward, a program that reads it, or one that may
  // write it, which gets it in memory of this rank alone.
  enum class Use { kCompute, kRead, kWrite };
  // Makes `flat` whole: attaches its parameters. Collective where is_collective() says so.
  virtual void unshard(FlatParameter& flat, Use use) = 0;
  virtual void reshard(FlatParameter& flat) = 0;
  virtual bool is_collective() const = 0;
  // What is trained may have changed, alike on all ranks, and units are about to be made whole for that, or for a
  // forward alone (`trains` is false). Where a difference would leave ranks waiting, they compare it from then on.
  virtual void note_trained(bool /*trains*/) {}
  // Where ranks compare which item each gathers: this model's come behind this number. Otherwise 0.
  virtual int64_t first_item() const { return 0; }
  // Begins to make `flat` whole for kCompute, behind whatever runs until unshard, which takes the oldest that has
  // begun. Collective. `flat` may be whole.
  virtual void prefetch(FlatParameter& /*flat*/) {}
  // Gives up what was prefetched and not made whole. `waits`: every rank has prefetched the same, so it arrives;
  // otherwise its memory is left to the collectives. Where a signal handler ends the waiting, throws what it raised, to
  // be called again.
  virtual void drop_prefetched(bool /*waits*/) {}

  // Bracket every change of masters (optimizer step, loading). Collective. begin_update returns when no rank reads the
  // old values any more, and whether all shards passed the same `news`; what was prefetched is dropped. end_update
  // makes the new values visible to the next unshard on every rank. A begin_update that throws has ended the update
  // too.
  virtual bool begin_update(int64_t news) = 0;
  // What has changed masters. After an optimizer's step parameters may follow them by differences
  // (FlatParameter::sends_differences); after anything else they become what the masters are. An overlapped step only
  // sends what must be sent, in the order of `flats`: those that are not attached afterwards are on their way, and
  // unshard waits for them, without communicating. The same change on all ranks.
  enum class Change { kLoad, kStep, kOverlappedStep };
  virtual void end_update(const std::vector<FlatParameter*>& flats, Change change) = 0;

  // Moves what `flat` holds between steps to other memory, where it cannot be made whole, and back. Nothing is whole
  // that can be sharded. Not in shared memory, which the host computes in.
  virtual void offload(FlatParameter& /*flat*/, const Move& /*move*/) {}
  virtual void reload(FlatParameter& /*flat*/, const Move& /*move*/) {}

  // Bytes that this rank holds, its part of shared memory included.
  struct Memory {
    int64_t parameters = 0;  // in the dtype of computation
    int64_t gathered = 0;    // buffers for units that are whole
  };
  virtual Memory memory() const = 0;
};

}  // namespace zeropg
