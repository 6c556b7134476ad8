// The reader for untrusted headers. It accepts exactly the grammar that the format needs (an object of tensor objects
// and one object of strings), so it needs no general JSON value, no recursion and no depth limit.
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <utility>

#include "backend/diagnostics/printable.h"
#include "sharding/checkpoint/safetensors.h"

namespace zeropg::safetensors {
namespace {

class HeaderReader {
 public:
  explicit HeaderReader(std::string_view json) : json_(json) {}

  Header read() {
    Header header;
    std::set<std::string> names;
    read_object([&](std::string key) {
      check(names.insert(key).second, "the name '", key, "' stands twice");
      if (key == "__metadata__") {
        read_object([&](std::string name) {
          std::string value = read_string();
          check(header.metadata.emplace(std::move(name), std::move(value)).second, "a metadata key stands twice");
        });
      } else {
        header.tensors.push_back(read_tensor(std::move(key)));
      }
    });
    skip_spaces();
    check(position_ == json_.size(), "there is text after the closing brace");
    return header;
  }

 private:
  template <typename... Parts>
  void check(bool is_right, const Parts&... parts) const {
    TORCH_CHECK_VALUE(is_right, "safetensors header, byte ", kLengthFieldBytes + position_, ": ", parts...);
  }

  void skip_spaces() {
    while (position_ < json_.size() && std::string_view(" \t\r\n").find(json_[position_]) != std::string_view::npos) {
      ++position_;
    }
  }

  bool take(char wanted) {
    skip_spaces();
    if (position_ == json_.size() || json_[position_] != wanted) return false;
    ++position_;
    return true;
  }

  void expect(char wanted) { check(take(wanted), "expected '", wanted, "'"); }

  // `read_value(key)` consumes the value.
  template <typename ReadValue>
  void read_object(ReadValue read_value) {
    expect('{');
    if (take('}')) return;
    do {
      std::string key = read_string();
      expect(':');
      read_value(std::move(key));
    } while (take(','));
    expect('}');
  }

  TensorEntry read_tensor(std::string name) {
    TensorEntry tensor;
    bool has_dtype = false, has_shape = false, has_offsets = false;
    read_object([&](const std::string& key) {
      if (key == "dtype" && !std::exchange(has_dtype, true)) {
        const std::string dtype = read_string();
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
    expect('[');
    if (take(']')) return values;
    do {
      values.push_back(read_integer());
    } while (take(','));
    expect(']');
    return values;
  }

  int64_t read_integer() {
    skip_spaces();
    const size_t begin = position_;
    int64_t value = 0;
    for (; position_ < json_.size() && json_[position_] >= '0' && json_[position_] <= '9'; ++position_) {
      check(!__builtin_mul_overflow(value, int64_t{10}, &value) &&
                !__builtin_add_overflow(value, int64_t{json_[position_] - '0'}, &value),
            "a number is too large");
    }
    check(position_ > begin && (json_[begin] != '0' || position_ == begin + 1), "expected a non-negative integer");
    return value;
  }

  std::string read_string() {
    expect('"');
    std::string text;
    while (true) {
      check(position_ < json_.size(), "a string does not end");
      const auto byte = static_cast<unsigned char>(json_[position_]);
      if (byte == '"') {
        ++position_;
        return text;
      }
      check(byte >= 0x20, "a string holds a raw control character");
      if (byte == '\\') {
        ++position_;
        append_escape(text);
      } else {
        const size_t length = utf8_length(json_.substr(position_));
        check(length > 0, "a string is not valid UTF-8");
        text += json_.substr(position_, length);
        position_ += length;
      }
    }
  }

  void append_escape(std::string& text) {
    check(position_ < json_.size(), "a string does not end");
    const char kind = json_[position_++];
    constexpr std::string_view kKinds = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t index = kKinds.find(kind); index != std::string_view::npos) {
      text += kMeanings[index];
      return;
    }
    check(kind == 'u', "unknown escape '\\", kind, "'");
    uint32_t code = read_hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      check(json_.substr(position_, 2) == "\\u", "an escaped surrogate has no partner");
      position_ += 2;
      const uint32_t low = read_hex4();
      check(low >= 0xdc00 && low < 0xe000, "an escaped surrogate has no partner");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else {
      check(code < 0xdc00 || code >= 0xe000, "an escaped surrogate has no partner");
    }
    append_utf8(text, code);
  }

  uint32_t read_hex4() {
    uint32_t code = 0;
    for (int digit = 0; digit < 4; ++digit, ++position_) {
      const char c = position_ < json_.size() ? json_[position_] : '\0';
      constexpr std::string_view kDigits = "0123456789abcdef";
      const size_t value = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
      check(value != std::string_view::npos, "\\u needs four hexadecimal digits");
      code = code * 16 + static_cast<uint32_t>(value);
    }
    return code;
  }

  static void append_utf8(std::string& text, uint32_t code) {
    const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | code >> 6);
      put(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      put(0xe0 | code >> 12);
      put(0x80 | (code >> 6 & 0x3f));
      put(0x80 | (code & 0x3f));
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
      put(0x80 | (code >> 6 & 0x3f));
      put(0x80 | (code & 0x3f));
    }
  }

  std::string_view json_;
  size_t position_ = 0;
};

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
  Header header = HeaderReader(std::string_view(text, json_bytes)).read();
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
