// The doorbells of other processes: one descriptor for each, however many groups this process shares with it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "backend/platform/process/descriptor.h"

namespace zeropg {

// `doorbell`, or, where this process already holds a descriptor of the same one under the same name, that one; the
// other is closed. `process`: the nonce by which its process names itself, which is not believed: the kernel says
// whether two descriptors are the same. Where it does not tell, each group keeps its own. Any thread.
std::shared_ptr<const Descriptor> share_doorbell(const std::array<uint64_t, 2>& process, Descriptor doorbell);

}  // namespace zeropg
