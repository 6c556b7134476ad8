// The safetensors format: u64 little-endian header size, JSON header, then the tensors' bytes without holes.
// Source: https://github.com/huggingface/safetensors#format. Everything that a header says is checked before it is
// used.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeropg::safetensors {

// The limit that the reference implementation enforces; a larger length field is an attack or garbage.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr uint64_t kLengthFieldBytes = 8;

struct TensorEntry {
  std::string name;  // UTF-8
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes, relative to the end of the header
  uint64_t end = 0;
};

using Metadata = std::map<std::string, std::string>;

struct Header {
  std::vector<TensorEntry> tensors;  // ordered by `begin`
  Metadata metadata;
  uint64_t data_offset = 0;  // length field and JSON: where the first tensor's bytes stand in the file
};

// The format's name of a dtype ("BF16"), or nothing where the format has none. A new dtype is one row in
// safetensors.cpp.
std::optional<std::string_view> dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_from_name(std::string_view name);

// Bytes of a tensor. ValueError when a size is negative or the product overflows.
uint64_t tensor_bytes(std::span<const int64_t> shape, c10::ScalarType dtype);

// Length field and JSON, padded with spaces to a multiple of 8 bytes. The tensors must follow each other without holes.
std::string build_header(std::span<const TensorEntry> tensors, const Metadata& metadata);

// Parses and validates the head of an untrusted file: `head` holds at least the length field and the JSON, `file_bytes`
// is the size of the whole file. ValueError says what is wrong and where. Never reads outside `head`, never allocates
// more than a small multiple of its size.
Header parse_header(std::span<const std::byte> head, uint64_t file_bytes);

// The same for a whole file in memory; the entry point for a fuzzer.
Header parse_header(std::span<const std::byte> file);

}  // namespace zeropg::safetensors
