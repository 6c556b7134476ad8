#include "backend/collectives/schedule/all_to_all_blocks.h"

#include <stdexcept>
#include <string>

namespace zeropg {

namespace {

// First byte of each peer's block in a packed tensor, or of the peer's tensor in a list.
std::vector<Region> block_starts(Space space, bool is_list, const std::vector<int64_t>& block_bytes) {
  std::vector<Region> starts;
  int64_t offset = 0;
  for (size_t peer = 0; peer < block_bytes.size(); ++peer) {
    starts.push_back(
        {.space = space, .index = is_list ? static_cast<int32_t>(peer) : 0, .offset_bytes = is_list ? 0 : offset});
    offset += block_bytes[peer];
  }
  return starts;
}

void check_counts(const CollectiveSpec& spec) {
  const auto world_size = static_cast<size_t>(spec.world_size);
  if (spec.send_bytes.size() != world_size || spec.receive_bytes.size() != world_size) {
    throw std::invalid_argument(std::to_string(spec.send_bytes.size()) + " send counts and " +
                                std::to_string(spec.receive_bytes.size()) + " receive counts, expected " +
                                std::to_string(spec.world_size) + " of each; give one per rank");
  }
  if (spec.send_bytes[spec.rank] != spec.receive_bytes[spec.rank]) {
    throw std::invalid_argument("this rank sends " + std::to_string(spec.send_bytes[spec.rank]) +
                                " bytes to itself but receives " + std::to_string(spec.receive_bytes[spec.rank]) +
                                "; make both splits of the own rank equal");
  }
}

}  // namespace

AllToAllBlocks all_to_all_blocks(const CollectiveSpec& spec) {
  check_counts(spec);
  return {.sources = block_starts(Space::kInput, spec.input_is_list, spec.send_bytes),
          .destinations = block_starts(Space::kOutput, spec.output_is_list, spec.receive_bytes)};
}

}  // namespace zeropg
