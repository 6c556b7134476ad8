// The c10d store, whose answers come in time or are missed.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/bootstrap/sockets/unix_socket.h"

namespace zeropg {

// Note [A silent store]
// A TCPStore waits for an answer without any limit: once the way to its server breaks without a word (a cable, a host
// without power), the kernel learns of it in a quarter of an hour, if anything is on its way at all. So a thread asks
// for the caller, which waits until the deadline. No answer by then is a DistNetworkError, and so is every later
// question, at once. The thread and its reference to the store stay until the kernel gives up. Stores that cannot be
// cut off (files, a server on this host) are asked in the caller's thread.
class StoreClient {
 public:
  // while_waiting: called every kSignalCheckInterval by the thread that asks, holding no lock; may throw, which leaves
  // the store silent.
  StoreClient(c10::intrusive_ptr<c10d::Store> store, Clock::time_point deadline, std::function<void()> while_waiting);
  ~StoreClient();
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  bool check(const std::vector<std::string>& keys);  // whether all are there
  std::string get(const std::string& key);
  std::vector<std::string> get_all(const std::vector<std::string>& keys);
  void set(const std::string& key, const std::string& value);
  void compare_set(const std::string& key, const std::string& expected, const std::string& desired);
  void remove(const std::string& key);
  // The store itself, for what asks it nothing.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

 private:
  class Asker;
  // Calls question(store) where that may wait, and returns once it has returned, or throws as it has thrown.
  void ask(std::function<void(c10d::Store&)> question);

  c10::intrusive_ptr<c10d::Store> store_;
  Clock::time_point deadline_;
  std::function<void()> while_waiting_;
  std::shared_ptr<Asker> asker_;  // null: the caller's thread asks
};

}  // namespace zeropg
