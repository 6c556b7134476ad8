#include "sharding/comm/watched_calls.h"

namespace zeropg {
namespace {

class Waiting {
 public:
  Waiting(PathWatch& watch, PathWatch::Kind kind, uint64_t number, const std::string& what) : watch_(watch) {
    watch_.begin_wait(kind, number, what.empty() ? "what ranks agree upon" : what);
  }
  ~Waiting() { watch_.end_wait(); }
  Waiting(const Waiting&) = delete;

 private:
  PathWatch& watch_;
};

}  // namespace

WatchedCalls::WorkPointer WatchedCalls::begun(WorkPointer work) {
  if (watch_ == nullptr) return work;
  constexpr size_t kMostKept = 1024;  // works that nobody waits for are forgotten
  if (numbers_.size() >= kMostKept) numbers_.clear();
  numbers_[work.get()] = watch_->note_begun(kind_);
  return work;
}

void WatchedCalls::wait(const WorkPointer& work, const std::string& what) {
  const auto found = numbers_.find(work.get());
  if (found == numbers_.end()) {
    work->wait();
    return;
  }
  const uint64_t number = found->second;
  numbers_.erase(found);
  const Waiting waiting(*watch_, kind_, number, what);
  work->wait();
}

}  // namespace zeropg
