// One function per room of the core; each adds that room's classes to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zeropg {

void bind_backend(pybind11::module_& m);
void bind_checkpoint(pybind11::module_& m);
void bind_compression(pybind11::module_& m);
void bind_interpreter(pybind11::module_& m);
void bind_offload(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_partial(pybind11::module_& m);
void bind_sharding(pybind11::module_& m);
void bind_simulate(pybind11::module_& m);
void bind_tools(pybind11::module_& m);
void bind_weights(pybind11::module_& m);

}  // namespace zeropg
