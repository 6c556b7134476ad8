// What the program writes to parameters, from the write until the masters of all ranks have it.
//
// A parameter need not be the master: it may be a 16-bit copy, a replica of what another rank owns, or memory that all
// ranks of a node read. So every write is noticed (WatchedStorage), answered (Answer), and settled at the next call
// that all ranks make and that needs the masters: a step, full_parameters, a save.
//
// Ranks that run one program write the same, so digests of what was written are compared first; where they agree, each
// rank takes its own slice and nothing travels. Where they differ, what each rank changed is exchanged: different
// elements (rows that Embedding(max_norm=) renormalized on the rank that looked them up) are united, and different
// values for one element are an error on every rank. What was written before the forward that renormalized is the same
// on every rank of one program: the changes count from there (begin_forward), and ranks compare digests of it.
//
// A kernel that asks for a writable pointer and only reads (RNNs on CPU, compiled code) is a false alarm: it costs a
// comparison.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/spare_copies.h"
#include "sharding/parameters/written_parameter.h"

namespace zeropg {

class WriteLedger {
 public:
  // Where a write goes. kInCopy: to memory of this parameter alone, until it is resharded. kRefused: nowhere.
  enum class Answer { kInPlace, kInCopy, kRefused };

  // Watches all parameters of `flats` from when they are next attached. `answer` is called at each first write.
  WriteLedger(Communicator& communicator, std::function<Answer()> answer);
  // Its parameters from now on; on all ranks in the same order, and before anything is attached.
  void watch(FlatParameter& flat);

  // Before a forward: what it changes in parameters that are renormalized is told from what was written before it.
  void begin_forward();
  // After `flat` was made whole: shows this rank what it has written and ranks have not settled.
  void show_own_writes(FlatParameter& flat);
  // Before `flat` is resharded: remembers what changed in copies and gives them up.
  void keep_own_writes(FlatParameter& flat);

  // Takes over data that the program has put in place of a parameter's (`p.data = ...`) where it fits and the parameter
  // is whole. Returns the names of those that cannot be taken over.
  std::vector<std::string> take_over_replaced();

  // A parameter whose masters must take what was written.
  struct Change {
    FlatParameter* flat = nullptr;
    int64_t slot = 0;
    // Elements of the flattened parameter and their values, [n] each, in the parameter's dtype; undefined where the
    // flat is attached, which then has them.
    at::Tensor positions;
    at::Tensor values;
    // Where a master does not tell what the program has seen (FlatParameter::sends_differences): what the parameter was
    // before this rank wrote it, [numel]; undefined where it has not. Valid until the program writes again.
    at::Tensor before;
  };
  struct Settlement {
    std::vector<Change> changes;           // the same parameters on every rank
    bool may_have_written_shards = false;  // the same on every rank
    std::string conflict;  // not empty, on every rank, where ranks wrote different values: an error after the changes
  };
  // `storage`, which shows this rank's own masters, has handed out a pointer that may be written through; settle()
  // makes it refuse writes again.
  void note_pointer_to_shards(WatchedStorage& storage);
  bool is_any_renormalized() const;
  // Whether ranks may see different values, in forwards before this: the same on every rank of one program.
  // `in_copies`: writes went to copies, of which other ranks know nothing; otherwise only what ranks write alone
  // counts.
  bool may_differ(bool in_copies) const;
  // Of what this rank has written since the last settle(): the same where ranks wrote the same, 0 for nothing.
  int64_t digest();
  // Hands over what was written since the last call, united over the ranks, and watches again. `is_same`: whether
  // digest() was the same on all ranks; otherwise they communicate. Throws, on every rank, where the data of a
  // parameter was replaced by what cannot take its place.
  Settlement settle(bool is_same, const char* operation);
  // What this rank has written to parameters that are whole, and nobody has settled. Not collective.
  std::vector<Change> own_writes() const;

 private:
  WatchedStorage::Target before_write(WrittenParameter& entry);
  void keep_settled(WrittenParameter& entry);
  c10::Storage copy_of(const WrittenParameter& entry);
  bool take_over(WrittenParameter& entry);
  std::vector<size_t> own_news() const;
  std::vector<size_t> all_news();
  std::vector<size_t> find_differing(const std::vector<size_t>& news);
  void unite(const std::vector<size_t>& differing, Settlement& settlement);
  // `counts`: how many elements each rank changed, kCannotTell where it does not know. False for a conflict.
  bool unite(WrittenParameter& entry, const std::vector<int64_t>& counts);
  void forget(WrittenParameter& entry);
  std::vector<int64_t> gather(const std::vector<int64_t>& mine);  // [world_size * n]
  c10::Device device() const;

  Communicator& communicator_;
  std::function<Answer()> answer_;
  std::vector<WrittenParameter> entries_;  // every parameter, in one order on all ranks
  std::map<const FlatParameter*, std::vector<size_t>> entry_of_;
  std::vector<std::string> replaced_;  // by what cannot be taken over, when digest() was called
  bool is_replaced_elsewhere_ = false;
  bool may_have_written_shards_ = false;
  std::vector<c10::weak_intrusive_ptr<WatchedStorage>> written_shards_;
  SpareCopies copies_;
};

}  // namespace zeropg
