#include "sharding/fetch/registry.h"

#include <c10/util/Exception.h>

namespace zeropg {
namespace {

using MakeFetch = decltype(&make_fetch);

// By preference.
constexpr MakeFetch kFetches[] = {make_replicated_fetch, make_shared_fetch, make_gathered_fetch};

}  // namespace

std::unique_ptr<Fetch> make_fetch(Communicator& communicator, const ShardingOptions& options,
                                  const std::vector<FlatParameter*>& flats) {
  for (const MakeFetch make : kFetches) {
    if (std::unique_ptr<Fetch> fetch = make(communicator, options, flats)) {
      return fetch;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "gathered_fetch serves every group in stage 3");
}

}  // namespace zeropg
