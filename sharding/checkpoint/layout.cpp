#include "sharding/checkpoint/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>

namespace zeropg {
namespace {

using Group = std::vector<size_t>;  // indices of the tensors that share a file

std::vector<Group> split_by_size(std::span<const uint64_t> bytes, uint64_t max_file_bytes) {
  std::vector<Group> groups;
  Group current;
  uint64_t current_bytes = 0;
  for (size_t index = 0; index < bytes.size(); ++index) {
    if (bytes[index] > max_file_bytes) {
      groups.push_back({index});
      continue;
    }
    if (bytes[index] > max_file_bytes - current_bytes) {
      groups.push_back(std::move(current));
      current.clear();
      current_bytes = 0;
    }
    current.push_back(index);
    current_bytes += bytes[index];
  }
  // A model without tensors still makes one (empty) file.
  if (!current.empty() || groups.empty()) groups.push_back(std::move(current));
  return groups;
}

std::string file_name(const std::string& stem, size_t index, size_t count) {
  if (count == 1) return stem + ".safetensors";
  char suffix[64];
  std::snprintf(suffix, sizeof(suffix), "-%05zu-of-%05zu.safetensors", index + 1, count);
  return stem + suffix;
}

}  // namespace

Layout plan_layout(std::span<const TensorSpec> tensors, uint64_t max_file_bytes, const std::string& stem,
                   const safetensors::Metadata& metadata) {
  TORCH_CHECK_VALUE(max_file_bytes > 0, "the largest file size must be positive");
  Layout layout;
  layout.places.resize(tensors.size());
  std::vector<uint64_t> bytes;
  for (const TensorSpec& tensor : tensors) {
    bytes.push_back(safetensors::tensor_bytes(tensor.shape, tensor.dtype));
    TORCH_CHECK_VALUE(!__builtin_add_overflow(layout.tensor_bytes, bytes.back(), &layout.tensor_bytes),
                      "the tensors' sizes overflow");
  }

  std::vector<Group> groups = split_by_size(bytes, max_file_bytes);
  for (size_t file = 0; file < groups.size(); ++file) {
    Group& group = groups[file];
    std::stable_sort(group.begin(), group.end(), [&](size_t a, size_t b) {
      return c10::elementSize(tensors[a].dtype) > c10::elementSize(tensors[b].dtype);
    });
    std::vector<safetensors::TensorEntry> entries;
    uint64_t end = 0;
    for (const size_t index : group) {
      entries.push_back({tensors[index].name, tensors[index].dtype, tensors[index].shape, end, end + bytes[index]});
      end += bytes[index];
    }
    std::string header = safetensors::build_header(entries, metadata);
    for (size_t member = 0; member < group.size(); ++member) {
      layout.places[group[member]] = {static_cast<int32_t>(file), header.size() + entries[member].begin};
    }
    const uint64_t file_bytes = header.size() + end;
    layout.files.push_back({file_name(stem, file, groups.size()), std::move(header), file_bytes});
  }
  return layout;
}

}  // namespace zeropg
