// zeropg's process group without Python.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zeropg {

struct ProcessGroupOptions {
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;  // of every operation
  // Proves membership. Empty: ZEROPG_SECRET, ZEROPG_SECRET_FILE, else a random one through the store.
  std::string secret = {};
  // Ranks with equal host ids share memory. Empty: ZEROPG_HOST_ID, else probed.
  std::string host_id = {};
  // Ranks of a node with equal ones share a cache or the way to their memory. Empty: ZEROPG_DOMAIN_ID, else probed.
  std::string domain_id = {};
};

// Makes a group of the ranks [0, world_size), which all call, and which meet in `store` (a FileStore, a TCPStore; one
// group per store, or per PrefixStore of it). CPU tensors only. Shares the ownership of the store. Throws ValueError
// for wrong options, DistBackendError naming the ranks that did not come within the timeout.
c10::intrusive_ptr<c10d::Backend> make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const ProcessGroupOptions& options = {});

}  // namespace zeropg
