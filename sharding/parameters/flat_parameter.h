// The parameters of one unit that share a dtype, are all trainable or all frozen, all travel encoded or as they are,
// and are parts of tensors over the same other ranks (or whole), stored one after another in a flat buffer that is cut
// into world_size slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/flat_layout.h"
#include "sharding/offload/tiered_vector.h"
#include "sharding/parameters/options.h"
#include "sharding/parameters/parameter_storage.h"
#include "sharding/parameters/parameter_tensors.h"

namespace zeropg {

// Returns a copy in other memory, [n] and of the same dtype.
using Move = std::function<at::Tensor(const at::Tensor&)>;

// One parameter of a flat buffer. A tied parameter is one slot with several names.
struct ParameterSlot {
  std::vector<std::string> names;  // as in named_parameters(); the first is the name that is saved
  ParameterTensors tensors;        // the user's own
  std::vector<int64_t> sizes;      // of tensors.local
  int64_t offset = 0;              // elements, in the flat buffer
  int64_t numel = 0;
  ParameterStorage storage;
  bool is_renormalized = false;  // forwards of different ranks write different elements: Embedding(max_norm=)
  int64_t split = 0;             // which of RankGroups::splits has the other parts of its tensor; 0: it is whole

  const at::Tensor& parameter() const { return tensors.parameter; }
  bool has_gradient() const { return parameter().grad().defined(); }
};

// What a slot's overlap with a range of the flat buffer is.
struct SlotRange {
  int64_t slot = 0;
  int64_t start = 0;       // elements, in the flattened parameter
  int64_t stop = 0;        // > start
  int64_t flat_start = 0;  // elements, in the flat buffer
};

// The range of a flat buffer that this rank updates, in the master dtype.
struct Master {
  at::Tensor values;  // [numel]; undefined where they are in a tier whose bytes must be moved
  int64_t start = 0;  // where the range begins in the flat buffer
  int64_t numel = 0;
  // The tier's vector that holds them, [numel]; null where the parameter is the master, and without offload.
  std::shared_ptr<TieredVector> tiered;

  at::Tensor read(int64_t first, int64_t last) const;  // a live view, or a copy on the CPU
  void write(int64_t first, const at::Tensor& from);
};

// Invariant: `whole`, while defined, is [total_numel] in `dtype` and every slot's storage points into it.
class FlatParameter {
 public:
  // What is known of a parameter before it has memory.
  struct Source {
    std::vector<std::string> names;
    std::vector<int64_t> sizes;  // of the plain tensor that is its memory
    c10::ScalarType dtype = c10::kFloat;
    bool requires_grad = true;
    bool is_renormalized = false;  // as in ParameterSlot
    bool is_encoded = false;       // where ShardingOptions has a codec for what travels
    int64_t split = 0;             // which of RankGroups::splits has the other parts of its tensor; 0: it is whole
    int64_t index = 0;             // among the parameters of its unit
  };

  // `device`: where all parameters are, or will be when they are taken over.
  FlatParameter(std::string unit_name, std::vector<Source> sources, const ShardingOptions& options, c10::Device device,
                int64_t rank, int64_t world_size);
  // Takes over those of its sources among the unit's parameters, which are left sharded (unreadable). Returns their
  // values, flat [total_numel], in their original dtype. Called once; there are no slots before.
  [[nodiscard]] at::Tensor take_over(const std::vector<ParameterTensors>& of_unit);

  const std::string& unit_name() const { return unit_name_; }
  c10::ScalarType dtype() const { return dtype_; }
  c10::ScalarType master_dtype() const { return master_dtype_; }
  c10::ScalarType original_dtype() const { return original_dtype_; }
  c10::Device device() const { return device_; }
  // Whether some parameter has been trainable; flags that are flipped later may make it so (make_trainable).
  bool is_trainable() const { return is_trainable_; }
  // Whether codecs of ShardingOptions encode what travels of it; otherwise it travels as it is.
  bool is_encoded() const { return is_encoded_; }
  // Whether the parameter itself is the master (no separate copy of higher precision).
  bool is_own_master() const { return dtype_ == master_dtype_ && !sends_differences(); }
  // Whether steps travel as encoded differences between the masters and the replica that every rank has
  // (ReplicatedFetch). Masters are then apart from the parameters, which follow them by more than a rounding.
  bool sends_differences() const { return is_trainable_ && may_send_differences_; }
  const FlatLayout& layout() const { return layout_; }
  int64_t shard_start() const { return rank_ * layout_.shard_numel; }
  std::vector<ParameterSlot>& slots() { return slots_; }
  const std::vector<ParameterSlot>& slots() const { return slots_; }
  std::string describe() const;  // "unit 'layers.3' (float32, trainable, 4 parameters)"

  // The overlaps of the slots with flat range [start, stop), in order.
  std::vector<SlotRange> slots_in(int64_t start, int64_t stop) const;

  // Zeros the padding in `slice`, which holds what this rank's slice does. An optimizer may leave NaN there (eps=0),
  // which an encoding would spread over its block.
  void clear_padding(const at::Tensor& slice) const;

  void attach(const at::Tensor& whole);
  void detach();
  // As detach, for parameters whose new values are on their way: reads say so, and how to wait.
  void hide();
  bool is_attached() const { return whole_.defined(); }
  const at::Tensor& whole() const { return whole_; }

  Master master;  // set by the fetch that owns the memory (make_master)
  // Gives frozen parameters masters that can be updated, of their values. Not collective. TierError.
  void make_trainable(const ShardingOptions& options);
  // The same range in the parameters' dtype: what an update must also write. Undefined where it is the master itself,
  // and where differences bring it.
  at::Tensor parameter_out;

 private:
  std::string unit_name_;
  c10::ScalarType original_dtype_;
  c10::ScalarType dtype_;
  c10::ScalarType master_dtype_;
  c10::Device device_;
  bool is_trainable_;
  bool is_encoded_;
  bool may_send_differences_;
  int64_t rank_;
  FlatLayout layout_;
  std::vector<Source> sources_;  // until they are taken over
  std::vector<ParameterSlot> slots_;
  at::Tensor whole_;
};

}  // namespace zeropg
