// The reader for untrusted headers. It accepts exactly the grammar that the format needs: an object of tensor objects
// and one object of strings.
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "backend/diagnostics/json_reader.h"
#include "sharding/checkpoint/safetensors.h"

namespace zeropg::safetensors {
namespace {

class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : json_(text, kLengthFieldBytes) {}

  Header read() {
    Header header;
    std::set<std::string> names;
    json_.read_object([&](std::string key) {
      check(names.insert(key).second, "the name '", key, "' stands twice");
      if (key == "__metadata__") {
        json_.read_object([&](std::string name) {
          std::string value = json_.read_string();
          check(header.metadata.emplace(std::move(name), std::move(value)).second, "a metadata key stands twice");
        });
      } else {
        header.tensors.push_back(read_tensor(std::move(key)));
      }
    });
    json_.finish();
    return header;
  }

 private:
  template <typename... Parts>
  void check(bool is_right, const Parts&... parts) const {
    if (!is_right) json_.fail(c10::str(parts...));
  }

  TensorEntry read_tensor(std::string name) {
    TensorEntry tensor;
    bool has_dtype = false, has_shape = false, has_offsets = false;
    json_.read_object([&](const std::string& key) {
      if (key == "dtype" && !std::exchange(has_dtype, true)) {
        const std::string dtype = json_.read_string();
        const auto known = dtype_from_name(dtype);
        check(known.has_value(), "'", name, "' has the dtype '", dtype, "', which is unknown or not supported");
        tensor.dtype = *known;
      } else if (key == "shape" && !std::exchange(has_shape, true)) {
        tensor.shape = read_integers();
      } else if (key == "data_offsets" && !std::exchange(has_offsets, true)) {
        const std::vector<int64_t> offsets = read_integers();
        check(offsets.size() == 2 && offsets[0] <= offsets[1], "'", name, "' has no valid data_offsets [begin, end]");
        tensor.begin = static_cast<uint64_t>(offsets[0]);
        tensor.end = static_cast<uint64_t>(offsets[1]);
      } else {
        check(false, "'", name, "' has an unknown or repeated key '", key, "'");
      }
    });
    check(has_dtype && has_shape && has_offsets, "'", name, "' lacks dtype, shape or data_offsets");
    const uint64_t bytes = tensor_bytes(tensor.shape, tensor.dtype);
    check(tensor.end - tensor.begin == bytes, "'", name, "' has ", tensor.end - tensor.begin,
          " bytes by its data_offsets and ", bytes, " by its shape");
    tensor.name = std::move(name);
    return tensor;
  }

  std::vector<int64_t> read_integers() {
    std::vector<int64_t> values;
    json_.read_array([&] { values.push_back(json_.read_integer()); });
    return values;
  }

  JsonReader json_;
};

Header read_header(std::string_view json) {
  try {
    return HeaderReader(json).read();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "safetensors header, ", error.what());
  }
}

}  // namespace

Header parse_header(std::span<const std::byte> head, uint64_t file_bytes) {
  TORCH_CHECK_VALUE(head.size() >= kLengthFieldBytes && file_bytes >= kLengthFieldBytes, "safetensors: the file has ",
                    std::min<uint64_t>(head.size(), file_bytes), " bytes, too few for a header");
  uint64_t json_bytes = 0;
  for (uint64_t byte = 0; byte < kLengthFieldBytes; ++byte) {
    json_bytes |= static_cast<uint64_t>(head[byte]) << (8 * byte);
  }
  TORCH_CHECK_VALUE(json_bytes <= kMaxHeaderBytes, "safetensors: the header claims ", json_bytes,
                    " bytes, the format allows ", kMaxHeaderBytes, "; this is not a safetensors file");
  TORCH_CHECK_VALUE(json_bytes <= file_bytes - kLengthFieldBytes && json_bytes <= head.size() - kLengthFieldBytes,
                    "safetensors: the header claims ", json_bytes, " bytes, the file ends before; it is truncated");

  const auto* text = reinterpret_cast<const char*>(head.data()) + kLengthFieldBytes;
  Header header = read_header({text, json_bytes});
  header.data_offset = kLengthFieldBytes + json_bytes;

  // Empty tensors share their offset with a neighbour, hence the second key.
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const TensorEntry& tensor : header.tensors) {
    TORCH_CHECK_VALUE(tensor.begin == end, "safetensors: '", tensor.name, "' begins at byte ", tensor.begin,
                      " of the data, expected ", end, "; the tensors overlap or leave a hole");
    end = tensor.end;
  }
  TORCH_CHECK_VALUE(end == file_bytes - header.data_offset, "safetensors: the tensors need ", end,
                    " bytes of data, the file has ", file_bytes - header.data_offset, "; it is truncated or damaged");
  return header;
}

Header parse_header(std::span<const std::byte> file) { return parse_header(file, file.size()); }

}  // namespace zeropg::safetensors
