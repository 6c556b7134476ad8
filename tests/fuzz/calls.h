// What a peer may say of its call: any bytes, from another node or in shared memory with a codec's description.
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

inline CallFingerprint own_call(size_t index) {
  CallFingerprint own{.sequence = 41 + index, .dtype = 6, .bytes = 40};
  switch (index) {
    case 0:
      own.op = static_cast<uint32_t>(OpKind::kAllReduce);
      own.codec = hash_of("a codec");
      break;
    case 1:
      own.op = static_cast<uint32_t>(OpKind::kReduce);
      own.reduce_op = static_cast<uint32_t>(ReduceOp::kPremulSum);
      own.root = 1;
      own.factor = 0.5;
      own.imaginary_factor = -0.0;
      break;
    case 2:
      own.op = static_cast<uint32_t>(OpKind::kAllToAll);
      own.pair_bytes = 12;
      break;
    default:
      own.op = static_cast<uint32_t>(OpKind::kBarrier);
      own.bytes = 0;
  }
  own.algorithm = hash_of("an algorithm");
  return own;
}

inline void must_be_readable(std::string_view text) {
  if (text.empty() || printable(text, text.size()) != text) std::abort();
}

inline void compared(const CallFingerprint& own, std::span<const uint8_t> said) {
  CallFingerprint theirs;
  if (said.size() < sizeof(theirs)) return;  // the rest is still on its way
  std::memcpy(&theirs, said.data(), sizeof(theirs));
  bool is_accepted = true;
  try {
    check_call(theirs, own, 0, 1);
  } catch (const c10::DistBackendError& error) {
    is_accepted = false;
    must_be_readable(error.what_without_backtrace());
  }
  if (is_accepted != (std::memcmp(&theirs, &own, sizeof(own)) == 0)) std::abort();
}

inline void described(std::span<const uint8_t> said) {
  CallFingerprint theirs;
  const size_t bytes = std::min(said.size(), sizeof(theirs));
  std::memcpy(&theirs, said.data(), bytes);
  const std::span<const uint8_t> codec = said.subspan(bytes);
  must_be_readable(describe_call(theirs, {reinterpret_cast<const char*>(codec.data()), codec.size()}));
}

// The first byte says which call it is compared with, or that it is described with what follows it.
inline void calls(std::span<const uint8_t> input) {
  if (input.empty()) return;
  const size_t index = input[0] % (kOwnCalls + 1);
  if (index < kOwnCalls) {
    compared(own_call(index), input.subspan(1));
  } else {
    described(input.subspan(1));
  }
}

}  // namespace zeropg::fuzz
