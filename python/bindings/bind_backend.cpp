// Python's view of the backend: the process group, its options, and what it knows about the machine.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/process_group/options.h"
#include "backend/process_group/process_group.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/registry.h"
#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"

namespace zeropg {

namespace py = pybind11;

namespace {

// Closes the group without the GIL: the threads that it joins may need it (Note [Tensor references] in work.h).
class BoundProcessGroup final : public ProcessGroupZero {
 public:
  using ProcessGroupZero::ProcessGroupZero;
  ~BoundProcessGroup() override {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      const WithoutGil no_gil;
      close_at_end();
    } else {
      close_at_end();
    }
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> make_child(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const c10::intrusive_ptr<BackendOptions>& options) override {
    return c10::make_intrusive<BoundProcessGroup>(store, rank, size, options, cuda_factory());
  }

 private:
  void close_at_end() {
    try {
      shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN("[zeropg] a process group did not close cleanly: ", error.what());
    }
  }
};

// Keeps a Python function in C++: every touch of its reference count takes the GIL.
ProcessGroupZero::BackendFactory backend_factory(py::object function) {
  if (function.is_none()) {
    return nullptr;
  }
  std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* object) {
    if (Py_IsInitialized() != 0) {
      py::gil_scoped_acquire gil;
      delete object;
    }
  });
  return [held](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
    py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

std::string checked_network(std::string name) {
  try {
    check_network(name);
  } catch (const c10::ValueError& error) {
    throw py::value_error(error.what_without_backtrace());
  }
  return name;
}

std::map<std::string, std::string> wheels_of_wires() {
  std::map<std::string, std::string> wheels;
  for (const WireEntry& wire : wires()) {
    wheels.emplace(wire.name, wire.wheel);
  }
  return wheels;
}

c10::intrusive_ptr<BackendOptions> make_options(const py::kwargs& kwargs) {
  auto options = c10::make_intrusive<BackendOptions>();
  for (const auto& [key, value] : kwargs) {
    const auto name = key.cast<std::string>();
    try {
      if (name == "timeout") {
        options->timeout = value.cast<std::chrono::milliseconds>();
      } else if (name == "algorithms") {
        options->algorithms = value.cast<std::map<std::string, std::string>>();
      } else if (name == "bank_bytes") {
        options->bank_bytes = value.cast<int64_t>();
      } else if (name == "mailbox_bytes") {
        options->mailbox_bytes = value.cast<int64_t>();
      } else if (name == "pool_bytes") {
        options->pool_bytes = value.cast<int64_t>();
      } else if (name == "window_bytes") {
        options->window_bytes = value.cast<int64_t>();
      } else if (name == "cma") {
        options->cma = value.cast<bool>();
      } else if (name == "network") {
        options->network = checked_network(value.cast<std::string>());
      } else if (name == "interfaces") {
        options->interfaces = value.cast<std::string>();
      } else if (name == "ports") {
        options->ports = value.cast<std::string>();
      } else if (name == "ucx_root") {
        options->ucx_root = value.cast<std::string>();
      } else if (name == "secret") {
        options->secret = value.cast<std::string>();
      } else if (name == "authenticate_frames") {
        options->authenticate_frames = value.cast<bool>();
      } else if (name == "connections") {
        options->connections = value.cast<std::string>();
      } else if (name == "host_id") {
        options->host_id = value.cast<std::string>();
      } else if (name == "domain_id") {
        options->domain_id = value.cast<std::string>();
      } else if (name == "rack_id") {
        options->rack_id = value.cast<std::string>();
      } else if (name == "topology_file") {
        options->topology_file = value.cast<std::string>();
      } else if (name == "measure_links") {
        options->measure_links = value.cast<bool>();
      } else {
        throw py::type_error("[zeropg] BackendOptions has no option '" + name +
                             "'; it has timeout, algorithms, bank_bytes, mailbox_bytes, pool_bytes, window_bytes, cma, "
                             "network, interfaces, ports, ucx_root, secret, authenticate_frames, connections, host_id, "
                             "domain_id, rack_id, topology_file and measure_links.");
      }
    } catch (const py::cast_error&) {
      throw py::type_error("[zeropg] BackendOptions: " + name + " cannot be " + py::repr(value).cast<std::string>() +
                           "; see help(zeropg.BackendOptions) for its type.");
    }
  }
  return options;
}

py::dict statistics(const ProcessGroupZero& group) {
  py::dict result;
  for (const auto& [name, counters] : group.statistics()) {
    py::dict entry;
    entry["calls"] = counters.calls;
    entry["direct_calls"] = counters.direct_calls;
    entry["bytes"] = counters.bytes;
    entry["seconds"] = counters.seconds;
    entry["waiting_seconds"] = counters.waiting_seconds;
    result[py::str(name)] = entry;
  }
  return result;
}

py::dict estimates(const ProcessGroupZero& group, const std::string& operation, int64_t bytes) {
  py::dict result;
  for (const AlgorithmEstimate& estimate : group.estimates(operation, bytes)) {
    result[py::str(estimate.algorithm)] = py::make_tuple(estimate.time_us, estimate.is_chosen);
  }
  return result;
}

py::list recorded_operations(const ProcessGroupZero& group) {
  py::list result;
  for (const RecordedOperation& operation : group.recorded_operations()) {
    py::dict entry;
    entry["id"] = operation.id;
    entry["name"] = operation.name;
    entry["is_message"] = operation.is_message;
    entry["sequence"] = operation.sequence;
    entry["input_sizes"] = operation.input_sizes;
    entry["output_sizes"] = operation.output_sizes;
    entry["input_dtypes"] = operation.input_dtypes;
    entry["output_dtypes"] = operation.output_dtypes;
    entry["timeout_ms"] = operation.timeout_ms;
    entry["created_ns"] = operation.created_ns;
    entry["completed_ns"] = operation.completed_ns;
    entry["duration_ms"] = operation.duration_ms;
    result.append(entry);
  }
  return result;
}

void bind_options(py::module_& m) {
  py::class_<BackendOptions, c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(
      m, "BackendOptions",
      R"(Options of one process group, for `pg_options=`. Every rank must give the same values. Keyword-only:

timeout: timedelta, deadline of every operation; init_process_group's own `timeout` wins.
algorithms: dict, operation -> algorithm, e.g. {"all_reduce": "all_reduce_staged"}; others are planned.
bank_bytes: int, staging memory per rank and bank, a multiple of 4096; default 1 MiB.
mailbox_bytes: int, ring memory per ordered pair of ranks, a power of two; default 256 KiB, less where more than 64
  ranks share a node. 1 MiB makes messages of many MiB a quarter faster on an AMD EPYC, and those of 4 KiB slower on an
  Intel Xeon.
pool_bytes: int, most shared memory for tensors per rank (zeropg.empty); default -1: this rank's share of all; 0: none.
window_bytes: int, what a rank may send to a rank on another node before that one takes any; default 4 MiB, in
  groups of more than 42 ranks less: all windows of a rank take 512 MiB at most, and each at least 64 KiB.
cma: bool, whether ranks may read large messages, and blocks of an all-to-all, in each other's memory
  (process_vm_readv), where that is faster; default True.
network: str, "tcp", "ucx", or "automatic": UCX where every rank has it with RDMA, else TCP.
interfaces: str, network interfaces to use between nodes: names or beginnings ("eth,ib0"), a name alone ("=eth0"),
  subnets ("10.1.0.0/16"), or all but some ("^docker,veth"); default ZEROPG_INTERFACE, else all that are up.
ports: str, TCP ports at which ranks wait for those of other nodes ("29600-29700"); default ZEROPG_PORTS, else any.
ucx_root: str, folder of the UCX to use; default ZEROPG_UCX_ROOT, else the system's with RDMA, else the libucx wheel.
secret: str, proves membership; default ZEROPG_SECRET, else the content of the file ZEROPG_SECRET_FILE, else random.
authenticate_frames: bool, whether all bytes between nodes carry a proof that nobody changed them on the way, at the
  price of SHA-256's time; default False, or True where ZEROPG_AUTHENTICATE_FRAMES is 1. It encrypts nothing.
connections: str, when ranks of several nodes connect: "all" while the group is made, or "on_demand": each pair
  as soon as one has something for the other, at a port that stays open; default "automatic": ZEROPG_CONNECTIONS, else
  on demand in groups of more than 128 ranks.
host_id: str, ranks with equal ones share memory; default ZEROPG_HOST_ID, else probed.
domain_id: str, ranks of a node with equal ones share a cache or the way to their memory; default ZEROPG_DOMAIN_ID, else
  probed from the CPUs that the process is bound to.
rack_id: str, nodes with equal ones share a rack; default ZEROPG_RACK_ID, else none.
topology_file: str, a JSON file with the hosts of each rack; default ZEROPG_TOPOLOGY_FILE, else none.
measure_links: bool, whether a group on several nodes measures their links when it is made, where neither the file nor
  the default group says what they carry, in about 0.2 s, and follows them while it works; default True.)")
      .def(py::init(&make_options))
      .def_readwrite("algorithms", &BackendOptions::algorithms)
      .def_readwrite("bank_bytes", &BackendOptions::bank_bytes)
      .def_readwrite("mailbox_bytes", &BackendOptions::mailbox_bytes)
      .def_readwrite("pool_bytes", &BackendOptions::pool_bytes)
      .def_readwrite("window_bytes", &BackendOptions::window_bytes)
      .def_readwrite("cma", &BackendOptions::cma)
      .def_property(
          "network", [](const BackendOptions& self) { return self.network; },
          [](BackendOptions& self, const std::string& name) { self.network = checked_network(name); })
      .def_readwrite("interfaces", &BackendOptions::interfaces)
      .def_readwrite("ports", &BackendOptions::ports)
      .def_readwrite("ucx_root", &BackendOptions::ucx_root)
      .def_readwrite("secret", &BackendOptions::secret)
      .def_readwrite("authenticate_frames", &BackendOptions::authenticate_frames)
      .def_readwrite("connections", &BackendOptions::connections)
      .def_readwrite("host_id", &BackendOptions::host_id)
      .def_readwrite("domain_id", &BackendOptions::domain_id)
      .def_readwrite("rack_id", &BackendOptions::rack_id)
      .def_readwrite("topology_file", &BackendOptions::topology_file)
      .def_readwrite("measure_links", &BackendOptions::measure_links)
      .def("__copy__", [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def(
          "__deepcopy__",
          [](const BackendOptions& self, const py::dict&) { return c10::make_intrusive<BackendOptions>(self); },
          py::arg("memo"));
}

std::vector<double> in_gbps(std::vector<double> bytes_per_us) {
  for (double& speed : bytes_per_us) {
    speed /= 1000;
  }
  return bytes_per_us;
}

void bind_topology(py::module_& m) {
  py::class_<Topology>(
      m, "Topology",
      "Which ranks of a group share a node, and a domain of it, and which nodes share a rack; str() is a table.")
      .def_readonly("host_ids", &Topology::host_ids, "list[str]: per rank")
      .def_readonly("nodes", &Topology::nodes, "list[list[int]]: ranks of each node; the first one leads")
      .def_readonly("node_rank", &Topology::node_rank, "list[int]: per rank, index into nodes")
      .def_readonly("local_rank", &Topology::local_rank, "list[int]: per rank, index inside its node")
      .def_readonly("domains", &Topology::domains,
                    "list[list[list[int]]]: of each node, the ranks of each domain; empty where a rank has none")
      .def_readonly("racks", &Topology::racks, "list[list[int]]: nodes of each rack; empty: none are named")
      .def_readonly("rack_ids", &Topology::rack_ids, "list[str]: of each rack")
      .def_property_readonly(
          "links", [](const Topology& self) { return in_gbps(self.links.node_bytes_per_us); },
          "list[float]: what each node's link carries either way, in GB/s; empty: not known")
      .def_property_readonly(
          "uplinks", [](const Topology& self) { return in_gbps(self.links.uplink_bytes_per_us); },
          "list[float]: likewise, of each rack's way to others; empty: none is known to be a limit")
      .def_readonly("rank", &Topology::rank)
      .def_property_readonly("world_size", &Topology::world_size)
      .def("__str__", &to_table)
      .def("__repr__", &to_table);
}

}  // namespace

void bind_backend(py::module_& m) {
  py::module_::import("torch.distributed");  // registers the base classes
  bind_options(m);
  bind_topology(m);
  py::class_<BoundProcessGroup, c10d::Backend, c10::intrusive_ptr<BoundProcessGroup>>(m, "ProcessGroupZero")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<BackendOptions>& options, py::object make_cuda_backend) {
             auto factory = backend_factory(std::move(make_cuda_backend));
             const WithoutGil no_gil;
             return c10::make_intrusive<BoundProcessGroup>(store, rank, size, options, std::move(factory));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"),
           py::arg("make_cuda_backend") = py::none())
      .def_property_readonly("options",
                             [](BoundProcessGroup& self) {
                               return c10::dynamic_intrusive_pointer_cast<BackendOptions>(self.getBackendOptions());
                             })
      .def_property_readonly("_timeout", &BoundProcessGroup::default_timeout)
      .def("_set_default_timeout", &BoundProcessGroup::setTimeout, py::arg("timeout"), ReleaseGil())
      .def(
          "perform_nocolor_split", [](const BoundProcessGroup&, const py::object&) {}, py::arg("device"),
          "Does nothing: a child is made by its members alone. c10d calls it on the other ranks.")
      .def("comm_split_count", &BoundProcessGroup::split_count, "How often this group was split.")
      .def("abort", &BoundProcessGroup::abort, ReleaseGil(),
           "Ends every operation with an error, on the peers too; the group stays unusable. Never waits.")
      .def("shutdown", &BoundProcessGroup::shutdown, ReleaseGil(),
           "Gives running operations a few seconds to end, then leaves the group.")
      .def(
          "all_gather_item",
          [](BoundProcessGroup& self, const at::Tensor& output, const at::Tensor& input, uint64_t item) {
            return self.all_gather_item(output, input, item);
          },
          py::arg("output"), py::arg("input"), py::arg("item"), ReleaseGil(),
          "As all_gather_into_tensor, asynchronous, of CPU tensors. `item`, from 1, says which of the program's things "
          "it gathers, and is compared between ranks.")
      .def("topology", &BoundProcessGroup::topology, py::return_value_policy::copy)
      .def(
          "give_links",
          [](const BoundProcessGroup& self, BackendOptions& options) { options.known_links = self.known_links(); },
          py::arg("options"), "So that another group of the same nodes need not measure what this one knows.")
      .def(
          "estimates",
          [](const BoundProcessGroup& self, const std::string& operation, int64_t bytes) {
            return estimates(self, operation, bytes);
          },
          py::arg("operation"), py::arg("bytes"),
          "By algorithm: microseconds by the model of this group's links, and whether it is chosen. For fp32.")
      .def("stats", [](const BoundProcessGroup& self) { return statistics(self); })
      .def("start_recording", &BoundProcessGroup::start_recording,
           "Keeps the group's last operations from now on, for a torch without hooks. Before the first operation.")
      .def(
          "recorded_operations", [](const BoundProcessGroup& self) { return recorded_operations(self); },
          "The operations that were kept, oldest first; see flight_recorder.h for the fields.");
  m.def("wires", &wheels_of_wires,
        "Name of every wire between nodes -> the package that may bring its library; empty: it needs none.");
  m.def("shutdown_all", &ProcessGroupZero::shutdown_all, ReleaseGil(),
        "Shuts every group of this process down; called at the interpreter's exit.");
}

}  // namespace zeropg
