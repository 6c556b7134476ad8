// A libtorch module sharded over the ranks of a process group, trained without Python.
#pragma once

#include <zeropg/sharded_core.h>
#include <zeropg/sharded_unit.h>

#include <memory>
#include <optional>
#include <utility>

namespace zeropg {

// Owns a sharded module and behaves as its holder: `model->forward(x)`. `M`: the class of a module, or its holder, with
// one forward (see ShardedUnit for what that excludes). Submodules that are ShardedUnits are made whole one at a time,
// each while it runs; everything else belongs to the root, which is whole from its forward to the end of its backward.
//
// Parameters keep identity, names and shapes. Reading one while it is sharded throws and names it; reading a gradient
// that is sharded does too. All ranks make the model with the same arguments; rank 0's values win.
template <typename M>
class FullyShardedModule {
 public:
  using Impl = typename detail::ImplOf<M>::type;

  // Makes M(arguments...) and shards it over `group`: zeropg::make_process_group, or any other c10d backend that
  // serves the module's device. An existing module may be the argument (`*net`): the two then share their parameters.
  // Collective. Throws as ShardedCore::create.
  template <typename... Arguments>
  FullyShardedModule(const FullyShardOptions& options, const c10::intrusive_ptr<c10d::Backend>& group,
                     Arguments&&... arguments)
      : module_(std::forward<Arguments>(arguments)...), core_(ShardedCore::create(module_.ptr(), group, options)) {}

  ShardedUnitImpl<Impl>* operator->() { return module_.get(); }
  const ShardedUnitImpl<Impl>* operator->() const { return module_.get(); }
  ShardedUnitImpl<Impl>& operator*() { return *module_; }
  std::shared_ptr<ShardedUnitImpl<Impl>> ptr() const { return module_.ptr(); }
  const std::shared_ptr<ShardedCore>& core() const { return core_; }

  // Scales all gradients so that their total norm is at most `max_norm`. Returns the norm before, the same bits on
  // every rank. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return core_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
  }

  // Runs `body`, in which backward accumulates gradients without communicating. Stages 2 and 3 then hold whole ones.
  template <typename Body>
  void no_sync(Body&& body) {
    core_->set_synchronize(false);
    const Finally restore([this] { core_->set_synchronize(true); });
    std::forward<Body>(body)();
  }

  // Runs `body`, in which every parameter is whole on every rank. `writable`: what it writes becomes the value; write
  // the same on every rank. Collective. If `body` throws the other ranks wait for this one.
  template <typename Body>
  void full_parameters(Body&& body, bool writable = false) {
    core_->unshard_all(writable);
    std::forward<Body>(body)();
    core_->reshard_all();
  }

  // Parameters (from the masters) and buffers, whole, on the CPU, floating ones cast to `dtype` if given; empty but on
  // rank 0. Collective.
  StateDict full_state_dict(std::optional<c10::ScalarType> dtype = std::nullopt) {
    return core_->full_state_dict(dtype);
  }

  // Sets parameters and buffers from whole tensors, the same on every rank. Collective. Throws ValueError naming what
  // is missing, unexpected or of another shape.
  void load_full_state_dict(const StateDict& state) { core_->load_full_state_dict(state); }

 private:
  template <typename Function>
  struct Finally {
    explicit Finally(Function function) : function_(std::move(function)) {}
    ~Finally() { function_(); }
    Function function_;
  };

  ShardedUnit<Impl> module_;
  std::shared_ptr<ShardedCore> core_;
};

}  // namespace zeropg
