// What ranks say to each other of a collective, compared and put into words. Pure: whatever bytes a peer sends are
// safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/transport/shm/shm_arena.h"

namespace zeropg {

// Plain numbers, since they may have come from a peer.
struct CallFingerprint {
  uint32_t op = 0;         // OpKind
  uint32_t dtype = 0;      // at::ScalarType
  uint32_t reduce_op = 0;  // ReduceOp
  int32_t root = 0;
  int64_t bytes = 0;
  double factor = 1;  // the real part
};

// FNV-1a: to notice ranks that were configured differently, not to keep anybody out.
uint64_t hash_of(const std::string& text);

// "all_reduce(Float, sum, 40 bytes)", or "garbage" where the numbers mean nothing.
std::string describe_call(const CallFingerprint& call);

// To one other rank: Note [Call headers] in fingerprint_between_nodes.h.
struct CallHeader {
  static constexpr uint64_t kMagic = 0x31'6c'6c'61'63'67'70'7a;  // "zpgcall1": catches a stream that got out of step
  uint64_t magic = 0;
  uint64_t sequence = 0;  // of the group's collectives
  CallFingerprint call;
  double imaginary_factor = 0;
  int64_t pair_bytes = 0;  // all_to_all: what the sender has for the receiver
  uint64_t codec = 0;      // a hash of its description, 0: none
  uint64_t algorithm = 0;  // a hash of the schedule's name
};

// Throws DistBackendError unless `theirs`, which `rank` has from `peer`, is `expected` to the bit.
void check_header(const CallHeader& theirs, const CallHeader& expected, int32_t rank, int32_t peer);

// What the payload of an announcement holds, but for an all_to_all's, which has its byte counts there.
struct AnnouncedReduction {
  double factor = 1;
  double factor_imaginary = 0;
  char codec[Announcement::kInlineBytes - 2 * sizeof(double)] = {};  // its description, "" for none
};
static_assert(sizeof(AnnouncedReduction) == Announcement::kInlineBytes);

std::string describe_announcement(const Announcement& said);

}  // namespace zeropg
