#include "backend/platform/memory/memory_ranges.h"

#include <algorithm>
#include <iterator>

namespace zeropg {

namespace {

uintptr_t begin_of(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); }

}  // namespace

void MemoryRanges::add(const at::Tensor& tensor) {
  if (tensor.nbytes() == 0) return;
  uintptr_t begin = begin_of(tensor);
  uintptr_t end = begin + tensor.nbytes();
  auto next = ends_.lower_bound(begin);
  if (next != ends_.begin() && std::prev(next)->second > begin) --next;
  while (next != ends_.end() && next->first < end) {
    begin = std::min(begin, next->first);
    end = std::max(end, next->second);
    next = ends_.erase(next);
  }
  ends_.emplace(begin, end);
}

bool MemoryRanges::overlaps(const at::Tensor& tensor) const {
  if (tensor.nbytes() == 0) return false;
  const uintptr_t begin = begin_of(tensor);
  const auto next = ends_.lower_bound(begin + tensor.nbytes());
  return next != ends_.begin() && std::prev(next)->second > begin;
}

}  // namespace zeropg
