#include "backend/bootstrap/store_client.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "backend/platform/process/signal_check.h"

namespace zeropg {
namespace {

constexpr std::chrono::seconds kLeastPatience{3};  // with questions after the deadline: what went wrong?

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

c10d::TCPStore* tcp_store_of(c10d::Store* store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) store = prefixed->getUnderlyingNonPrefixStore().get();
  return dynamic_cast<c10d::TCPStore*>(store);
}

bool is_on_this_host(std::string_view host) {
  return host == "localhost" || host == "::1" || host.substr(0, 4) == "127.";
}

}  // namespace

// Shared by the client and its thread, which may outlive it.
class StoreClient::Asker {
 public:
  Asker(c10::intrusive_ptr<c10d::Store> store, const c10d::TCPStore& tcp)
      : store_(std::move(store)), address_(tcp.getHost() + ":" + std::to_string(tcp.getPort())) {}

  static std::shared_ptr<Asker> start(c10::intrusive_ptr<c10d::Store> store, const c10d::TCPStore& tcp) {
    auto asker = std::make_shared<Asker>(std::move(store), tcp);
    std::thread([asker] { asker->serve(); }).detach();
    return asker;
  }

  void ask(std::function<void(c10d::Store&)> question, Clock::time_point deadline,
           const std::function<void()>& while_waiting) {
    const auto start = Clock::now();
    std::unique_lock lock(mutex_);
    if (is_silent_) throw_silent(std::chrono::seconds(0));
    question_ = std::move(question);
    is_open_ = true;
    has_changed_.notify_all();
    is_silent_ = true;  // also where while_waiting() throws; until the answer is there
    while (!has_changed_.wait_for(lock, kSignalCheckInterval, [&] { return !is_open_; })) {
      const auto now = Clock::now();
      if (now >= deadline) throw_silent(std::chrono::duration_cast<std::chrono::seconds>(now - start));
      lock.unlock();
      while_waiting();
      lock.lock();
    }
    is_silent_ = false;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  void close() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    has_changed_.notify_all();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      has_changed_.wait(lock, [&] { return is_open_ || is_closed_; });
      if (!is_open_) return;
      const auto question = std::exchange(question_, nullptr);
      lock.unlock();
      std::exception_ptr error;
      try {
        question(*store_);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
      is_open_ = false;
      has_changed_.notify_all();
    }
  }

  [[noreturn]] void throw_silent(std::chrono::seconds waited) const {
    const std::string time = waited.count() > 0 ? " for " + std::to_string(waited.count()) + " s" : "";
    C10_THROW_ERROR(DistNetworkError, c10::str("the store at ", address_, " has not answered", time,
                                               "; look at the network between it and this host"));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string address_;
  std::mutex mutex_;
  std::condition_variable has_changed_;
  std::function<void(c10d::Store&)> question_;
  std::exception_ptr error_;  // of the last question
  bool is_open_ = false;      // the question is
  bool is_silent_ = false;
  bool is_closed_ = false;
};

StoreClient::StoreClient(c10::intrusive_ptr<c10d::Store> store, Clock::time_point deadline,
                         std::function<void()> while_waiting)
    : store_(std::move(store)), deadline_(deadline), while_waiting_(std::move(while_waiting)) {
  const c10d::TCPStore* tcp = tcp_store_of(store_.get());
  if (tcp != nullptr && !is_on_this_host(tcp->getHost())) asker_ = Asker::start(store_, *tcp);
}

StoreClient::~StoreClient() {
  if (asker_) asker_->close();
}

// The answers are shared, since a question that nobody waits for any longer may still write one.
bool StoreClient::check(const std::vector<std::string>& keys) {
  const auto answer = std::make_shared<bool>(false);
  ask([=](c10d::Store& store) { *answer = store.check(keys); });
  return *answer;
}

std::string StoreClient::get(const std::string& key) {
  const auto answer = std::make_shared<std::string>();
  ask([=](c10d::Store& store) { *answer = to_text(store.get(key)); });
  return *answer;
}

std::vector<std::string> StoreClient::get_all(const std::vector<std::string>& keys) {
  const auto answer = std::make_shared<std::vector<std::string>>();
  ask([=](c10d::Store& store) {
    if (store.hasExtendedApi()) {
      for (const auto& value : store.multiGet(keys)) answer->push_back(to_text(value));
    } else {
      for (const std::string& key : keys) answer->push_back(to_text(store.get(key)));
    }
  });
  return *answer;
}

void StoreClient::set(const std::string& key, const std::string& value) {
  ask([=](c10d::Store& store) { store.set(key, to_bytes(value)); });
}

void StoreClient::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  ask([=](c10d::Store& store) { store.compareSet(key, to_bytes(expected), to_bytes(desired)); });
}

void StoreClient::remove(const std::string& key) {
  ask([=](c10d::Store& store) { store.deleteKey(key); });
}

void StoreClient::ask(std::function<void(c10d::Store&)> question) {
  if (!asker_) return question(*store_);
  asker_->ask(std::move(question), std::max(deadline_, Clock::now() + kLeastPatience), while_waiting_);
}

}  // namespace zeropg
