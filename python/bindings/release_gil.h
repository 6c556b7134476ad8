// Letting go of the GIL for a call that may outlast the interpreter.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "backend/platform/process/interpreter_shutdown.h"

namespace zeropg {

// Note [Threads at the end]: a thread that is still in here when the interpreter ends stays.
struct [[gnu::visibility("hidden")]] WithoutGil {  // as pybind11's namespace
  pybind11::gil_scoped_release no_gil;
  WaitingThread thread;  // destroyed first
};

using ReleaseGil = pybind11::call_guard<WithoutGil>;

}  // namespace zeropg
