#include "backend/partial/round_start.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

namespace zeropg {

namespace {

constexpr size_t kStepTimes = 9;

constexpr int kTellTag = 1;
constexpr int kBeginTag = 2;

}  // namespace

RoundStart::RoundStart(c10::intrusive_ptr<c10d::ProcessGroup> messages, RoundGate gate, double patience)
    : messages_(std::move(messages)), gate_(std::move(gate)), patience_(patience) {
  if (is_first() && messages_->getSize() > 1) {
    listener_ = std::thread([this] { listen(); });
  }
}

RoundStart::~RoundStart() {
  if (listener_.joinable()) {
    listener_.join();
  }
}

void RoundStart::tell(int64_t count) {
  if (is_first()) {
    note(0, count);
  } else {
    const std::scoped_lock lock(mutex_);
    send(0, kTellTag, at::tensor({static_cast<int64_t>(messages_->getRank()), count}, at::kLong));
  }
}

int64_t RoundStart::next() {
  if (is_first()) {
    return begin_next();
  }
  std::vector<at::Tensor> round{at::empty({1}, at::kLong)};
  messages_->recv(round, 0, kBeginTag)->wait();
  return *round[0].const_data_ptr<int64_t>();
}

int64_t RoundStart::begin_next() {
  std::unique_lock lock(mutex_);
  while (!failure_ && ended_ < messages_->getSize()) {
    if (!gate_.may_begin(begun_)) {
      changed_.wait(lock);
    } else if (!waits_for_late(lock)) {
      break;
    }
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  if (ended_ == messages_->getSize()) {
    announce(kEnd);
    return kEnd;
  }
  enough_since_ = Clock::time_point::max();
  if (gate_.begins_step(begun_)) {
    const Clock::time_point now = Clock::now();
    if (begun_ > 0) {
      step_times_.push_back(now - last_step_);
    }
    if (step_times_.size() > kStepTimes) {
      step_times_.pop_front();
    }
    last_step_ = now;
  }
  announce(begun_);
  return begun_++;
}

// Where ranks are missing and there is patience left: waits for news, and returns true.
bool RoundStart::waits_for_late(std::unique_lock<std::mutex>& lock) {
  if (gate_.missing(begun_).empty()) {
    return false;
  }
  if (step_times_.empty()) {
    changed_.wait(lock);
    return true;
  }
  std::vector<Clock::duration> sorted(step_times_.begin(), step_times_.end());
  std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
  const auto patience = std::chrono::duration_cast<Clock::duration>(patience_ * sorted[sorted.size() / 2]);
  enough_since_ = std::min(enough_since_, Clock::now());
  return changed_.wait_until(lock, enough_since_ + patience) != std::cv_status::timeout;
}

std::string RoundStart::missing(int64_t round) {
  if (!is_first()) {
    return "";
  }
  const std::scoped_lock lock(mutex_);
  std::string text;
  for (const int32_t rank : gate_.missing(round)) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

void RoundStart::abandon() {
  messages_->getBackend(c10::kCPU)->abort();
  const std::scoped_lock lock(mutex_);
  if (!failure_) {
    failure_ = std::make_exception_ptr(std::runtime_error("given up"));
  }
  changed_.notify_all();
}

// Ends when all other ranks have said that they come no more, or with the messages.
void RoundStart::listen() {
  try {
    for (int32_t ended = 0; ended < messages_->getSize() - 1;) {
      std::vector<at::Tensor> told{at::empty({2}, at::kLong)};
      messages_->recvAnysource(told, kTellTag)->wait();
      const auto* content = told[0].const_data_ptr<int64_t>();
      note(static_cast<int32_t>(content[0]), content[1]);
      ended += static_cast<int32_t>(content[1] == kEnd);
    }
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

void RoundStart::note(int32_t rank, int64_t count) {
  const std::scoped_lock lock(mutex_);
  if (count == kEnd) {
    ended_ += 1;
  } else {
    gate_.note(rank, count);
  }
  changed_.notify_all();
}

void RoundStart::announce(int64_t round) {
  for (int32_t other = 1; other < messages_->getSize(); ++other) {
    send(other, kBeginTag, at::tensor({round}, at::kLong));
  }
}

void RoundStart::send(int32_t rank, int tag, at::Tensor content) {
  std::vector<at::Tensor> contents{std::move(content)};
  sent_.push_back({contents[0], messages_->send(contents, rank, tag)});
  while (!sent_.empty() && sent_.front().work->isCompleted()) {
    sent_.pop_front();
  }
}

}  // namespace zeropg
