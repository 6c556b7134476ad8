// What stands in front of a message's bytes in the stream between two ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/transport/shm/cma.h"

namespace zeropg {

// Note [Offers]
// The bytes of a small message follow its header. A large one to a rank of the same node is offered: the header is
// followed by where the bytes lie, in the tensor pool that both have mapped or else in the sender's own memory, which
// the kernel reads (cma.h). The receiver reads them there, once a receive wants them, and answers in a word of the
// arena (MailboxCounters::answered); until then the sender keeps the tensor. An answer is no message: it must not queue
// behind one. Where the receiver cannot read, or finds receiving faster (copy_path_tuner.h), it says so, and the bytes
// follow as usual.
struct MessageHeader {
  static constexpr uint16_t kBytesFollow = 0x7a6d;  // "zm": catches a stream that got out of step
  static constexpr uint16_t kOfferFollows = 0x7a6f;

  uint64_t bytes = 0;
  int32_t tag = 0;
  uint16_t dtype = 0;  // at::ScalarType
  uint16_t magic = kBytesFollow;
};

struct MemoryOffer {
  int64_t pool_offset = -1;  // in the sender's part of the pool; -1: not there, but
  CmaIdentity sender;
  uint64_t address = 0;
};

struct MessageStart {
  MessageHeader header;
  MemoryOffer offer;

  size_t wire_bytes() const {
    return header.magic == MessageHeader::kOfferFollows ? sizeof(MessageStart) : sizeof(MessageHeader);
  }
};
static_assert(sizeof(MessageStart) == 16 + 48);

enum class Answer : uint8_t {
  kHaveIt,
  kSendIt,
  kSendAll,  // this one, and do not offer the memory of the process again
};
// The number of the offer between the two ranks, counted from 1, and what becomes of it.
constexpr uint64_t answer_to(uint64_t offer, Answer answer) { return 4 * offer + static_cast<uint64_t>(answer); }

}  // namespace zeropg
