#include "backend/simulator/simulated_memory.h"

#include <string>

namespace zeropg {

namespace {

constexpr std::byte kPoison{0xcb};  // memory that no step has written yet

}  // namespace

SimulatedMemory::SimulatedMemory(const SimulatorOptions& options, const SimulatedNodes& nodes,
                                 const RankPrograms& programs, std::vector<RankAccount>& accounts)
    : nodes_(nodes),
      programs_(programs),
      accounts_(accounts),
      scratch_(options.world_size),
      banks_(2 * size_t(options.world_size)),
      of_tensors_(nodes.count()) {
  for (Bank& bank : banks_) bank.bytes.assign(options.bank_bytes, kPoison);
  for (int32_t rank = 0; rank < options.world_size; ++rank) {
    if (!programs.is_done(rank)) begin_operation(rank);
  }
}

void SimulatedMemory::begin_operation(int32_t rank) {
  scratch_[rank].assign(programs_.schedule_of(rank).scratch_bytes, kPoison);
}

void SimulatedMemory::open_barrier(int32_t rank) {
  of_tensors_[nodes_.node_of(rank)].clear();
  for (const int32_t each : nodes_.ranks_beside(rank)) {
    for (int bank = 0; bank < 2; ++bank) banks_[2 * each + bank].accesses.clear();
  }
}

// Messages are not taken to order accesses: only barriers are.
std::byte* SimulatedMemory::resolve(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
  std::byte* data = locate(rank, region, bytes, is_write);
  const bool is_tensor = region.space == Space::kInput || region.space == Space::kOutput ||
                         region.space == Space::kPeerInput || region.space == Space::kPeerOutput;
  if (region.space == Space::kStaging) {
    log_access<int64_t>(bank_of(rank, region).accesses,
                        {rank, region.offset_bytes, region.offset_bytes + bytes, is_write, programs_.place_of(rank)},
                        region);
    if (!is_write) accounts_[rank].traffic.staged_read_bytes[region.index] += bytes;
  }
  if (is_tensor && programs_.schedule_of(rank).is_direct) {
    log_access<const std::byte*>(of_tensors_[nodes_.node_of(rank)],
                                 {rank, data, data + bytes, is_write, programs_.place_of(rank)}, region);
  }
  return data;
}

std::byte* SimulatedMemory::locate(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
  const SimulatedTensors& tensors = programs_.operation_of(rank).tensors[rank];
  std::span<std::byte> buffer;
  const auto list = region.space == Space::kInput    ? std::span(tensors.inputs)
                    : region.space == Space::kOutput ? std::span(tensors.outputs)
                                                     : std::span(tensors.residuals);
  switch (region.space) {
    case Space::kInput:
      if (is_write) programs_.fail(rank, "it writes to an input");
      [[fallthrough]];
    case Space::kOutput:
    case Space::kResidual:
      if (region.index < 0 || size_t(region.index) >= list.size()) {
        programs_.fail(rank, "there is no " + to_string(region));
      }
      buffer = list[region.index];
      break;
    case Space::kScratch:
      buffer = scratch_[rank];
      break;
    case Space::kPeerInput:
    case Space::kPeerOutput:
      buffer = tensor_of_peer(rank, region, is_write);
      break;
    case Space::kStaging:
      if (region.index < 0 || size_t(region.index) >= scratch_.size() || region.bank > 1) {
        programs_.fail(rank, "there is no " + to_string(region));
      }
      if (!nodes_.is_near(rank, region.index)) programs_.fail(rank, to_string(region) + " is on another node");
      buffer = bank_of(rank, region).bytes;
      break;
  }
  if (region.offset_bytes < 0 || bytes < 0 || region.offset_bytes > int64_t(buffer.size()) - bytes) {
    programs_.fail(rank, std::to_string(bytes) + " bytes at " + to_string(region) + " are outside its " +
                             std::to_string(buffer.size()) + " bytes");
  }
  return buffer.data() + region.offset_bytes;
}

SimulatedMemory::Bank& SimulatedMemory::bank_of(int32_t rank, const Region& region) {
  return banks_[2 * region.index + (region.bank + programs_.banks_used(rank)) % 2];
}

std::span<std::byte> SimulatedMemory::tensor_of_peer(int32_t rank, const Region& region, bool is_write) const {
  const bool is_input = region.space == Space::kPeerInput;
  if (is_input && is_write) programs_.fail(rank, "it writes to an input");
  if (region.index < 0 || size_t(region.index) >= scratch_.size() || !programs_.schedule_of(rank).is_direct) {
    programs_.fail(rank, "there is no " + to_string(region));
  }
  if (!nodes_.is_near(rank, region.index)) programs_.fail(rank, to_string(region) + " is on another node");
  const SimulatedTensors& peer = programs_.operation_of(rank).tensors[region.index];
  const auto& tensors = is_input ? peer.inputs : peer.outputs;
  if (tensors.empty()) programs_.fail(rank, "there is no " + to_string(region));
  const bool has_blocks = is_input && !peer.blocks_for_peers.empty();
  return has_blocks ? tensors[0].subspan(size_t(peer.blocks_for_peers[rank])) : tensors[0];
}

template <class Place>
void SimulatedMemory::log_access(Log<Place>& log, const Access<Place>& access, const Region& region) const {
  for (const Access<Place>& other : log) {
    const bool overlaps = access.begin < other.end && other.begin < access.end;
    if (other.rank == access.rank || !overlaps || !(access.is_write || other.is_write)) continue;
    programs_.fail(access.rank, "race: it " + std::string(access.is_write ? "writes " : "reads ") +
                                    std::to_string(access.end - access.begin) + " bytes at " + to_string(region) +
                                    " which, with no barrier between, are " +
                                    (other.is_write ? "written by " : "read by ") +
                                    programs_.describe(other.rank, other.place));
  }
  log.push_back(access);
}

}  // namespace zeropg
