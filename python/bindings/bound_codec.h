// A codec in Python's hands; pybind11 holds no pointers to const.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "compression/codec_table.h"
#include "compression/compressor.h"

namespace zeropg {

struct BoundCodec {
  std::shared_ptr<const Compressor> codec;  // life shared with models and hooks
};

using PyCodecRow = std::tuple<int64_t, std::optional<BoundCodec>, bool>;  // as CodecRow

inline CodecTable codec_table(const std::vector<PyCodecRow>& rows) {
  std::vector<CodecRow> table;
  for (const auto& [from_numel, codec, has_error_feedback] : rows) {
    table.push_back({from_numel, codec ? codec->codec : nullptr, has_error_feedback});
  }
  return CodecTable(std::move(table));
}

}  // namespace zeropg
