#include "backend/collectives/phases/domain_phases.h"

#include <algorithm>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kLargestFlatWorld = 16;

// The most bytes of a piece with which all fits a bank: the chunk, a rank's slices of it once more, widened, and a
// piece. Slices are rounded up, by less than `alignment` for each part. What of it is used at all should stay in the
// cache: of a chunk that is not reduced a rank has but its slices in its slot.
int64_t largest_piece_bytes(const CollectiveSpec& spec, int64_t alignment) {
  const int64_t widening = accumulator_widening(spec);
  const int64_t slices = part_count(spec.world_size, smallest_domain_size(spec));
  const int64_t rounding = static_cast<int64_t>(spec.domains.size()) * alignment;
  const auto pieces_in = [&](int64_t bytes, int64_t count) { return std::max<int64_t>(0, bytes) / count; };
  const int64_t all = spec.world_size + widening * slices + 1;
  const int64_t fitting = pieces_in(spec.bank_bytes - widening * rounding, all);
  const int64_t cached = traits_of(spec.op).is_reducing ? pieces_in(kChunkBytes - widening * rounding, all)
                                                        : pieces_in(kChunkBytes - rounding, slices + 1);
  return std::min(fitting, cached) / alignment * alignment;
}

DomainPieces largest_pieces(const CollectiveSpec& spec) {
  const int64_t bytes = largest_piece_bytes(spec, kCacheLineBytes);
  if (bytes > 0) return {kCacheLineBytes, {.bytes = bytes}};
  const int64_t alignment = std::max(spec.element_bytes, spec.accumulator_bytes);  // of partial sums too
  return {alignment, {.bytes = largest_piece_bytes(spec, alignment)}};
}

// Of an extent, the bytes at places from `begin` to `end`.
StepBytes bytes_between(const Extent& extent, int64_t begin, int64_t end) {
  const int64_t before = begin - extent.places.offset_bytes;
  return {end - begin, std::clamp<int64_t>(extent.last_bytes - before, 0, end - begin)};
}

}  // namespace

int64_t accumulator_widening(const CollectiveSpec& spec) {
  if (!traits_of(spec.op).is_reducing) return 0;
  return spec.accumulator_bytes == 0 ? 1 : spec.accumulator_bytes / spec.element_bytes;
}

bool can_use_domains(const CollectiveSpec& spec) {
  return spec.codec == nullptr && is_one_node(spec) && spec.domains.size() > 1 && spec.world_size > kLargestFlatWorld &&
         largest_pieces(spec).chunks.bytes > 0;
}

DomainPieces cut_over_domains(const CollectiveSpec& spec) {
  DomainPieces pieces = largest_pieces(spec);
  const int64_t world_size = spec.world_size;
  pieces.chunks = equal_chunks(spec.bytes, world_size * pieces.chunks.bytes, world_size * pieces.alignment);
  pieces.chunks.bytes /= world_size;
  return pieces;
}

DomainPieces cut_blocks_over_domains(const CollectiveSpec& spec) {
  DomainPieces pieces = largest_pieces(spec);
  pieces.chunks = equal_chunks(spec.bytes, pieces.chunks.bytes, pieces.alignment);
  return pieces;
}

DomainPhases::DomainPhases(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout)
    : spec_(spec), placement_(placement), layout_(layout), widening_(accumulator_widening(spec)) {
  int64_t most = 0;
  for (int32_t domain = 0; domain < placement.node_count(); ++domain) {
    slices_before_.emplace_back();
    int64_t bytes = 0;
    for (int32_t part = 0; part < layout.part_count(); ++part) {
      slices_before_.back().push_back(bytes);
      bytes += layout.slice(part, domain, 0).bytes;  // the first one is the longest
    }
    most = std::max(most, bytes);
  }
  const Range last = layout.part(layout.part_count() - 1);
  partials_begin_ = last.offset_bytes + last.bytes;
  completed_begin_ = partials_begin_ + widening_ * most;
}

Region DomainPhases::partial(int32_t part, int64_t place) const {
  return partial_of(placement_.node(), placement_.local_rank(), part, place);
}

Region DomainPhases::completed(int64_t place) const {
  return completed_of(placement_.node(), placement_.local_rank(), place);
}

Region DomainPhases::partial_of(int32_t domain, int32_t local_rank, int32_t part, int64_t place) const {
  const int64_t offset = slices_before_[domain][part] + place - layout_.slice(part, domain, local_rank).offset_bytes;
  return staging(placement_.rank_at(domain, local_rank), 0, partials_begin_ + widening_ * offset);
}

Region DomainPhases::completed_of(int32_t domain, int32_t local_rank, int64_t place) const {
  const int64_t offset = place - layout_.slice(domain, domain, local_rank).offset_bytes;
  return staging(placement_.rank_at(domain, local_rank), 0, completed_begin_ + offset);
}

int32_t DomainPhases::owner_at(int32_t part, int32_t domain, int64_t place) const {
  const Range first = layout_.slice(part, domain, 0);
  return static_cast<int32_t>((place - first.offset_bytes) / first.bytes);
}

void DomainPhases::complete(PipelineStage stage, const std::vector<Extent>& extents,
                            const RegionOfPlace& destination) const {
  const int32_t part = placement_.node();
  std::vector<Region> sources(placement_.node_count());
  for (const Extent& extent : cut(extents, layout_.own_slice(part))) {
    const int64_t end = extent.places.offset_bytes + extent.places.bytes;
    int64_t next = end;
    for (int64_t place = extent.places.offset_bytes; place < end; place = next) {
      next = end;
      for (int32_t domain = 0; domain < placement_.node_count(); ++domain) {
        const int32_t owner = owner_at(part, domain, place);
        const Range slice = layout_.slice(part, domain, owner);
        sources[domain] = partial_of(domain, owner, part, place);
        next = std::min(next, slice.offset_bytes + slice.bytes);
      }
      add_reduce(stage, destination(place), sources, bytes_between(extent, place, next), ReduceScope::kOfDomains);
    }
  }
}

void DomainPhases::fetch(PipelineStage stage, const std::vector<Extent>& extents) const {
  // Behind the own one first: so no domain is read by all at once.
  for (int32_t distance = 1; distance <= placement_.node_count(); ++distance) {
    const int32_t domain = (placement_.node() + distance) % placement_.node_count();
    for (const Extent& extent : cut(extents, layout_.own_slice(domain))) {
      const int64_t end = extent.places.offset_bytes + extent.places.bytes;
      int64_t next = end;
      for (int64_t place = extent.places.offset_bytes; place < end; place = next) {
        const int32_t owner = owner_at(domain, domain, place);
        const Range piece = layout_.slice(domain, domain, owner);
        next = std::min(end, piece.offset_bytes + piece.bytes);
        add_copy(stage, staging(spec_.rank, 0, place), completed_of(domain, owner, place),
                 bytes_between(extent, place, next));
      }
    }
  }
}

}  // namespace zeropg
