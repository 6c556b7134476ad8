#include "sharding/comm/path_watch.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace zeropg {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPatience{500};  // and then twice as long, and so on
constexpr std::chrono::milliseconds kInterval{250};

std::string key_of(int64_t rank) { return c10::str("path of rank ", rank); }

const char* name_of(PathWatch::Kind kind) { return kind == PathWatch::kGather ? "gather" : "reduction"; }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

struct PathWatch::Shared {
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank = 0;
  int64_t world_size = 0;
  std::function<void(Kind, const std::string&)> fail;

  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;  // guarded by mutex, as what follows
  Position position;
  std::string what;  // that is waited for
  Clock::time_point since, next_look;

  std::vector<std::string> keys;  // of all ranks
  std::string told;               // of the thread alone: what the store has

  void tell(const std::string& text) {
    if (text != told) store->set(key_of(rank), bytes_of(text));
    told = text;
  }
  std::vector<std::vector<uint8_t>> everybodys_words() {
    if (store->hasExtendedApi()) return store->multiGet(keys);
    std::vector<std::vector<uint8_t>> words;
    for (const std::string& key : keys) words.push_back(store->get(key));
    return words;
  }
  // The text of the error where another rank and this one wait for each other; otherwise empty.
  std::string find(const Position& mine, const std::string& waiting);
};

std::string PathWatch::encode(const Position& position) {
  return c10::str(position.begun[kGather], " ", position.begun[kReduction], " ", static_cast<int>(position.waits_in),
                  " ", position.waits_for);
}

PathWatch::Position PathWatch::decode(const std::string& text) {
  std::istringstream words(text);
  Position position;
  int kind = 0;
  words >> position.begun[kGather] >> position.begun[kReduction] >> kind >> position.waits_for;
  position.waits_in = kind == kReduction ? kReduction : kGather;
  return words ? position : Position();
}

bool PathWatch::is_deadlock(const Position& mine, const Position& theirs) {
  return mine.waits_for > theirs.begun[mine.waits_in] && theirs.waits_for > mine.begun[theirs.waits_in] &&
         mine.waits_in != theirs.waits_in;
}

PathWatch::PathWatch(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size,
                     std::function<void(Kind, const std::string&)> fail)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::move(store);
  shared_->rank = rank;
  shared_->world_size = world_size;
  shared_->fail = std::move(fail);
  for (int64_t each = 0; each < world_size; ++each) shared_->keys.push_back(key_of(each));
  shared_->tell(encode({}));
  std::thread([shared = shared_] { run(shared); }).detach();  // the store may never answer
}

PathWatch::~PathWatch() {
  const std::lock_guard lock(shared_->mutex);
  shared_->is_over = true;
  shared_->changed.notify_all();
}

uint64_t PathWatch::note_begun(Kind kind) {
  const std::lock_guard lock(shared_->mutex);
  return ++shared_->position.begun[kind];
}

void PathWatch::begin_wait(Kind kind, uint64_t number, const std::string& what) {
  const std::lock_guard lock(shared_->mutex);
  shared_->position.waits_in = kind;
  shared_->position.waits_for = number;
  shared_->what = what;
  shared_->since = Clock::now();
  shared_->next_look = shared_->since + kPatience;
}

void PathWatch::end_wait() {
  const std::lock_guard lock(shared_->mutex);
  shared_->position.waits_for = 0;
}

void PathWatch::run(const std::shared_ptr<Shared>& shared) {
  try {
    std::unique_lock lock(shared->mutex);
    while (!shared->changed.wait_for(lock, kInterval, [&] { return shared->is_over; })) {
      const auto now = Clock::now();
      if (shared->position.waits_for == 0 || now < shared->next_look) continue;
      shared->next_look = now + (now - shared->since);
      const Position mine = shared->position;
      const std::string what = shared->what;
      lock.unlock();
      const std::string found = shared->find(mine, what);
      lock.lock();
      if (!found.empty() && !shared->is_over) {
        lock.unlock();
        shared->fail(mine.waits_in, found);
        return;
      }
    }
  } catch (const std::exception&) {
    // The store is gone, so nobody is told: waits end at the timeout, as without this.
  }
}

std::string PathWatch::Shared::find(const Position& mine, const std::string& waiting) {
  tell(encode(mine));
  const std::vector<std::vector<uint8_t>> everybodys = everybodys_words();
  for (int64_t other = 0; other < world_size; ++other) {
    const std::vector<uint8_t>& said = everybodys[static_cast<size_t>(other)];
    const Position theirs = decode({said.begin(), said.end()});
    if (other == rank || !is_deadlock(mine, theirs)) continue;
    return c10::str("[zeropg rank ", rank, "/", world_size,
                    "] ranks took different paths through the model and wait for each other: this rank for the ",
                    name_of(mine.waits_in), " of ", waiting, " (number ", mine.waits_for, "), of which rank ", other,
                    " has begun ", theirs.begun[mine.waits_in], "; rank ", other, " for ", name_of(theirs.waits_in),
                    " ", theirs.waits_for, ", of which this rank has begun ", mine.begun[theirs.waits_in],
                    ". Run the same units in forward and backward on every rank: with inputs of zeros, or times zero, "
                    "where a rank has nothing for one, and detach on all ranks or none.");
  }
  return "";
}

}  // namespace zeropg
