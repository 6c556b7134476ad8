#include "backend/partial/partial_reducer.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

// Plain loops: ATen's would make a second team of OpenMP threads for the thread that takes part.
void add_to(const at::Tensor& sums, const at::Tensor& more) {
  AT_DISPATCH_FLOATING_TYPES(sums.scalar_type(), "partial_sum", [&] {
    auto* out = sums.mutable_data_ptr<scalar_t>();
    const auto* in = more.const_data_ptr<scalar_t>();
    const int64_t numel = more.numel();
    for (int64_t i = 0; i < numel; ++i) {
      out[i] += in[i];
    }
  });
}

void set(const at::Tensor& flags, int64_t index) {
  AT_DISPATCH_FLOATING_TYPES(flags.scalar_type(), "partial_flags",
                             [&] { flags.mutable_data_ptr<scalar_t>()[index] = 1; });
}

}  // namespace

PartialReducer::PartialReducer(c10::intrusive_ptr<c10d::ProcessGroup> rounds,
                               c10::intrusive_ptr<c10d::ProcessGroup> messages, Options options)
    : rounds_(std::move(rounds)), options_(std::move(options)), process_(getpid()), residuals_(options_.numels.size()) {
  RoundGate gate(rounds_->getSize(), options_.tolerance, static_cast<int64_t>(options_.numels.size()),
                 options_.max_steps_behind);
  start_ = std::make_unique<RoundStart>(std::move(messages), std::move(gate), options_.patience);
  participant_ = std::thread([this] { take_part(); });
}

PartialReducer::~PartialReducer() {
  if (getpid() != process_) {
    participant_.detach();  // it lives in the parent alone
    start_.release();       // NOLINT: likewise
    return;
  }
  if (!has_ended_well_) {
    start_->abandon();
    rounds_->getBackend(c10::kCPU)->abort();
  }
  participant_.join();
}

int64_t PartialReducer::post(const at::Tensor& gradient) {
  check_process();
  int64_t round;
  {
    const auto lock = lock_for("post");
    round = posted_;
  }
  const auto tensor = static_cast<size_t>(round) % options_.numels.size();
  TORCH_CHECK_VALUE(gradient.numel() == options_.numels[tensor], context("post"), "tensor ", tensor, " of a step has ",
                    gradient.numel(), " elements; it had ", options_.numels[tensor],
                    " in the first one. Give the same tensors in the same order in every step.");
  at::Tensor copy = at::empty({gradient.numel()}, options_.dtype);
  copy.view(gradient.sizes()).copy_(gradient);
  {
    const auto lock = lock_for("post");
    if (round < begun_) {
      add_to_residual(static_cast<int64_t>(tensor), copy);
    } else {
      waiting_.emplace(round, std::move(copy));
    }
    posted_ = round + 1;
  }
  start_->tell(round + 1);
  return round;
}

std::vector<bool> PartialReducer::wait(int64_t round, const at::Tensor& average) {
  check_process();
  at::Tensor sums;
  {
    const auto until = std::chrono::steady_clock::now() + options_.timeout;
    std::unique_lock lock(mutex_);
    while (done_.count(round) == 0) {
      check_not_failed("wait");
      changed_.wait_for(lock, kSignalCheckInterval);
      lock.unlock();
      check_signals();
      const std::string missing = std::chrono::steady_clock::now() < until ? "" : start_->missing(round);
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < until, context("wait"), "round ", round,
                       " has not come within ", options_.timeout.count(), " ms",
                       missing.empty() ? "; rank 0's error names the ranks that are late."
                                       : "; these ranks have not come to it: " + missing + ". See what they do.");
      lock.lock();
    }
    sums = std::move(done_.extract(round).mapped());
    waited_ += 1;
  }
  const int64_t numel = sums.numel() - ranks();
  std::vector<bool> contributed(ranks());
  AT_DISPATCH_FLOATING_TYPES(sums.scalar_type(), "partial_flags", [&] {
    const auto* flags = sums.const_data_ptr<scalar_t>() + numel;
    std::transform(flags, flags + ranks(), contributed.begin(), [](scalar_t flag) { return flag != 0; });
  });
  average.copy_(sums.narrow(0, 0, numel).div_(ranks()).view(average.sizes()));
  return contributed;
}

std::vector<at::Tensor> PartialReducer::owed() {
  check_process();
  std::vector<at::Tensor> sums;
  {
    const auto lock = lock_for("owed");
    TORCH_CHECK_WITH(ValueError, posted_ == begun_ && posted_ == waited_, context("owed"),
                     "a step is not over: wait for all rounds first.");
    for (size_t tensor = 0; tensor < residuals_.size(); ++tensor) {
      sums.push_back(residuals_[tensor].defined() ? residuals_[tensor].clone()
                                                  : at::zeros({options_.numels[tensor]}, options_.dtype));
    }
  }
  for (at::Tensor& sum : sums) {  // nobody is in a round, so the group is free
    std::vector<at::Tensor> tensors{sum};
    rounds_->allreduce(tensors)->wait();
  }
  return sums;
}

void PartialReducer::owe(const std::vector<at::Tensor>& sums) {
  TORCH_CHECK_VALUE(sums.size() == options_.numels.size(), context("owe"), "got ", sums.size(),
                    " tensors; expected one for each of a step's ", options_.numels.size(), ".");
  for (size_t tensor = 0; tensor < sums.size(); ++tensor) {
    TORCH_CHECK_VALUE(sums[tensor].numel() == options_.numels[tensor], context("owe"), "tensor ", tensor, " has ",
                      sums[tensor].numel(), " elements; expected ", options_.numels[tensor], ".");
  }
  const auto lock = lock_for("owe");
  for (size_t tensor = 0; tensor < sums.size(); ++tensor) {
    at::Tensor copy = at::empty({sums[tensor].numel()}, options_.dtype);
    copy.copy_(sums[tensor].reshape({-1}));
    add_to_residual(static_cast<int64_t>(tensor), copy);
  }
}

void PartialReducer::close() {
  check_process();
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(is_closed_, true)) {
      return;
    }
  }
  start_->tell(RoundStart::kEnd);
  const auto until = std::chrono::steady_clock::now() + options_.timeout;
  std::unique_lock lock(mutex_);
  while (!has_ended_well_) {
    check_not_failed("close");
    changed_.wait_for(lock, kSignalCheckInterval);
    lock.unlock();
    check_signals();
    TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < until, context("close"),
                     "other ranks have not called it within ", options_.timeout.count(), " ms; call it on every rank.");
    lock.lock();
  }
}

std::string PartialReducer::context(const char* operation) const {
  return c10::str("[zeropg rank ", rounds_->getRank(), "/", ranks(), "] partial reduction, ", operation, ": ");
}

void PartialReducer::check_process() const {
  TORCH_CHECK_WITH(DistBackendError, getpid() == process_, context("fork"),
                   "this process was forked from the one that made it, and has no groups; make new ones here.");
}

// The life of participant_.
void PartialReducer::take_part() {
  try {
    for (int64_t round = start_->next(); round != RoundStart::kEnd; round = start_->next()) {
      std::vector<at::Tensor> sums{take_contribution(round)};
      rounds_->allreduce(sums)->wait();
      const std::scoped_lock lock(mutex_);
      done_.emplace(round, std::move(sums[0]));
      changed_.notify_all();
    }
    const std::scoped_lock lock(mutex_);
    has_ended_well_ = true;
    changed_.notify_all();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    const std::scoped_lock lock(mutex_);
    failure_ = ours == nullptr ? error.what() : ours->what_without_backtrace();
    changed_.notify_all();
  }
}

at::Tensor PartialReducer::take_contribution(int64_t round) {
  const auto tensor = static_cast<size_t>(round) % options_.numels.size();
  const int64_t numel = options_.numels[tensor];
  at::Tensor sums = at::empty({numel + ranks()}, options_.dtype);
  std::memset(sums.mutable_data_ptr(), 0, sums.nbytes());
  const std::scoped_lock lock(mutex_);
  if (residuals_[tensor].defined()) {
    add_to(sums, std::exchange(residuals_[tensor], at::Tensor()));
  }
  if (const auto posted = waiting_.extract(round); !posted.empty()) {
    add_to(sums, posted.mapped());
    set(sums, numel + rounds_->getRank());
  }
  begun_ = round + 1;
  return sums;
}

void PartialReducer::add_to_residual(int64_t tensor, const at::Tensor& gradient) {
  at::Tensor& residual = residuals_[tensor];
  if (residual.defined()) {
    add_to(residual, gradient);
  } else {
    residual = gradient;
  }
}

std::unique_lock<std::mutex> PartialReducer::lock_for(const char* operation) {
  std::unique_lock lock(mutex_);
  check_not_failed(operation);
  TORCH_CHECK_WITH(ValueError, !is_closed_, context(operation), "it is closed; make another one.");
  return lock;
}

void PartialReducer::check_not_failed(const char* operation) const {
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), context(operation), failure_);
}

}  // namespace zeropg
