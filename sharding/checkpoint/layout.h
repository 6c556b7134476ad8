// Which tensor stands in which file at which offset: a pure function of names, shapes, dtypes and the size limit, so
// every rank computes the same answer and writes its own byte ranges without asking anybody.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/safetensors.h"

namespace zeropg {

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct FileLayout {
  std::string name;    // "model.safetensors" or "model-00001-of-00003.safetensors"
  std::string header;  // stands at offset 0
  uint64_t bytes = 0;  // of the whole file
};

struct TensorPlace {
  int32_t file = 0;     // index into FileLayout
  uint64_t offset = 0;  // bytes from the start of the file
};

struct Layout {
  std::vector<FileLayout> files;
  std::vector<TensorPlace> places;  // one per TensorSpec, in their order
  uint64_t tensor_bytes = 0;        // headers excluded: the index's "total_size"
};

// Files are filled in the given order by Hugging Face's rule (huggingface_hub, split_state_dict_into_shards_factory): a
// file is closed when the next tensor would exceed `max_file_bytes`; a tensor larger than that gets a file of its own.
// Inside a file the tensors are ordered by descending element size, which keeps every tensor aligned to its elements.
Layout plan_layout(std::span<const TensorSpec> tensors, uint64_t max_file_bytes, const std::string& stem,
                   const safetensors::Metadata& metadata);

}  // namespace zeropg
