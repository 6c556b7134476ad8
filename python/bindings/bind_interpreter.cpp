// What the core asks of the interpreter: to log its notices, to run signal handlers while a thread waits, and whether
// it ends.
#include <pthread.h>

#include "backend/diagnostics/notices.h"
#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/platform/process/signal_check.h"
#include "python/bindings/bindings.h"

namespace zeropg {

namespace py = pybind11;

namespace {

PyObject* notice_listener = nullptr;  // guarded by the GIL; owned
unsigned long main_thread = 0;        // NOLINT: the type of PyThread_get_thread_ident

// On the main thread, with the GIL, between two instructions of Python code.
int deliver_notices(void* /*unused*/) {
  for (const std::string& line : take_notices()) {
    if (notice_listener == nullptr) {
      break;
    }
    PyObject* answer = PyObject_CallFunction(notice_listener, "s", line.c_str());
    if (answer == nullptr) {
      PyErr_WriteUnraisable(notice_listener);
    }
    Py_XDECREF(answer);
  }
  return 0;
}

// Needs no GIL. When the interpreter's list is full, the lines wait for the next bell.
void ring() { Py_AddPendingCall(&deliver_notices, nullptr); }

void listen_to_notices(const py::object& listener) {
  deliver_notices(nullptr);
  Py_XDECREF(notice_listener);
  notice_listener = listener.is_none() ? nullptr : listener.inc_ref().ptr();
  set_notice_bell(notice_listener == nullptr ? nullptr : &ring);
}

// Only the main thread runs handlers, so no other one waits for the GIL here.
void run_signal_handlers() {
  if (PyThread_get_thread_ident() != main_thread || Py_IsInitialized() == 0) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

// The main thread ends the interpreter, and keeps the GIL's favour while it does. A thread without a state of Python's
// has nothing to take back.
bool has_begun_to_end() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool is_finalizing = Py_IsFinalizing() != 0;
#else
  const bool is_finalizing = _Py_IsFinalizing() != 0;
#endif
  return is_finalizing && PyThread_get_thread_ident() != main_thread && PyGILState_GetThisThreadState() != nullptr;
}

// The thread that forked is the child's main one.
void begin_child() {
  main_thread = PyThread_get_thread_ident();
  forget_waiting_threads();
}

}  // namespace

void bind_interpreter(py::module_& m) {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  set_signal_check(&run_signal_handlers);
  set_shutdown_check(&has_begun_to_end);
  ::pthread_atfork(nullptr, nullptr, &begin_child);
  m.def("listen_to_notices", &listen_to_notices, py::arg("listener"),
        "The function that gets each line for people that the core says, on the main thread; None: they go to stderr.");
}

}  // namespace zeropg
