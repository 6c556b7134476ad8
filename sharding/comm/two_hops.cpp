#include "sharding/comm/two_hops.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace zeropg {

TwoHops::TwoHops(TwoHopQueue& queue, WorkPointer first, std::function<WorkPointer()> issue)
    : queue_(queue), first_(std::move(first)), issue_(std::move(issue)) {}

bool TwoHops::isCompleted() {
  queue_.issue_ready();
  return failure_ != nullptr || (second_ && second_->isCompleted());
}

bool TwoHops::wait(std::chrono::milliseconds timeout) {
  queue_.issue_to(*this);
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
  return second_->wait(timeout);
}

void TwoHops::begin_second() {
  try {
    first_->wait();
    second_ = issue_();
  } catch (const c10::Error&) {
    failure_ = std::current_exception();
  } catch (const std::runtime_error&) {  // gloo's
    failure_ = std::current_exception();
  }
}

c10::intrusive_ptr<c10d::Work> TwoHopQueue::add(TwoHops::WorkPointer first,
                                                std::function<TwoHops::WorkPointer()> issue) {
  auto hops = c10::make_intrusive<TwoHops>(*this, std::move(first), std::move(issue));
  waiting_.push_back(hops);
  return hops;
}

void TwoHopQueue::issue_ready() {
  while (!waiting_.empty() && waiting_.front()->is_first_done()) {
    issue_next();
  }
}

void TwoHopQueue::issue_all() {
  while (!waiting_.empty()) {
    issue_next();
  }
}

void TwoHopQueue::issue_to(const TwoHops& last) {
  while (!last.is_issued()) {
    issue_next();
  }
}

void TwoHopQueue::issue_next() {
  waiting_.front()->begin_second();
  waiting_.pop_front();
}

}  // namespace zeropg
