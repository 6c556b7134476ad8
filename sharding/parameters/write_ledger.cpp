#include "sharding/parameters/write_ledger.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "sharding/comm/digest.h"

namespace zeropg {
namespace {

constexpr int64_t kCannotTell = -1;  // how many elements a rank changed in place

std::string refusal(const std::string& name) {
  return c10::str(
      "[zeropg] full_parameters: write access to parameter '", name,
      "' inside a `with` that only reads. To change it, pass writable=True; for an operator that only reads but asks "
      "for a writable pointer, clone() it first.");
}

std::string conflict_in(const std::string& name) {
  return c10::str("ranks wrote different values to parameter '", name,
                  "'; expected the same program on every rank. Values of the lowest rank that wrote were kept. Compute "
                  "what is written from the same numbers on every rank (torch.distributed.broadcast or all_reduce them "
                  "first).");
}

}  // namespace

WriteLedger::WriteLedger(Communicator& communicator, std::function<Answer()> answer)
    : communicator_(communicator), answer_(std::move(answer)) {}

void WriteLedger::watch(FlatParameter& flat) {
  for (int64_t slot = 0; slot < static_cast<int64_t>(flat.slots().size()); ++slot) {
    entry_of_[&flat].push_back(entries_.size());
    WrittenParameter& entry = entries_.emplace_back();
    entry.flat = &flat;
    entry.slot = slot;
    flat.slots()[slot].storage.set_before_write(
        [this, index = entries_.size() - 1] { return before_write(entries_[index]); });
  }
}

// --- while the program runs ---

// Called in the middle of somebody's kernel: nothing here goes through the dispatcher.
WatchedStorage::Target WriteLedger::before_write(WrittenParameter& entry) {
  const ParameterSlot& slot = entry.place();
  switch (answer_()) {
    case Answer::kRefused:
      TORCH_CHECK(false, refusal(slot.names.front()));
    case Answer::kInCopy:
      entry.copy = copy_of(entry);
      return {entry.copy, entry.copy.mutable_data()};
    case Answer::kInPlace:
      if (slot.is_renormalized && !entry.before) {
        entry.before = copy_of(entry);
      }
      keep_settled(entry);
      entry.is_written = true;
      return entry.home_target();
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Before the first write since ranks last settled.
void WriteLedger::keep_settled(WrittenParameter& entry) {
  if (entry.flat->sends_differences() && !entry.settled) {
    entry.settled = copy_of(entry);
  }
}

// Of what the parameter has in its home.
c10::Storage WriteLedger::copy_of(const WrittenParameter& entry) {
  const size_t bytes = entry.place().numel * c10::elementSize(entry.flat->dtype());
  return copies_.copy(entry.home_target().address, bytes, entry.flat->device().type());
}

void WriteLedger::begin_forward() {
  for (WrittenParameter& entry : entries_) {
    const ParameterSlot& slot = entry.place();
    if (!slot.is_renormalized || std::exchange(entry.had_forward, true) || !entry.is_written) {
      continue;
    }
    copies_.give_up(entry.before);
    entry.before = copy_of(entry);
    entry.digest_before = static_cast<int64_t>(digest_of(entry.tensor_of(entry.before), 1));
  }
}

void WriteLedger::show_own_writes(FlatParameter& flat) {
  for (const size_t index : entry_of_.at(&flat)) {
    WrittenParameter& entry = entries_[index];
    if (entry.positions.defined()) {
      ParameterSlot& slot = flat.slots()[entry.slot];
      entry.copy = copy_of(entry);
      const at::Tensor values = entry.tensor_of(entry.copy);
      bits_of(values).index_copy_(0, entry.positions, bits_of(entry.values));
      slot.storage.attach(values, 0, /*is_watched=*/false);
    }
  }
}

void WriteLedger::keep_own_writes(FlatParameter& flat) {
  for (const size_t index : entry_of_.at(&flat)) {
    WrittenParameter& entry = entries_[index];
    entry.is_written = false;  // what a settle that failed has left
    if (entry.copy) {
      entry.find_changes(entry.tensor_of(entry.copy), entry.home());
      copies_.give_up(entry.copy);
    }
  }
}

std::vector<std::string> WriteLedger::take_over_replaced() {
  at::NoGradGuard no_grad;
  std::vector<std::string> others;
  for (WrittenParameter& entry : entries_) {
    const ParameterSlot& slot = entry.place();
    if (!slot.storage.is_used_by(slot.tensors.local) && !take_over(entry)) {
      others.push_back(slot.names.front());
    }
  }
  return others;
}

// A write like any other, of the whole parameter.
bool WriteLedger::take_over(WrittenParameter& entry) {
  FlatParameter& flat = *entry.flat;
  ParameterSlot& slot = flat.slots()[entry.slot];
  const at::Tensor theirs = slot.tensors.local.detach();
  const Answer answer = answer_();
  if (!flat.is_attached() || entry.copy || answer == Answer::kRefused || theirs.layout() != at::kStrided ||
      theirs.scalar_type() != flat.dtype() || theirs.device() != flat.device() || theirs.sizes() != slot.sizes) {
    return false;
  }
  slot.storage.take_back(slot.tensors.local);
  at::Tensor home = entry.home();
  if (answer == Answer::kInCopy) {
    entry.copy = copy_of(entry);
    home = entry.tensor_of(entry.copy);
    slot.storage.attach(home, 0, /*is_watched=*/false);
  } else {
    keep_settled(entry);
    entry.is_written = true;
  }
  home.copy_(theirs.reshape({-1}));
  return true;
}

void WriteLedger::note_pointer_to_shards(WatchedStorage& storage) {
  may_have_written_shards_ = true;
  written_shards_.emplace_back(c10::intrusive_ptr<WatchedStorage>::reclaim_copy(&storage));
}

// --- settling ---

bool WriteLedger::is_any_renormalized() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const WrittenParameter& entry) { return entry.place().is_renormalized; });
}

bool WriteLedger::may_differ(bool in_copies) const {
  return is_any_renormalized() || (in_copies && !own_news().empty());
}

int64_t WriteLedger::digest() {
  at::NoGradGuard no_grad;
  replaced_ = take_over_replaced();
  uint64_t result = (replaced_.empty() ? 0 : 1) + (may_have_written_shards_ ? 2 : 0);
  for (const size_t index : own_news()) {
    const std::array<uint64_t, 3> parts = {result, index, static_cast<uint64_t>(entries_[index].digest_of_news())};
    result = zeropg::digest(std::as_bytes(std::span(parts))) | 1U;
  }
  return static_cast<int64_t>(result);
}

WriteLedger::Settlement WriteLedger::settle(bool is_same, const char* operation) {
  at::NoGradGuard no_grad;
  Settlement settlement;
  const std::vector<size_t> news = is_same ? own_news() : all_news();
  TORCH_CHECK(replaced_.empty() && !is_replaced_elsewhere_, "[zeropg rank ", communicator_.rank(), "/",
              communicator_.world_size(), "] ", operation, ": ",
              replaced_.empty() ? std::string("on another rank the data of a parameter was")
                                : "the data of '" + replaced_.front() + "' was",
              " replaced (p.data = ..., share_memory_(), .to()) by data that cannot take its place: of another shape, "
              "dtype or device, or while the parameter is sharded. Write the values inside `with "
              "zeropg.full_parameters(model, writable=True):` instead.");
  if (!is_same) {
    unite(find_differing(news), settlement);
  }
  for (WrittenParameter& entry : entries_) {
    entry.had_forward = false;
  }
  for (const size_t index : news) {
    WrittenParameter& entry = entries_[index];
    settlement.changes.push_back({entry.flat, entry.slot, entry.positions, entry.values, entry.settled_values()});
    forget(entry);
  }
  settlement.may_have_written_shards = std::exchange(may_have_written_shards_, false);
  for (const auto& shard : std::exchange(written_shards_, {})) {
    if (const auto storage = shard.lock()) {
      storage->refuse_writes_again();
    }
  }
  return settlement;
}

std::vector<size_t> WriteLedger::own_news() const {
  std::vector<size_t> news;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].has_news()) {
      news.push_back(i);
    }
  }
  return news;
}

// The indices of entries that some rank has written to.
std::vector<size_t> WriteLedger::all_news() {
  at::Tensor flags = at::zeros({static_cast<int64_t>(entries_.size()) + 2}, at::kByte);
  auto* flag = flags.mutable_data_ptr<uint8_t>();
  for (const size_t index : own_news()) {
    flag[index] = 1;
  }
  flag[entries_.size()] = replaced_.empty() ? 0 : 1;
  flag[entries_.size() + 1] = may_have_written_shards_ ? 1 : 0;
  const at::Tensor there = flags.to(device());
  communicator_.wait(communicator_.all_reduce_max(there));
  flags = there.cpu();
  flag = flags.mutable_data_ptr<uint8_t>();
  is_replaced_elsewhere_ = flag[entries_.size()] != 0;
  may_have_written_shards_ = flag[entries_.size() + 1] != 0;
  std::vector<size_t> news;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (flag[i] != 0) {
      news.push_back(i);
    }
  }
  return news;
}

// Those of `news` that ranks have written differently.
std::vector<size_t> WriteLedger::find_differing(const std::vector<size_t>& news) {
  std::vector<int64_t> mine;
  for (const size_t index : news) {
    mine.push_back(entries_[index].digest_of_news());
  }
  const std::vector<int64_t> all = gather(mine);
  std::vector<size_t> differing;
  for (size_t i = 0; i < news.size(); ++i) {
    bool is_same = true;
    for (size_t rank = 1; rank < static_cast<size_t>(communicator_.world_size()); ++rank) {
      is_same &= all[rank * news.size() + i] == all[i];
    }
    if (!is_same) {
      differing.push_back(news[i]);
    }
  }
  return differing;
}

std::vector<WriteLedger::Change> WriteLedger::own_writes() const {
  std::vector<Change> changes;
  for (const WrittenParameter& entry : entries_) {
    if (entry.is_written && entry.flat->is_attached()) {
      changes.push_back({entry.flat, entry.slot, at::Tensor(), at::Tensor(), entry.settled_values()});
    }
  }
  return changes;
}

// Makes what ranks have written differently one set of changes, the same on every rank.
void WriteLedger::unite(const std::vector<size_t>& differing, Settlement& settlement) {
  if (differing.empty()) {
    return;
  }
  std::vector<int64_t> counts;
  std::vector<int64_t> origins;
  for (const size_t index : differing) {
    WrittenParameter& entry = entries_[index];
    keep_settled(entry);
    origins.push_back(entry.digest_before);
    if (entry.before) {
      entry.find_changes(entry.home(), entry.tensor_of(entry.before));
    } else if (entry.is_written) {
      counts.push_back(kCannotTell);
      continue;
    }
    counts.push_back(entry.positions.defined() ? entry.positions.numel() : 0);
  }
  const std::vector<int64_t> all_counts = gather(counts);
  const std::vector<int64_t> all_origins = gather(origins);
  for (size_t i = 0; i < differing.size(); ++i) {
    std::vector<int64_t> of_ranks;
    for (size_t at = i; at < all_counts.size(); at += differing.size()) {
      of_ranks.push_back(all_origins[at] == all_origins[i] ? all_counts[at] : kCannotTell);
    }
    if (!unite(entries_[differing[i]], of_ranks) && settlement.conflict.empty()) {
      settlement.conflict = conflict_in(entries_[differing[i]].place().names.front());
    }
  }
}

bool WriteLedger::unite(WrittenParameter& entry, const std::vector<int64_t>& counts) {
  const at::TensorOptions options = at::dtype(entry.flat->dtype()).device(entry.flat->device());
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  if (most == 0 || std::count(counts.begin(), counts.end(), kCannotTell) > 0) {
    const at::Tensor home = entry.home();
    communicator_.wait(communicator_.broadcast(home, /*root=*/0));
    entry.forget_changes();
    return false;
  }
  // Everybody's changes, padded to the longest.
  at::Tensor positions = at::zeros({most}, options.dtype(at::kLong));
  at::Tensor values = at::zeros({most}, options);
  if (entry.positions.defined()) {
    positions.narrow(0, 0, entry.positions.numel()).copy_(entry.positions);
    bits_of(values).narrow(0, 0, entry.positions.numel()).copy_(bits_of(entry.values));
  }
  const at::Tensor all_positions = at::empty({communicator_.world_size() * most}, positions.options());
  const at::Tensor all_values = at::empty({communicator_.world_size() * most}, values.options());
  communicator_.wait(communicator_.all_gather(all_positions, positions));
  communicator_.wait(communicator_.all_gather(all_values, values));
  std::vector<at::Tensor> kept_positions;
  std::vector<at::Tensor> kept_bits;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    kept_positions.push_back(all_positions.narrow(0, static_cast<int64_t>(rank) * most, counts[rank]));
    kept_bits.push_back(bits_of(all_values).narrow(0, static_cast<int64_t>(rank) * most, counts[rank]));
  }
  // Sorted by position, and by rank where ranks have the same one: neighbours show whether they agree.
  const at::Tensor joined = at::cat(kept_positions);
  const at::Tensor order = at::argsort(joined, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor sorted = joined.index_select(0, order);
  const at::Tensor bits = at::cat(kept_bits).index_select(0, order);
  const int64_t pairs = sorted.numel() - 1;
  const at::Tensor is_repeated = sorted.narrow(0, 1, pairs).eq(sorted.narrow(0, 0, pairs));
  const at::Tensor is_different = bits.narrow(0, 1, pairs).ne(bits.narrow(0, 0, pairs));
  const at::Tensor is_first = at::cat({at::ones({1}, is_repeated.options()), is_repeated.logical_not()});
  const at::Tensor chosen = is_first.nonzero().squeeze(1);
  entry.positions = sorted.index_select(0, chosen);
  entry.values = bits.index_select(0, chosen).view(entry.flat->dtype());
  if (entry.flat->is_attached()) {
    bits_of(entry.home()).index_copy_(0, entry.positions, bits_of(entry.values));
    entry.forget_changes();
  }
  return !is_repeated.logical_and(is_different).any().item<bool>();
}

void WriteLedger::forget(WrittenParameter& entry) {
  entry.is_written = false;
  copies_.give_up(entry.before);
  copies_.give_up(entry.settled);
  entry.digest_before = 0;
  entry.forget_changes();
  const ParameterSlot& slot = entry.place();
  if (entry.flat->is_attached()) {
    entry.place().storage.attach(entry.flat->whole(), slot.offset, /*is_watched=*/true);
  }
}

std::vector<int64_t> WriteLedger::gather(const std::vector<int64_t>& mine) {
  if (communicator_.world_size() == 1) {
    return mine;
  }
  at::Tensor part = at::empty({static_cast<int64_t>(mine.size())}, at::kLong);
  std::memcpy(part.mutable_data_ptr(), mine.data(), mine.size() * sizeof(int64_t));
  const int64_t total = communicator_.world_size() * part.numel();
  at::Tensor all = at::empty({total}, at::dtype(at::kLong).device(device()));
  communicator_.wait(communicator_.all_gather(all, part.to(device())));
  all = all.cpu();
  const auto* values = all.const_data_ptr<int64_t>();
  return {values, values + total};
}

c10::Device WriteLedger::device() const { return entries_.front().flat->device(); }

}  // namespace zeropg
