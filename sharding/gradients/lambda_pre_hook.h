// A hook of autograd that calls a function and leaves gradients as they are.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <utility>

namespace zeropg {

class LambdaPreHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<void()> function) : function_(std::move(function)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    function_();
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "[zeropg] backward: compiled autograd cannot trace what makes parameters whole and reduces gradients; expected "
        "a backward of autograd's own. Leave torch._dynamo.config.compiled_autograd off, and call backward() outside "
        "of compiled functions; torch.compile of a model, or of its blocks, works.");
  }

 private:
  std::function<void()> function_;
};

}  // namespace zeropg
