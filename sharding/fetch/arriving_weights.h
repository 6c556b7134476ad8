// The new weights of stages 1 and 2, on their way: what a step has changed in the slices of their owners, until the
// replica that each rank has of a flat parameter has it too.
//
// All is sent by one call, in one order on every rank, whether it waits or not. What arrives is waited for later, by
// each rank where it needs it: that communicates nothing further. Until then a flat parameter may be hidden
// (FlatParameter::hide), since its memory has old, new and half-written weights.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

class ArrivingWeights {
 public:
  // `differences`: how they travel, for flat parameters that send them.
  ArrivingWeights(Communicator& communicator, Compression differences)
      : communicator_(communicator), differences_(std::move(differences)) {}

  // Sends the slices of `flats`, of which none is on its way, in this order, and returns when all have arrived.
  // `as_differences`: where a flat parameter sends these; otherwise its replica becomes what the masters are.
  // Collective. What has not arrived where it throws is hidden.
  void gather(const std::vector<FlatParameter*>& flats, bool as_differences);
  // Only sends them, in this order, as differences where they do. All `flats` are hidden from then on, also where it
  // throws. Collective.
  void send(const std::vector<FlatParameter*>& flats);
  // Returns when `flat` has arrived, and shows it again; at once for one that is not on its way. Not collective; any
  // thread. DistBackendError where it does not arrive, also at the next call. Where a signal handler ends the waiting,
  // throws what it raised, to be called again.
  void wait_for(FlatParameter& flat);

  int64_t buffer_bytes() const { return pool_.allocated_bytes(); }

 private:
  struct Arrival {
    int64_t began = 0;  // for the log
    at::Tensor whole;   // the replica, [total_numel]
    bool is_hidden = false;
    c10::intrusive_ptr<c10d::Work> work;  // null: not sent, since an earlier one could not be
    std::optional<c10::Stream> stream;    // that it was sent from, on a device
    at::Tensor mine;                      // of a difference, [shard_numel]
    at::Tensor everybodys;                // and decoded, [total_numel]; undefined: the slices themselves come
  };

  void expect(const std::vector<FlatParameter*>& flats);
  void send(FlatParameter& flat, bool as_difference);
  void send_difference(FlatParameter& flat, Arrival& arrival);
  void gather_in_order(const std::vector<FlatParameter*>& flats, bool as_differences);
  void wait_through_interrupts(FlatParameter& flat, std::exception_ptr& interrupt);
  void wait(const FlatParameter& flat, const Arrival& arrival);
  void end(FlatParameter& flat);
  void hide_all();

  Communicator& communicator_;
  Compression differences_;
  BufferPool pool_;
  // Guards what is below, and the end of an arrival; not held while a thread waits.
  std::mutex mutex_;
  std::unordered_map<FlatParameter*, Arrival> arrivals_;
};

}  // namespace zeropg
