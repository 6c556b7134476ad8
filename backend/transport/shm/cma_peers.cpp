#include "backend/transport/shm/cma_peers.h"

#include <c10/util/StringUtil.h>

#include "backend/diagnostics/notices.h"

namespace zeropg {

const std::string& CmaPeers::meet(int32_t rank, const CmaIdentity& identity) {
  std::optional<CmaReader>& reader = readers_.at(static_cast<size_t>(rank));
  if (!reader) {
    reader.emplace(identity);
    usable_ += reader->is_usable() ? 1 : 0;
  }
  return reader->refusal();
}

std::string CmaPeers::read(int32_t rank, uint64_t address, std::span<std::byte> into) {
  CmaReader& reader = readers_.at(static_cast<size_t>(rank)).value();
  if (!reader.read(address, into)) {
    usable_ = -1;  // and stays below what is needed: meet() tries nobody twice
  }
  return reader.refusal();
}

void say_unreadable(int32_t rank, int32_t world_size, int32_t peer, const std::string& refusal) {
  notice("cma",
         c10::str("[zeropg rank ", rank, "/", world_size, "] cannot read the memory of rank ", peer, " (", refusal,
                  "), so large messages inside this node are copied twice; `python -m zeropg doctor` says what "
                  "to do, BackendOptions(cma=False) that it is meant so."));
}

}  // namespace zeropg
