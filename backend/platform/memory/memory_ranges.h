// Which memory tensors occupy, to find those that overlap.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

namespace zeropg {

class MemoryRanges {
 public:
  // Contiguous tensors.
  void add(const at::Tensor& tensor);
  bool overlaps(const at::Tensor& tensor) const;  // with any that was added

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // by beginning; none overlaps another
};

}  // namespace zeropg
