// The format: what build_header writes, what parse_header refuses.
#include "sharding/checkpoint/safetensors.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace zeropg::safetensors {
namespace {

using c10::ScalarType;

std::span<const std::byte> as_bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A whole file: length field, this JSON, `data_bytes` zeros.
std::string file_with(const std::string& json, size_t data_bytes) {
  std::string file(8, '\0');
  for (int byte = 0; byte < 8; ++byte) file[byte] = static_cast<char>(json.size() >> (8 * byte) & 0xff);
  return file + json + std::string(data_bytes, '\0');
}

void expect_refused(const std::string& file, const std::string& words) {
  try {
    parse_header(as_bytes(file));
    FAIL() << "accepted, expected: " << words;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

void expect_refused_json(const std::string& json, size_t data_bytes, const std::string& words) {
  expect_refused(file_with(json, data_bytes), words);
}

TEST(Safetensors, header_has_the_bytes_of_the_format) {
  const std::vector<TensorEntry> tensors = {{"a", ScalarType::BFloat16, {2, 3}, 0, 12},
                                            {"b", ScalarType::Bool, {}, 12, 13}};
  const std::string header = build_header(tensors, {{"format", "pt"}});
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
      R"("b":{"dtype":"BOOL","shape":[],"data_offsets":[12,13]}})";
  EXPECT_EQ(header.size() % 8, 0u);
  EXPECT_EQ(header.substr(8, json.size()), json);
  EXPECT_EQ(header.find_first_not_of(' ', 8 + json.size()), std::string::npos);
  uint64_t length = 0;
  std::memcpy(&length, header.data(), 8);
  EXPECT_EQ(length, header.size() - 8);
}

TEST(Safetensors, built_headers_parse_back) {
  const std::vector<std::string> names = {
      "plain", "quo\"te", "back\\slash", std::string("nul\0tab\t", 8), "h\xc3\xa4\xf0\x9f\x98\x80", ""};
  std::vector<TensorEntry> tensors;
  uint64_t end = 0;
  for (const std::string& name : names) {
    tensors.push_back(
        {name, ScalarType::Float, {static_cast<int64_t>(tensors.size()), 2}, end, end + 8 * tensors.size()});
    end = tensors.back().end;
  }
  const std::string file = build_header(tensors, {{"k\"", "v\n"}}) + std::string(end, 'x');
  const Header header = parse_header(as_bytes(file));
  EXPECT_EQ(header.data_offset + end, file.size());
  EXPECT_EQ(header.metadata, (Metadata{{"k\"", "v\n"}}));
  ASSERT_EQ(header.tensors.size(), tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    EXPECT_EQ(header.tensors[index].name, tensors[index].name);
    EXPECT_EQ(header.tensors[index].shape, tensors[index].shape);
    EXPECT_EQ(header.tensors[index].begin, tensors[index].begin);
  }
}

TEST(Safetensors, every_dtype_goes_both_ways) {
  for (const char* name : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "I64", "I32", "I16", "I8", "U64",
                           "U32", "U16", "U8", "BOOL"}) {
    const auto dtype = dtype_from_name(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(dtype_name(*dtype), name);
  }
  EXPECT_FALSE(dtype_from_name("F4"));
  EXPECT_FALSE(dtype_name(ScalarType::ComplexDouble));
}

TEST(Safetensors, build_refuses_what_the_format_cannot_hold) {
  const auto build = [](std::vector<TensorEntry> tensors) { return build_header(tensors, {}); };
  EXPECT_THROW(build({{"a", ScalarType::Byte, {1}, 0, 1}, {"a", ScalarType::Byte, {1}, 1, 2}}), c10::ValueError);
  EXPECT_THROW(build({{"__metadata__", ScalarType::Byte, {1}, 0, 1}}), c10::ValueError);
  EXPECT_THROW(build({{"a", ScalarType::ComplexDouble, {1}, 0, 16}}), c10::ValueError);
  EXPECT_THROW(build({{"a", ScalarType::Byte, {1}, 1, 2}}), c10::Error);
}

TEST(Safetensors, parse_accepts_escapes_spaces_and_any_key_order) {
  const std::string json =
      " {\n\"\\u0061\\ud83d\\ude00\\n\" : { \"shape\" : [ 2 , 0 ] , \"data_offsets\":[0,0],\"dtype\":\"F32\" } ,"
      "\"b\":{\"data_offsets\":[0,2],\"shape\":[],\"dtype\":\"F16\"}, \"__metadata__\": { } } \t";
  const Header header = parse_header(as_bytes(file_with(json, 2)));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a\xf0\x9f\x98\x80\n");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{2, 0}));
}

TEST(Safetensors, parse_never_trusts_a_length) {
  expect_refused("", "too few for a header");
  expect_refused("1234567", "too few for a header");
  expect_refused(std::string(8, '\xff'), "not a safetensors file");
  expect_refused(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10), "not a safetensors file");
  expect_refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "truncated");
  expect_refused(std::string(8, '\0'), "expected '{'");
  // Only the head is here, but the file is said to be shorter or longer than the tensors.
  const std::string file = file_with(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  EXPECT_NO_THROW(parse_header(as_bytes(file.substr(0, file.size() - 4)), file.size()));
  EXPECT_THROW(parse_header(as_bytes(file), file.size() - 1), c10::ValueError);
  EXPECT_THROW(parse_header(as_bytes(file), file.size() + 1), c10::ValueError);
}

TEST(Safetensors, parse_refuses_wrong_offsets_shapes_and_dtypes) {
  const auto tensor = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
           offsets + "]}";
  };
  const auto one = [&](const char* dtype, const char* shape, const char* offsets) {
    return "{" + tensor("a", dtype, shape, offsets) + "}";
  };
  expect_refused_json(one("U8", "4", "0,5"), 5, "has 5 bytes by its data_offsets and 4 by its shape");
  expect_refused_json(one("U8", "4", "1,5"), 5, "overlap or leave a hole");
  expect_refused_json(one("U8", "4", "4,0"), 4, "no valid data_offsets");
  expect_refused_json(one("U8", "4", "0"), 4, "no valid data_offsets");
  expect_refused_json(one("U8", "4", "-1,3"), 4, "non-negative integer");
  expect_refused_json(one("U8", "4.0", "0,4"), 4, "expected a non-negative integer, found 4.0]");
  expect_refused_json(one("U8", "04", "0,4"), 4, "non-negative integer");
  expect_refused_json(one("U8", "99999999999999999999", "0,4"), 4, "too large");
  expect_refused_json(one("F64", "4294967296,4294967296", "0,0"), 0, "overflow");
  expect_refused_json(one("F64", "0,4294967296,4294967296", "0,0"), 0, "overflow");
  expect_refused_json(one("F4", "2", "0,1"), 1, "unknown or not supported");
  expect_refused_json("{" + tensor("a", "U8", "4", "0,4") + "," + tensor("b", "U8", "4", "2,6") + "}", 6, "overlap");
  expect_refused_json("{" + tensor("a", "U8", "4", "0,4") + "," + tensor("b", "U8", "4", "0,4") + "}", 4, "overlap");
  expect_refused_json("{" + tensor("a", "U8", "1", "0,1") + "," + tensor("a", "U8", "1", "1,2") + "}", 2,
                      "stands twice");
  expect_refused_json("{}", 1, "need 0 bytes");
  expect_refused_json(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "lacks");
  expect_refused_json(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "repeated");
  expect_refused_json(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1, "unknown or repeated");
}

TEST(Safetensors, parse_refuses_broken_json) {
  for (const char* json :
       {"", "[]", "{", "{\"a", "{\"a\"", "{\"a\":", "{\"a\":{", "{,}", "{}x", "{\"__metadata__\":{\"a\":1}}", "null",
        "{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", "{\"__metadata__\":{},\"__metadata__\":{}}"}) {
    EXPECT_THROW(parse_header(as_bytes(file_with(json, 0))), c10::ValueError) << json;
  }
  for (const char* name : {"\\x", "\\u12g4", "\\ud800", "\\ud800\\u0041", "\\udc00", "\x01", "\xff", "\xc0\x80",
                           "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc3", "\xe2\x82"}) {
    const std::string json = std::string("{\"") + name + "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}";
    EXPECT_THROW(parse_header(as_bytes(file_with(json, 0))), c10::ValueError) << json;
  }
}

TEST(Safetensors, parse_survives_random_damage) {
  const std::vector<TensorEntry> tensors = {{"a.weight", ScalarType::BFloat16, {2, 3}, 0, 12},
                                            {"b", ScalarType::Float, {1}, 12, 16}};
  const std::string good = build_header(tensors, {{"format", "pt"}}) + std::string(16, 'x');
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bad = good;
    for (uint32_t change = 0; change <= random() % 3; ++change)
      bad[random() % (bad.size() - 16)] = static_cast<char>(random());
    if (random() % 4 == 0) bad.resize(random() % bad.size());
    try {
      const Header header = parse_header(as_bytes(bad));
      ++accepted;  // e.g. another letter in a name
      for (const TensorEntry& tensor : header.tensors) ASSERT_LE(header.data_offset + tensor.end, bad.size());
    } catch (const c10::ValueError&) {
    }
  }
  EXPECT_LT(accepted, 20000);
}

}  // namespace
}  // namespace zeropg::safetensors
