// What a peer may say of its call: any bytes as the header of another node's rank, or as an announcement in shared
// memory.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "backend/collectives/reduce/reduce_op.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/diagnostics/printable.h"
#include "backend/group/call_fingerprint.h"

namespace zeropg::fuzz {

constexpr size_t kOwnCalls = 4;

inline CallHeader own_call(size_t index) {
  CallHeader own{.magic = CallHeader::kMagic, .sequence = 41 + index, .call = {.dtype = 6, .bytes = 40}};
  switch (index) {
    case 0:
      own.call.op = static_cast<uint32_t>(OpKind::kAllReduce);
      own.codec = hash_of("a codec");
      break;
    case 1:
      own.call.op = static_cast<uint32_t>(OpKind::kReduce);
      own.call.reduce_op = static_cast<uint32_t>(ReduceOp::kPremulSum);
      own.call.root = 1;
      own.call.factor = 0.5;
      own.imaginary_factor = -0.0;
      break;
    case 2:
      own.call.op = static_cast<uint32_t>(OpKind::kAllToAll);
      own.pair_bytes = 12;
      break;
    default:
      own.call.op = static_cast<uint32_t>(OpKind::kBarrier);
      own.call.bytes = 0;
  }
  own.algorithm = hash_of("an algorithm");
  return own;
}

inline void must_be_readable(std::string_view text) {
  if (text.empty() || printable(text, text.size()) != text) std::abort();
}

inline void header(const CallHeader& own, std::span<const uint8_t> said) {
  static_assert(sizeof(CallHeader) == 80, "without padding, so that bytes can be compared");
  CallHeader theirs;
  if (said.size() < sizeof(theirs)) return;  // the rest is still on its way
  std::memcpy(&theirs, said.data(), sizeof(theirs));
  bool is_accepted = true;
  try {
    check_header(theirs, own, 0, 1);
  } catch (const c10::DistBackendError& error) {
    is_accepted = false;
    must_be_readable(error.what_without_backtrace());
  }
  if (is_accepted != (std::memcmp(&theirs, &own, sizeof(own)) == 0)) std::abort();
}

inline void announcement(std::span<const uint8_t> said) {
  Announcement theirs{};
  std::memcpy(&theirs, said.data(), std::min(said.size(), sizeof(theirs)));
  must_be_readable(describe_announcement(theirs));
}

// The first byte says which call it is compared with, or that the rest is an announcement.
inline void calls(std::span<const uint8_t> input) {
  if (input.empty()) return;
  const size_t index = input[0] % (kOwnCalls + 1);
  if (index < kOwnCalls) {
    header(own_call(index), input.subspan(1));
  } else {
    announcement(input.subspan(1));
  }
}

}  // namespace zeropg::fuzz
