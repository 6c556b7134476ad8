#include "sharding/checkpoint/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace zeropg::safetensors {
namespace {

using c10::ScalarType;

constexpr std::array<std::pair<ScalarType, std::string_view>, 16> kDtypes = {{
    {ScalarType::Double, "F64"},
    {ScalarType::Float, "F32"},
    {ScalarType::Half, "F16"},
    {ScalarType::BFloat16, "BF16"},
    {ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {ScalarType::Float8_e5m2, "F8_E5M2"},
    {ScalarType::ComplexFloat, "C64"},
    {ScalarType::Long, "I64"},
    {ScalarType::Int, "I32"},
    {ScalarType::Short, "I16"},
    {ScalarType::Char, "I8"},
    {ScalarType::UInt64, "U64"},
    {ScalarType::UInt32, "U32"},
    {ScalarType::UInt16, "U16"},
    {ScalarType::Byte, "U8"},
    {ScalarType::Bool, "BOOL"},
}};

void append_json_string(std::string& json, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  json += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (byte < 0x20) {
      json += "\\u00";
      json += kHex[byte >> 4];
      json += kHex[byte & 15];
    } else {
      json += c;
    }
  }
  json += '"';
}

void append_tensor(std::string& json, const TensorEntry& tensor, std::string_view dtype) {
  append_json_string(json, tensor.name);
  json += ":{\"dtype\":\"";
  json += dtype;
  json += "\",\"shape\":[";
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    if (axis > 0) json += ',';
    json += std::to_string(tensor.shape[axis]);
  }
  json += "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
}

void append_metadata(std::string& json, const Metadata& metadata) {
  json += "\"__metadata__\":{";
  for (auto entry = metadata.begin(); entry != metadata.end(); ++entry) {
    if (entry != metadata.begin()) json += ',';
    append_json_string(json, entry->first);
    json += ':';
    append_json_string(json, entry->second);
  }
  json += '}';
}

}  // namespace

std::optional<std::string_view> dtype_name(ScalarType dtype) {
  const auto row = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.first == dtype; });
  if (row == kDtypes.end()) return std::nullopt;
  return row->second;
}

std::optional<ScalarType> dtype_from_name(std::string_view name) {
  const auto row = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.second == name; });
  if (row == kDtypes.end()) return std::nullopt;
  return row->first;
}

uint64_t tensor_bytes(std::span<const int64_t> shape, ScalarType dtype) {
  uint64_t bytes = c10::elementSize(dtype);
  bool is_empty = false;
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0, "safetensors: a tensor has a negative size ", size);
    is_empty = is_empty || size == 0;
    // The product of the other sizes is bounded too: a reader may multiply them in another order.
    if (size > 0) {
      TORCH_CHECK_VALUE(!__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) && bytes <= INT64_MAX,
                        "safetensors: a tensor's sizes overflow 63 bits of bytes");
    }
  }
  return is_empty ? 0 : bytes;
}

std::string build_header(std::span<const TensorEntry> tensors, const Metadata& metadata) {
  std::string json = "{";
  if (!metadata.empty()) append_metadata(json, metadata);
  std::set<std::string_view> names = {"__metadata__"};
  uint64_t end = 0;
  for (const TensorEntry& tensor : tensors) {
    const auto dtype = dtype_name(tensor.dtype);
    TORCH_CHECK_VALUE(dtype, "safetensors: '", tensor.name, "' is ", tensor.dtype, ", which the format cannot hold");
    TORCH_CHECK_VALUE(names.insert(tensor.name).second, "safetensors: the tensor name '", tensor.name,
                      "' is used twice or reserved");
    TORCH_INTERNAL_ASSERT(tensor.begin == end && tensor.end - end == tensor_bytes(tensor.shape, tensor.dtype),
                          "hole before or wrong size of '", tensor.name, "'");
    end = tensor.end;
    if (json.size() > 1) json += ',';
    append_tensor(json, tensor, *dtype);
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  TORCH_CHECK_VALUE(json.size() <= kMaxHeaderBytes, "safetensors: the header of ", tensors.size(), " tensors has ",
                    json.size(), " bytes, the format allows ", kMaxHeaderBytes, "; choose a smaller max_shard_size");

  std::string header;
  header.reserve(kLengthFieldBytes + json.size());
  for (uint64_t byte = 0; byte < kLengthFieldBytes; ++byte) {
    header += static_cast<char>((json.size() >> (8 * byte)) & 0xff);
  }
  return header + json;
}

}  // namespace zeropg::safetensors
