#include "sharding/module/masters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cerrno>
#include <span>

#include "sharding/comm/digest.h"
#include "sharding/parameters/master.h"

namespace zeropg {

const char* const kReplicasDiffer =
    "the replicas of a slice wrote different values to their masters; expected the same program on every rank. Values "
    "of "
    "the first replica were kept. Compute what is written from the same numbers on every rank "
    "(torch.distributed.broadcast or all_reduce them first).";

std::exception_ptr failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void Masters::reserve() {
  const std::exception_ptr failure = failure_of([&] {
    for (const auto& flat : units_.flats()) {
      reserve_master(*flat, options_);
    }
  });
  fail_together(failure, "fully_shard", "reserve room for", ENOSPC);
}

void Masters::fail_together(const std::exception_ptr& failure, const char* operation, const char* could_not, int code) {
  if (options_.optimizer_offload != nullptr && communicator_.world_size() > 1 && !units_.flats().empty()) {
    const at::Tensor mine = at::zeros({1}, at::kDouble).fill_(failure == nullptr ? 0.0 : 1.0);
    const c10::Device device = units_.flats().front()->device();
    const at::Tensor all = at::empty({communicator_.world_size()}, mine.options().device(device));
    communicator_.wait(communicator_.all_gather(all, mine.to(device)));
    if (failure == nullptr && all.max().item<double>() > 0) {
      throw TierError(c10::str(communicator_.context(operation), "rank ", all.argmax().item<int64_t>(), " could not ",
                               could_not, " its masters; see its error."),
                      code);
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Masters::settle(const char* operation) {
  if (units_.is_full_for_reading()) {
    return;  // nothing could be written, and what a forward inside wrote is settled after it
  }
  if (units_.full_depth() == 0) {
    units_.reshard_all();
  }
  begin_update(operation);
  if (options_.stage.shards_parameters) {  // where they are replicated, all ranks have the new values by now
    end_update(/*is_step=*/false);
  }
}

void Masters::refresh_own() {
  if (!options_.stage.shards_parameters) {  // where other ranks read what this one would write, ranks must meet first
    apply(units_.ledger().own_writes());
  }
}

void Masters::begin_update(const char* operation) {
  const int64_t news = units_.ledger().digest();
  const bool is_same_on_shards = units_.fetch().begin_update(news);
  const std::exception_ptr failure = failure_of([&] {
    const bool is_same = is_same_everywhere(is_same_on_shards, news);
    const WriteLedger::Settlement settlement = units_.ledger().settle(is_same, operation);
    if (!settlement.changes.empty()) {
      fail_together(failure_of([&] { apply(settlement.changes); }), operation, "read and write", EIO);
    }
    const bool are_replicas_same = !settlement.may_have_written_shards || unite_replicas(operation);
    if (settlement.may_have_written_shards) {
      publish();
    }
    TORCH_CHECK(settlement.conflict.empty(), communicator_.context(operation), settlement.conflict);
    TORCH_CHECK(are_replicas_same, communicator_.context(operation), kReplicasDiffer);
  });
  if (failure != nullptr) {
    if (options_.stage.shards_parameters) {
      end_update(/*is_step=*/false);  // the other ranks are waiting in theirs
    }
    std::rethrow_exception(failure);
  }
}

// Replicas hear of it, too, where only shards of one copy differ.
bool Masters::is_same_everywhere(bool is_same_on_shards, int64_t news) {
  if (units_.flats().empty()) {
    return is_same_on_shards;
  }
  const c10::Device device = units_.flats().front()->device();
  return communicator_.is_same_on_replicas({news, is_same_on_shards ? 1 : 0}, device) && is_same_on_shards;
}

bool Masters::unite_replicas(const char* operation) {
  if (communicator_.replicas() == 1 || units_.flats().empty()) {
    return true;
  }
  at::NoGradGuard no_grad;
  uint64_t digest_of_all = 0;
  const std::exception_ptr failure = failure_of([&] {
    for (const auto& flat : units_.flats()) {
      for_each_master_piece(*flat, 0, flat->master.numel, [&](int64_t, const at::Tensor& piece) {
        const at::Tensor here = piece.cpu().contiguous();
        digest_of_all = digest({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()}, digest_of_all);
      });
    }
  });
  fail_together(failure, operation, "read", EIO);
  const c10::Device device = units_.flats().front()->device();
  const bool is_same = communicator_.is_same_on_replicas({static_cast<int64_t>(digest_of_all), 0}, device);
  const at::Tensor differs = at::empty({1}, at::kInt).fill_(is_same ? 0 : 1).to(device);
  communicator_.wait(communicator_.all_reduce_max(differs));
  if (differs.item<int32_t>() == 0) {
    return true;
  }
  for (const auto& flat : units_.flats()) {
    const at::Tensor values = flat->master.read(0, flat->master.numel)
                                  .to(flat->device(), /*non_blocking=*/false,
                                      /*copy=*/true);
    communicator_.wait(communicator_.broadcast_to_replicas(values));
    flat->master.write(0, values);
    if (flat->parameter_out.defined()) {
      flat->parameter_out.copy_(values);
    }
  }
  return false;
}

void Masters::publish() {
  at::NoGradGuard no_grad;
  for (const auto& flat : units_.flats()) {
    const at::Tensor own = flat->master.read(flat->shard_start() - flat->master.start,
                                             flat->shard_start() - flat->master.start + flat->layout().shard_numel);
    if (flat->parameter_out.defined()) {
      flat->parameter_out.narrow(0, flat->shard_start() - flat->master.start, own.numel()).copy_(own);
    }
    if (options_.stage.shards_parameters || communicator_.shards() == 1) {
      continue;
    }
    const at::Tensor part = flat->whole().narrow(0, flat->shard_start(), flat->layout().shard_numel);
    if (flat->sends_differences()) {
      part.copy_(own);
    }
    communicator_.wait(communicator_.gather_slices(flat->whole(), part));
    if (!flat->is_own_master() && flat->master.numel == flat->layout().total_numel) {
      const at::Tensor whole = gather_slices(own.to(flat->device()));
      flat->master.write(0, whole);
    }
  }
}

// Inside an update.
void Masters::apply(const std::vector<WriteLedger::Change>& changes) {
  at::NoGradGuard no_grad;
  for (const WriteLedger::Change& change : changes) {
    FlatParameter& flat = *change.flat;
    const ParameterSlot& slot = flat.slots()[change.slot];
    // This rank's part of the parameter: elements [start, stop) of the masters.
    const int64_t start = std::clamp<int64_t>(slot.offset - flat.master.start, 0, flat.master.numel);
    const int64_t stop = std::clamp<int64_t>(slot.offset + slot.numel - flat.master.start, 0, flat.master.numel);
    if (start == stop) {
      continue;
    }
    if (flat.is_attached()) {
      const int64_t first = flat.master.start + start;
      const at::Tensor written = flat.whole().narrow(0, first, stop - start);
      if (!flat.sends_differences()) {
        write_back(flat, start, written, at::Tensor());
      } else if (change.before.defined()) {
        write_back(flat, start, written, change.before.narrow(0, first - slot.offset, stop - start));
      }
      continue;
    }
    const at::Tensor places = change.positions + (slot.offset - flat.master.start);
    const at::Tensor is_mine = places.ge(start).logical_and(places.lt(stop));
    const at::Tensor& home = flat.is_own_master() ? flat.master.values : flat.parameter_out;
    const at::Tensor written = home.narrow(0, start, stop - start).clone();
    written.index_copy_(0, places.masked_select(is_mine) - start, change.values.masked_select(is_mine));
    write_back(flat, start, written, at::Tensor());
  }
}

// Sets this rank's masters from element `start` on to what the parameter has there. `unwritten`: what it had there
// before the write; undefined: the masters, rounded.
void Masters::write_back(FlatParameter& flat, int64_t start, const at::Tensor& written, const at::Tensor& unwritten) {
  if (flat.is_own_master()) {
    if (!written.is_alias_of(flat.master.values)) {
      flat.master.values.narrow(0, start, written.numel()).copy_(written);
    }
    return;
  }
  // A master is more precise than what the user saw, so it changes only where the user changed something.
  for_each_master_piece(flat, start, start + written.numel(), [&](int64_t first, const at::Tensor& piece) {
    const at::Tensor after = written.narrow(0, first - start, piece.numel()).to(piece.device());
    const at::Tensor before =
        unwritten.defined() ? unwritten.narrow(0, first - start, piece.numel()) : piece.to(flat.dtype());
    const at::Tensor is_changed = before.ne(after).logical_and(before.eq(before).logical_or(after.eq(after)));
    flat.master.write(first, at::where(is_changed, after.to(flat.master_dtype()), piece));
  });
  if (flat.parameter_out.defined() && !written.is_alias_of(flat.parameter_out)) {
    flat.parameter_out.narrow(0, start, written.numel()).copy_(written);
  }
}

void Masters::load(int64_t index, int64_t slot_index, const at::Tensor& value, int64_t first) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *units_.flats()[index];
  const at::Tensor values = value.detach().reshape({-1});
  const ParameterSlot& slot = flat.slots().at(slot_index);
  TORCH_CHECK_VALUE(first >= 0 && values.numel() <= slot.numel - first, communicator_.context("load"), "elements [",
                    first, ", ", first + values.numel(), ") of '", slot.names.front(), "', which has ", slot.numel);
  for (const SlotRange& range : flat.slots_in(flat.master.start, flat.master.start + flat.master.numel)) {
    const int64_t from = std::max(range.start, first);
    const int64_t to = std::min(range.stop, first + values.numel());
    if (range.slot == slot_index && from < to) {
      const int64_t start = range.flat_start + (from - range.start) - flat.master.start;
      const at::Tensor part = values.narrow(0, from - first, to - from).to(flat.master_dtype());
      flat.master.write(start, part);
      if (flat.parameter_out.defined()) {
        flat.parameter_out.narrow(0, start, part.numel()).copy_(part);
      }
    }
  }
}

at::Tensor Masters::gather(int64_t index) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *units_.flats()[index];
  at::Tensor mine;
  const std::exception_ptr failure = failure_of([&] { mine = flat.master.read(0, flat.master.numel); });
  fail_together(failure, "full_state_dict", "read", EIO);
  return flat.master.numel == flat.layout().total_numel ? mine : gather_slices(mine.to(flat.device()));
}

// [shards * n] of every shard's [n].
at::Tensor Masters::gather_slices(const at::Tensor& mine) {
  at::Tensor whole = at::empty({communicator_.shards() * mine.numel()}, mine.options());
  communicator_.wait(communicator_.gather_slices(whole, mine));
  return whole;
}

}  // namespace zeropg
