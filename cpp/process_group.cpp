#include "backend/process_group/process_group.h"

#include <zeropg/process_group.h>

#include "backend/process_group/options.h"

namespace zeropg {

c10::intrusive_ptr<c10d::Backend> make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(store, "[zeropg] make_process_group: the store is null; expected a FileStore or a TCPStore.");
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "[zeropg] make_process_group: rank ", rank, " of ", world_size,
                    "; expected 0 <= rank < world_size.");
  auto ours = c10::make_intrusive<BackendOptions>(options.timeout);
  ours->secret = options.secret;
  ours->host_id = options.host_id;
  ours->domain_id = options.domain_id;
  return c10::make_intrusive<ProcessGroupZero>(store, rank, world_size, ours);
}

}  // namespace zeropg
