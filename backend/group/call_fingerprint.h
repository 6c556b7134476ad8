// What a rank says of a collective to the others, compared and put into words. Pure: whatever bytes a peer sends are
// safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace zeropg {

// One call. It travels as it is: inside a node in front of where the tensors lie (fingerprint_in_node.h), to other
// nodes in front of the first bytes and with signs of life (fingerprint_between_nodes.h). Plain numbers without
// padding, since they may have come from a peer and are compared to the bit.
struct CallFingerprint {
  static constexpr int32_t kAboutLinks = -1;  // the root of what the ranks run of their own accord (link_watch.h)
  static constexpr uint64_t kMagic = 0x32'6c'6c'61'63'67'70'7a;  // "zpgcall2": catches a stream that got out of step
  uint64_t magic = kMagic;
  uint64_t sequence = 0;   // of the group's collectives
  uint32_t op = 0;         // OpKind
  uint32_t dtype = 0;      // at::ScalarType
  uint32_t reduce_op = 0;  // ReduceOp
  int32_t root = 0;
  int64_t bytes = 0;  // CollectiveSpec::bytes
  double factor = 1;
  double imaginary_factor = 0;
  int64_t pair_bytes = 0;  // all_to_all, to one rank: what the sender has for it
  uint64_t codec = 0;      // a hash of its description, 0: none
  uint64_t algorithm = 0;  // a hash of the schedule's name, and of the nodes' shares where it has any
  uint64_t item = 0;       // CollectiveArgs::item
};
static_assert(sizeof(CallFingerprint) == 88 && std::is_trivially_copyable_v<CallFingerprint>);

// FNV-1a: to notice ranks that were configured differently, not to keep anybody out.
uint64_t hash_of(std::string_view text);

// How the call of another rank differs from this rank's.
struct CallDifference {
  bool is_senseless = false;  // it is no call at all
  bool in_call = false;       // in what is called, or in its number
  bool in_codec = false;
  bool in_algorithm = false;
  bool in_pair = false;  // in pair_bytes

  bool is_none() const { return !(is_senseless || in_call || in_codec || in_algorithm || in_pair); }
};
CallDifference difference(const CallFingerprint& theirs, const CallFingerprint& ours);

// "all_reduce(Float, sum, 40 bytes)", or "garbage" where the numbers mean nothing. `codec` is the description of the
// call's codec, if the rank gave one: "... as fp16()".
std::string describe_call(const CallFingerprint& call, std::string_view codec = {});

// Throws DistBackendError unless `theirs`, which `rank` has from `peer`, is `ours` to the bit. `codec`: the description
// of ours, if there is one.
void check_call(const CallFingerprint& theirs, const CallFingerprint& ours, int32_t rank, int32_t peer,
                std::string_view codec = {});

}  // namespace zeropg
