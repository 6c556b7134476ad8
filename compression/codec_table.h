// Which codec encodes a message of how many values: small ones may travel sooner as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "compression/compressor.h"

namespace zeropg {

struct CodecRow {
  int64_t from_numel = 0;                     // of the messages, up to the next row's
  std::shared_ptr<const Compressor> codec{};  // null: as they are
  bool has_error_feedback = false;
};

// The same on every rank.
class CodecTable {
 public:
  CodecTable() = default;  // nothing is encoded
  // `rows`: by from_numel, ascending.
  explicit CodecTable(std::vector<CodecRow> rows) : rows_(std::move(rows)) {}

  bool is_empty() const { return rows_.empty(); }
  CodecRow of(int64_t numel) const {
    CodecRow row;
    for (const CodecRow& each : rows_) {
      if (each.from_numel <= numel) row = each;
    }
    return row;
  }

 private:
  std::vector<CodecRow> rows_;
};

}  // namespace zeropg
