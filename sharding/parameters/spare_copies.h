// Memory for copies of parameters. What was given up serves the next copy of its size: fresh pages cost 6 to 10 times
// warm ones.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <map>
#include <utility>

namespace zeropg {

class SpareCopies {
 public:
  // A copy of `bytes` from `source`, in memory of `device`. Nothing goes through the dispatcher.
  c10::Storage copy(const void* source, size_t bytes, c10::DeviceType device) {
    c10::Allocator* allocator = c10::GetAllocator(device);
    const auto spare = spares_.find(bytes);
    if (spare == spares_.end()) {
      return {c10::Storage::use_byte_size_t(), bytes, allocator->clone(source, bytes), allocator, /*resizable=*/false};
    }
    c10::Storage copy = std::move(spares_.extract(spare).mapped());
    allocator->copy_data(copy.mutable_data(), source, bytes);
    return copy;
  }

  // `copy`, which may be empty and is afterwards.
  void give_up(c10::Storage& copy) {
    if (copy) {
      const size_t bytes = copy.nbytes();
      spares_.emplace(bytes, std::exchange(copy, c10::Storage()));
    }
  }

 private:
  std::multimap<size_t, c10::Storage> spares_;  // by bytes
};

}  // namespace zeropg
