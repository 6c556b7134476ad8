// Ranks of one group in this process: real group contexts that met over a store and share real memory. A suite advances
// them from one thread, in whatever order it likes, or runs each in a thread of its own.
#pragma once

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "backend/engine/work.h"
#include "backend/group/group_context.h"
#include "backend/group/hooks.h"

namespace zeropg {

using Contexts = std::vector<std::shared_ptr<GroupContext>>;

// More than a sanitizer takes on a busy machine: nothing that gets this long may time out.
inline constexpr std::chrono::seconds kLongTimeout{120};
inline constexpr int64_t kBankBytes = 4096;
inline constexpr int64_t kMailboxBytes = 1024;

inline BootstrapOptions small_group() {
  BootstrapOptions options;
  options.timeout = kLongTimeout;
  options.host_id = "one";
  options.bank_bytes = kBankBytes;
  options.mailbox_bytes = kMailboxBytes;
  options.pool_bytes = int64_t{4} << 20;
  options.window_bytes = int64_t{64} << 10;
  options.network = "tcp";
  return options;
}

// Rank r on the machine `hosts[r]`; machines are connected by TCP over loopback.
inline Contexts meet_on(const std::vector<std::string>& hosts, const BootstrapOptions& options = small_group(),
                        const std::shared_ptr<const Hooks>& hooks = std::make_shared<Hooks>()) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto world_size = static_cast<int>(hosts.size());
  Contexts ranks(hosts.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      BootstrapOptions own = options;
      own.host_id = hosts[static_cast<size_t>(rank)];
      ranks[static_cast<size_t>(rank)] = std::make_shared<GroupContext>(bootstrap(store, rank, world_size, own), hooks);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

inline Contexts meet(int32_t world_size, const BootstrapOptions& options = small_group(),
                     const std::shared_ptr<const Hooks>& hooks = std::make_shared<Hooks>()) {
  return meet_on(std::vector<std::string>(static_cast<size_t>(world_size), options.host_id), options, hooks);
}

// Runs `body(rank)` in a thread for each rank, and passes the first error on.
inline void on_every_rank(int32_t world_size, const std::function<void(int32_t rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Calls `body` until it is true; the test fails after a time that nothing may take.
inline void poll(const std::function<bool()>& body) {
  const auto end = std::chrono::steady_clock::now() + kLongTimeout;
  while (!body()) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("nothing happened for too long");
    std::this_thread::yield();
  }
}

// Of a call that must fail: what the error says.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

inline void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
}

// The host of works that somebody else runs, or nobody.
class IdleHost final : public OperationHost {
 public:
  void help(const ZeroWork&, std::chrono::steady_clock::time_point) override {}
  std::string who_is_late() override { return "waiting for rank 7"; }
  void forget(const ZeroWork&) override {}
};

inline at::Tensor bytes_tensor(int64_t bytes) { return at::empty({bytes}, at::kByte); }

// The n-th byte of a message, different for every seed, so that one in a wrong place shows.
inline std::vector<std::byte> pattern(int64_t bytes, uint64_t seed = 0) {
  std::vector<std::byte> data(static_cast<size_t>(bytes));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>((i * 2654435761U + seed * 97) >> 5);
  return data;
}

}  // namespace zeropg
