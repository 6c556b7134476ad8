#include "sharding/fetch/arriving_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sub.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace zeropg {
namespace {

// Differences on the wire at once, where a step waits for them: one is added while the next travels.
constexpr size_t kMaxInFlight = 2;

at::Tensor own_slice(const FlatParameter& flat, const at::Tensor& whole) {
  return whole.narrow(0, flat.shard_start(), flat.layout().shard_numel);
}

// Differences go largest first: the buffers of the others then fit into theirs. Else the order is that of the forward.
std::vector<FlatParameter*> in_order(std::vector<FlatParameter*> flats) {
  if (std::any_of(flats.begin(), flats.end(), [](const FlatParameter* flat) { return flat->sends_differences(); })) {
    std::stable_sort(flats.begin(), flats.end(), [](const FlatParameter* a, const FlatParameter* b) {
      return a->layout().total_numel > b->layout().total_numel;
    });
  }
  return flats;
}

}  // namespace

void ArrivingWeights::expect(const std::vector<FlatParameter*>& flats) {
  const std::scoped_lock lock(mutex_);
  for (FlatParameter* flat : flats) {
    arrivals_[flat].whole = flat->whole();
  }
}

void ArrivingWeights::send(const std::vector<FlatParameter*>& flats) {
  expect(flats);
  hide_all();
  for (FlatParameter* flat : in_order(flats)) {
    send(*flat, /*as_difference=*/true);
  }
}

void ArrivingWeights::gather(const std::vector<FlatParameter*>& flats, bool as_differences) {
  expect(flats);
  try {
    gather_in_order(flats, as_differences);
  } catch (...) {
    hide_all();
    throw;
  }
}

// A replica that misses a difference stays different from those of other ranks. So what a signal handler raises is kept
// until all are sent.
void ArrivingWeights::gather_in_order(const std::vector<FlatParameter*>& flats, bool as_differences) {
  std::exception_ptr interrupt;
  std::vector<FlatParameter*> differences;
  for (FlatParameter* flat : in_order(flats)) {
    const bool is_difference = as_differences && flat->sends_differences();
    if (is_difference) {
      if (differences.size() >= kMaxInFlight) {
        wait_through_interrupts(*differences[differences.size() - kMaxInFlight], interrupt);
      }
      differences.push_back(flat);
    }
    send(*flat, is_difference);
  }
  if (interrupt != nullptr) {
    std::rethrow_exception(interrupt);
  }
  for (FlatParameter* flat : flats) {
    wait_for(*flat);
  }
}

void ArrivingWeights::wait_through_interrupts(FlatParameter& flat, std::exception_ptr& interrupt) {
  for (bool has_arrived = false; !has_arrived;) {
    try {
      wait_for(flat);
      has_arrived = true;
    } catch (const c10::Error&) {
      throw;  // the group has failed
    } catch (...) {
      interrupt = std::current_exception();
    }
  }
}

void ArrivingWeights::send(FlatParameter& flat, bool as_difference) {
  const std::scoped_lock lock(mutex_);
  Arrival& arrival = arrivals_.at(&flat);
  arrival.began = communicator_.log()->now();
  if (!flat.device().is_cpu()) {
    arrival.stream = c10::impl::VirtualGuardImpl(flat.device().type()).getStream(flat.device());
  }
  if (as_difference && flat.sends_differences()) {
    send_difference(flat, arrival);
    return;
  }
  const at::Tensor own = own_slice(flat, arrival.whole);
  if (flat.sends_differences()) {
    own.copy_(flat.master.values);
  }
  arrival.work = communicator_.gather_slices(arrival.whole, own);
}

// Note [Weights as differences]
// Every rank has the same replica r of the masters w, whose slices are on their owners. A step sends an encoding of
// w - r, and every rank, the owner too, adds what it decodes to: so replicas stay equal to the bit, and what one
// encoding loses is in the next difference. That is error feedback without residuals (EF21, Richtarik et al.), and it
// survives a checkpoint, whose masters every load sends as they are.
void ArrivingWeights::send_difference(FlatParameter& flat, Arrival& arrival) {
  const at::Tensor& replica = arrival.whole;
  replica.nan_to_num_(0, 0, 0);  // nothing added to a NaN would mend it when the master has been mended
  arrival.mine = pool_.acquire(flat.layout().shard_numel, at::kFloat, flat.device());
  at::sub_out(arrival.mine, flat.master.values, own_slice(flat, replica));
  flat.clear_padding(arrival.mine);
  arrival.everybodys = pool_.acquire(flat.layout().total_numel, at::kFloat, flat.device());
  arrival.work = communicator_.gather_slices_encoded(arrival.everybodys, arrival.mine, differences_);
}

void ArrivingWeights::wait_for(FlatParameter& flat) {
  std::unique_lock lock(mutex_);
  const auto found = arrivals_.find(&flat);
  if (found == arrivals_.end()) {
    return;
  }
  const Arrival arrival = found->second;
  lock.unlock();  // another thread, or a signal handler in the middle of the wait, may wait for the same
  wait(flat, arrival);
  lock.lock();
  const auto still = arrivals_.find(&flat);
  if (still != arrivals_.end() && still->second.work == arrival.work) {
    end(flat);
  }
}

void ArrivingWeights::wait(const FlatParameter& flat, const Arrival& arrival) {
  const auto fail = [&](const std::string& cause) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str(communicator_.context("step"), "the new weights of ", flat.describe(),
                             " have not arrived from the other ranks; expected every rank to end the step. Look at the "
                             "other ranks' logs, and start again from a checkpoint: ",
                             cause));
  };
  if (!arrival.work) {
    fail("they were not sent, since the step failed.");
  }
  try {
    if (arrival.stream.has_value()) {  // what follows the step in its own stream need not ask
      const c10::StreamGuard guard(*arrival.stream);
      communicator_.wait(arrival.work);
    }
    communicator_.wait(arrival.work, EventLog::Kind::kWaitForGather, flat.unit_name());
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  }
}

void ArrivingWeights::end(FlatParameter& flat) {
  at::NoGradGuard no_grad;
  Arrival arrival = std::move(arrivals_.extract(&flat).mapped());
  int64_t bytes = static_cast<int64_t>(arrival.whole.nbytes());
  if (arrival.everybodys.defined()) {
    arrival.whole.add_(arrival.everybodys);
    bytes = static_cast<int64_t>(arrival.everybodys.nbytes());
    pool_.release(std::move(arrival.mine));
    pool_.release(std::move(arrival.everybodys));
  }
  if (arrival.is_hidden) {
    flat.attach(arrival.whole);
  }
  communicator_.log()->add(EventLog::Kind::kGather, flat.unit_name(), arrival.began, bytes);
}

void ArrivingWeights::hide_all() {
  const std::scoped_lock lock(mutex_);
  for (auto& [flat, arrival] : arrivals_) {
    if (!std::exchange(arrival.is_hidden, true)) {
      flat->hide();
    }
  }
}

}  // namespace zeropg
