// zeropg._C: the compiled core as Python sees it.
#include "python/bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of zeropg; use the names of the package zeropg.";
  zeropg::bind_backend(m);
  zeropg::bind_checkpoint(m);
  zeropg::bind_compression(m);
  zeropg::bind_interpreter(m);
  zeropg::bind_optim(m);
  zeropg::bind_offload(m);  // takes optimizers
  zeropg::bind_partial(m);
  zeropg::bind_sharding(m);
  zeropg::bind_simulate(m);
  zeropg::bind_tools(m);
  zeropg::bind_weights(m);
}
