// The few collectives that sharding needs, over any c10d process group, with the time that the caller spends in them.
//
// All functions but `allocate` are collective. Works are returned unfinished; `wait` finishes them. The GIL must not be
// held.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/group/collective_args.h"
#include "sharding/comm/event_log.h"

namespace zeropg {

class ProcessGroupZero;

class Communicator {
 public:
  // `log`: of the model that communicates; it outlives this.
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, EventLog& log);

  int64_t rank() const { return rank_; }
  int64_t world_size() const { return world_size_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  EventLog& log() const { return log_; }

  // How an error of `operation` begins: "[zeropg rank 1/4] step: ".
  std::string context(const char* operation) const;

  // `whole` [world_size * n] <- everybody's `part` [n]; `part` may be this rank's slice of `whole`. Of any dtype, as
  // broadcast. `item`: which of the caller's things it is, from 1; compared between ranks where compares_items().
  c10::intrusive_ptr<c10d::Work> all_gather(at::Tensor whole, at::Tensor part, uint64_t item = 0);
  bool compares_items(c10::Device device) const;
  // `whole` [world_size * n] <- what everybody's `part` [n] decodes to, this rank's too: the same bits on every rank.
  // fp32, fp16 or bf16 on a zeropg group. `part` is not in `whole`.
  c10::intrusive_ptr<c10d::Work> all_gather_encoded(const at::Tensor& whole, const at::Tensor& part,
                                                    const std::shared_ptr<const Compressor>& codec, uint64_t item = 0);
  // `part` [n] <- this rank's slice of the average of everybody's `whole` [world_size * n]. With a codec the bytes
  // travel encoded: fp32 on a zeropg group only.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_average(at::Tensor part, at::Tensor whole,
                                                        const Compression& compression);
  // Whether the group makes a reduce-scatter of an all-reduce, as gloo does: of a copy that it makes in the call, and
  // with a Work that is not complete before somebody waits. An all-reduce in place then gives the same bits sooner.
  bool scatters_by_all_reduce(c10::Device device) const;
  c10::intrusive_ptr<c10d::Work> all_reduce_average(at::Tensor whole, const Compression& compression);
  c10::intrusive_ptr<c10d::Work> all_reduce_max(at::Tensor whole);
  c10::intrusive_ptr<c10d::Work> broadcast(const at::Tensor& whole, int64_t root);
  // Whether every rank passes the same value. Waits for all of them.
  bool is_same_everywhere(int64_t value, c10::Device device);
  // Not collective: a buffer of bytes, [bytes], where this group's collectives are fastest: on a zeropg group and the
  // CPU in shared memory, as long as there is room for it there.
  at::Tensor allocate(int64_t bytes, c10::Device device);
  // Throws c10::Error, of whatever backend the group is, or what a signal handler raised; the work then goes on.
  // `purpose`, `unit`: for the log.
  void wait(const c10::intrusive_ptr<c10d::Work>& work, EventLog::Kind purpose = EventLog::Kind::kWait,
            const std::string& unit = "");

  // Runs `wait`, adds its time to seconds() and notes it in the log: for waits that are not a Work.
  template <typename Wait>
  void timed(Wait&& wait, EventLog::Kind purpose = EventLog::Kind::kWait, const std::string& unit = "") {
    const auto start = std::chrono::steady_clock::now();
    const int64_t began = log_.now();
    wait();
    log_.add(purpose, unit, began);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Time that the training thread has spent waiting for other ranks since the start.
  double seconds() const { return seconds_; }

 private:
  ProcessGroupZero* find_zeropg() const;  // what carries this group's CPU tensors, unless it is another backend
  ProcessGroupZero& zeropg_group();

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  EventLog& log_;
  int64_t rank_;
  int64_t world_size_;
  double seconds_ = 0;
};

}  // namespace zeropg
