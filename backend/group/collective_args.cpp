#include "backend/group/collective_args.h"

#include <numeric>

namespace zeropg {

int64_t counted_bytes(const CollectiveArgs& request) {
  return std::accumulate(request.send_bytes.begin(), request.send_bytes.end(), request.bytes);
}

}  // namespace zeropg
