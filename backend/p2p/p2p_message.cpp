#include "backend/p2p/p2p_message.h"

#include "backend/group/failure.h"

namespace zeropg {

void check_fits(const P2pMessage& receive, int32_t source, uint64_t bytes, uint16_t dtype) {
  const OperationLabel& label = receive.work->label();
  if (static_cast<uint64_t>(receive.bytes) != bytes) {
    fail_operation(label, "rank ", source, " sent ", bytes, " bytes, this rank receives ", receive.bytes,
                   "; make both tensors the same size.");
  }
  if (dtype != static_cast<uint16_t>(receive.dtype)) {
    fail_operation(label, "rank ", source, " sent ", c10::toString(static_cast<at::ScalarType>(dtype)),
                   ", this rank receives ", c10::toString(receive.dtype),
                   "; make both tensors the same dtype, or send tensor.view(torch.uint8) to move plain bytes.");
  }
}

}  // namespace zeropg
