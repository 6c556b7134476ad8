// A module whose forward makes its own parameters whole.
//
// Modules of libtorch have no hooks, so what runs as a unit says so in its type:
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); ... };
//   using Block = zeropg::ShardedUnit<BlockImpl>;  // instead of TORCH_MODULE(Block)
//
// A Block is used as before (Block(64)->forward(x), in a ModuleList, in a Sequential), has the same parameters under
// the same names, and does nothing else until a FullyShardedModule around it is made. Then it is one of its units.
//
// Limits: forward is one member function, neither a template nor overloaded, and is called on the holder, on a pointer
// to ShardedUnitImpl<BlockImpl> or through AnyModule, with all of its arguments: a call through a pointer to BlockImpl
// itself (`module->as<BlockImpl>()->forward(x)`) goes past the unit, and then reading a sharded parameter throws.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <zeropg/sharded_core.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeropg {

// Calls visit(at::Tensor&) for the tensors in arguments and results of forward. A unit must see those that need
// gradients: specialise it for structs of your own.
template <typename T>
struct TensorsOf {
  template <typename Visit>
  static void visit(T&, Visit&&) {}
};

template <>
struct TensorsOf<at::Tensor> {
  template <typename Visit>
  static void visit(at::Tensor& tensor, Visit&& visit) {
    if (tensor.defined()) {
      visit(tensor);
    }
  }
};

template <typename T>
struct TensorsOf<std::vector<T>> {
  template <typename Visit>
  static void visit(std::vector<T>& values, Visit&& visit) {
    for (T& value : values) {
      TensorsOf<T>::visit(value, visit);
    }
  }
};

template <typename T>
struct TensorsOf<std::optional<T>> {
  template <typename Visit>
  static void visit(std::optional<T>& value, Visit&& visit) {
    if (value.has_value()) {
      TensorsOf<T>::visit(*value, visit);
    }
  }
};

template <typename... T>
struct TensorsOf<std::tuple<T...>> {
  template <typename Visit>
  static void visit(std::tuple<T...>& values, Visit&& visit) {
    std::apply([&](auto&... value) { (TensorsOf<std::remove_reference_t<decltype(value)>>::visit(value, visit), ...); },
               values);
  }
};

template <typename A, typename B>
struct TensorsOf<std::pair<A, B>> {
  template <typename Visit>
  static void visit(std::pair<A, B>& values, Visit&& visit) {
    TensorsOf<A>::visit(values.first, visit);
    TensorsOf<B>::visit(values.second, visit);
  }
};

namespace detail {

// The class behind a holder (TORCH_MODULE), or the class itself.
template <typename M, typename = void>
struct ImplOf {
  using type = M;
};
template <typename M>
struct ImplOf<M, std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, M>>> {
  using type = typename ImplOf<std::remove_reference_t<decltype(*std::declval<M&>())>>::type;
};

template <typename Impl>
concept HasOneForward = requires {
  &Impl::forward;
};

// Arguments by value and by const reference are kept as copies, in which tensors can be replaced; others pass through.
template <typename Argument>
using Kept =
    std::conditional_t<std::is_lvalue_reference_v<Argument> && !std::is_const_v<std::remove_reference_t<Argument>>,
                       Argument, std::decay_t<Argument>>;

template <typename Impl, typename Forward>
struct UnitForward;

template <typename Impl, typename Result, typename Owner, typename... Arguments>
struct UnitForward<Impl, Result (Owner::*)(Arguments...)> : public Impl, public ShardedUnitBase {
  using Impl::Impl;
  explicit UnitForward(const Impl& module) : Impl(module) {}

  Result forward(Arguments... arguments) {
    if (core_ == nullptr) {
      return Impl::forward(std::forward<Arguments>(arguments)...);
    }
    return run(std::index_sequence_for<Arguments...>(), {std::forward<Arguments>(arguments)...});
  }

  // Gradients are sharded too: those that stay are zeroed where they are.
  void zero_grad(bool set_to_none = true) override {
    if (core_ == nullptr || set_to_none) {
      Impl::zero_grad(set_to_none);
    } else {
      core_->zero_gradients();
    }
  }

 private:
  using KeptArguments = std::tuple<Kept<Arguments>...>;

  template <size_t... I>
  Result run(std::index_sequence<I...>, KeptArguments kept) {
    std::vector<at::Tensor*> inputs;
    (collect_input<Arguments>(std::get<I>(kept), inputs), ...);
    core_->before_forward(unit_, inputs);
    if constexpr (std::is_void_v<Result>) {
      Impl::forward(static_cast<Arguments&&>(std::get<I>(kept))...);
      core_->after_forward(unit_, {});
    } else {
      Result result = Impl::forward(static_cast<Arguments&&>(std::get<I>(kept))...);
      std::vector<at::Tensor> outputs;
      using Value = std::remove_cvref_t<Result>;
      TensorsOf<Value>::visit(const_cast<Value&>(result), [&](at::Tensor& tensor) { outputs.push_back(tensor); });
      core_->after_forward(unit_, outputs);
      return result;
    }
  }

  // What passes through belongs to the caller and is left as it is.
  template <typename Argument, typename T>
  static void collect_input(T& value, std::vector<at::Tensor*>& inputs) {
    if constexpr (!std::is_reference_v<Kept<Argument>>) {
      TensorsOf<T>::visit(value, [&](at::Tensor& tensor) { inputs.push_back(&tensor); });
    }
  }
};

template <typename Impl, typename Result, typename Owner, typename... Arguments>
struct UnitForward<Impl, Result (Owner::*)(Arguments...) const> : UnitForward<Impl, Result (Owner::*)(Arguments...)> {
  using UnitForward<Impl, Result (Owner::*)(Arguments...)>::UnitForward;
};

}  // namespace detail

// What a ShardedUnit holds: the user's class and the hooks around its forward.
template <detail::HasOneForward Impl>
struct ShardedUnitImpl : public detail::UnitForward<Impl, decltype(&Impl::forward)> {
  using detail::UnitForward<Impl, decltype(&Impl::forward)>::UnitForward;
};

template <typename Impl>
struct detail::ImplOf<ShardedUnitImpl<Impl>> {
  using type = Impl;
};

// The holder of a unit. `M`: the class of a module, or its holder.
template <typename M>
class ShardedUnit : public torch::nn::ModuleHolder<ShardedUnitImpl<typename detail::ImplOf<M>::type>> {
 public:
  using torch::nn::ModuleHolder<ShardedUnitImpl<typename detail::ImplOf<M>::type>>::ModuleHolder;
};

}  // namespace zeropg
