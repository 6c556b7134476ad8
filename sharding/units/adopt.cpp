#include "sharding/units/adopt.h"

#include <malloc.h>

#include <exception>
#include <numeric>

namespace zeropg {
namespace {

constexpr int64_t kLargeNumel = 1 << 18;

int64_t padded_numel_of(const Unit& unit) {
  return std::accumulate(unit.flats.begin(), unit.flats.end(), int64_t{0},
                         [](int64_t sum, const FlatParameter* flat) { return sum + flat->layout().total_numel; });
}

// What source.take gives; where that throws on one rank, it is an error on all. Collective.
std::vector<ParameterTensors> take_together(const ModelSource& source, int64_t index, const Unit& unit,
                                            Communicator& communicator) {
  std::vector<ParameterTensors> parameters;
  std::exception_ptr failure;
  try {
    parameters = source.take(index);
  } catch (...) {
    failure = std::current_exception();
  }
  if (communicator.world_size() > 1 && !unit.flats.empty()) {  // before anybody waits for the values
    const at::Tensor failed = communicator.gather_values({failure == nullptr ? 0 : 1}, unit.flats.front()->device());
    TORCH_CHECK(failure != nullptr || failed.sum().item<int64_t>() == 0, communicator.context("fully_shard"), "rank ",
                failed.argmax().item<int64_t>(), " could not make the parameters of unit '", unit.name,
                "' and says why; the model is sharded in part now: build it again.");
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  return parameters;
}

}  // namespace

void adopt(const ModelSource& source, Communicator& communicator, Units& units, Fetch& fetch, WriteLedger& ledger) {
  for (const int64_t index : source.order) {
    const Unit& unit = units.all().at(index);
    const std::vector<ParameterTensors> parameters = take_together(source, index, unit, communicator);
    for (FlatParameter* flat : unit.flats) {
      const at::Tensor values = flat->take_over(parameters);
      ledger.watch(*flat);
      if (communicator.world_size() > 1) {
        communicator.wait(communicator.broadcast(values, /*root=*/0));
      }
      fetch.adopt(*flat, values);
    }
    // glibc keeps what was freed between what stays: without this a rank would hold twice what its shards take.
    if (padded_numel_of(unit) >= kLargeNumel) {
      malloc_trim(0);
    }
  }
  fetch.end_adoption();
}

}  // namespace zeropg
