#include "backend/bootstrap/store_client.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace zeropg {
namespace {

using std::chrono::milliseconds;

// Reaches this host, but does not say so by its name.
constexpr const char* kHost = "0.0.0.0";

// A server in a process of its own, which can be stopped: its connections stay, and nobody answers.
class Server {
 public:
  Server() {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    child_ = ::fork();
    if (child_ == 0) {
      c10d::TCPStoreOptions options;
      options.port = 0;
      options.isServer = true;
      options.waitWorkers = false;
      const auto store = c10::make_intrusive<c10d::TCPStore>(kHost, options);
      const uint16_t port = store->getPort();
      if (::write(ends[1], &port, sizeof port) != sizeof port) ::_exit(1);
      while (true) ::pause();
    }
    ::close(ends[1]);
    if (::read(ends[0], &port_, sizeof port_) != sizeof port_) throw std::runtime_error("the server did not start");
    ::close(ends[0]);
  }
  ~Server() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }

  c10::intrusive_ptr<c10d::Store> connect() const {
    c10d::TCPStoreOptions options;
    options.port = port_;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::PrefixStore>("group", c10::make_intrusive<c10d::TCPStore>(kHost, options));
  }
  void stop() const {
    ::kill(child_, SIGSTOP);
    ::waitpid(child_, nullptr, WUNTRACED);  // until then it may still answer
  }
  void go_on() const { ::kill(child_, SIGCONT); }

 private:
  pid_t child_ = -1;
  uint16_t port_ = 0;
};

void ask_everything(StoreClient& client) {
  EXPECT_FALSE(client.check({"a"}));
  client.set("a", std::string("1\0 2", 4));
  client.compare_set("a", std::string("1\0 2", 4), "3");
  client.compare_set("a", "no", "4");
  client.set("b", "5");
  EXPECT_TRUE(client.check({"a", "b"}));
  EXPECT_EQ(client.get("a"), "3");
  EXPECT_EQ(client.get_all({"a", "b"}), (std::vector<std::string>{"3", "5"}));
  client.remove("a");
  EXPECT_FALSE(client.check({"a", "b"}));
}

TEST(StoreClient, AsksAStoreOfThisProcess) {
  StoreClient client(c10::make_intrusive<c10d::HashStore>(), deadline_after(milliseconds(1)), [] {});
  ask_everything(client);
}

TEST(StoreClient, AsksAServer) {
  const Server server;
  StoreClient client(server.connect(), deadline_after(milliseconds(20'000)), [] {});
  ask_everything(client);
}

TEST(StoreClient, WhatTheStoreThrowsIsThrown) {
  const Server server;
  const auto store = server.connect();
  store->setTimeout(milliseconds(50));
  StoreClient client(store, deadline_after(milliseconds(20'000)), [] {});
  EXPECT_THROW(client.get("nothing"), c10::Error);
  client.set("a", "1");
  EXPECT_EQ(client.get("a"), "1");
}

TEST(StoreClient, MissesASilentServerAtTheDeadlineAndThenAtOnce) {
  const Server server;
  const auto start = Clock::now();
  const auto deadline = deadline_after(milliseconds(4'000));
  int waits = 0;
  StoreClient client(server.connect(), deadline, [&] { ++waits; });
  client.set("a", "1");
  server.stop();
  try {
    client.check({"a"});
    FAIL() << "a stopped server answered";
  } catch (const c10::DistNetworkError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("the store at 0.0.0.0:"), std::string::npos) << text;
    EXPECT_NE(text.find("has not answered for "), std::string::npos) << text;
  }
  const auto end = Clock::now();
  EXPECT_GE(end - start, milliseconds(3'900));
  EXPECT_GT(waits, 10);
  EXPECT_THROW(client.get("a"), c10::DistNetworkError);
  EXPECT_LT(Clock::now() - end, milliseconds(1'000));
  server.go_on();
}

TEST(StoreClient, WhoWaitsMayGiveUp) {
  const Server server;
  StoreClient client(server.connect(), deadline_after(milliseconds(20'000)),
                     [] { throw std::runtime_error("enough"); });
  server.stop();
  EXPECT_THROW(client.check({"a"}), std::runtime_error);
  server.go_on();
  EXPECT_THROW(client.check({"a"}), c10::DistNetworkError);
}

}  // namespace
}  // namespace zeropg
