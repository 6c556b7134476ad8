#include "backend/diagnostics/json_reader.h"

#include <charconv>
#include <stdexcept>

#include "backend/diagnostics/printable.h"

namespace zeropg {
namespace {

void append_utf8(std::string& text, uint32_t code) {
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

}  // namespace

void JsonReader::fail(const std::string& what) const {
  throw std::invalid_argument("byte " + std::to_string(first_byte_ + position_) + ": " + what);
}

void JsonReader::fail_here(const std::string& wanted) const {
  constexpr size_t kShown = 16;
  const std::string_view rest = json_.substr(position_, kShown);
  fail("expected " + wanted + ", found " + (rest.empty() ? "the end" : printable(rest, kShown)));
}

void JsonReader::skip_spaces() {
  while (position_ < json_.size() && std::string_view(" \t\r\n").find(json_[position_]) != std::string_view::npos) {
    ++position_;
  }
}

bool JsonReader::take(char wanted) {
  skip_spaces();
  if (position_ == json_.size() || json_[position_] != wanted) return false;
  ++position_;
  return true;
}

void JsonReader::expect(char wanted) {
  if (!take(wanted)) fail_here(std::string("'") + wanted + "'");
}

void JsonReader::finish() {
  skip_spaces();
  if (position_ != json_.size()) fail("there is text after the closing brace");
}

int64_t JsonReader::read_integer() {
  skip_spaces();
  const size_t begin = position_;
  int64_t value = 0;
  for (; position_ < json_.size() && json_[position_] >= '0' && json_[position_] <= '9'; ++position_) {
    if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
        __builtin_add_overflow(value, int64_t{json_[position_] - '0'}, &value)) {
      fail("a number is too large");
    }
  }
  const bool goes_on =
      position_ < json_.size() && std::string_view(".eE").find(json_[position_]) != std::string_view::npos;
  if (position_ == begin || goes_on || (json_[begin] == '0' && position_ != begin + 1)) {
    position_ = begin;
    fail_here("a non-negative integer");
  }
  return value;
}

double JsonReader::read_number() {
  skip_spaces();
  double value = 0;
  const auto [end, error] = std::from_chars(json_.data() + position_, json_.data() + json_.size(), value);
  const char first = position_ < json_.size() ? json_[position_] : '\0';
  if (error != std::errc() || (first != '-' && (first < '0' || first > '9'))) fail_here("a number");
  position_ = static_cast<size_t>(end - json_.data());
  return value;
}

std::string JsonReader::read_string() {
  expect('"');
  std::string text;
  while (true) {
    if (position_ == json_.size()) fail("a string does not end");
    const auto byte = static_cast<unsigned char>(json_[position_]);
    if (byte == '"') {
      ++position_;
      return text;
    }
    if (byte < 0x20) fail("a string holds a raw control character");
    if (byte == '\\') {
      ++position_;
      append_escape(text);
    } else {
      const size_t length = utf8_length(json_.substr(position_));
      if (length == 0) fail("a string is not valid UTF-8");
      text += json_.substr(position_, length);
      position_ += length;
    }
  }
}

void JsonReader::append_escape(std::string& text) {
  if (position_ == json_.size()) fail("a string does not end");
  const char kind = json_[position_++];
  constexpr std::string_view kKinds = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  if (const size_t index = kKinds.find(kind); index != std::string_view::npos) {
    text += kMeanings[index];
    return;
  }
  if (kind != 'u') fail(std::string("unknown escape '\\") + kind + "'");
  uint32_t code = read_hex4();
  if (code >= 0xd800 && code < 0xdc00) {
    if (json_.substr(position_, 2) != "\\u") fail("an escaped surrogate has no partner");
    position_ += 2;
    const uint32_t low = read_hex4();
    if (low < 0xdc00 || low >= 0xe000) fail("an escaped surrogate has no partner");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  } else if (code >= 0xdc00 && code < 0xe000) {
    fail("an escaped surrogate has no partner");
  }
  append_utf8(text, code);
}

uint32_t JsonReader::read_hex4() {
  uint32_t code = 0;
  for (int digit = 0; digit < 4; ++digit, ++position_) {
    const char c = position_ < json_.size() ? json_[position_] : '\0';
    constexpr std::string_view kDigits = "0123456789abcdef";
    const size_t value = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
    if (value == std::string_view::npos) fail("\\u needs four hexadecimal digits");
    code = code * 16 + static_cast<uint32_t>(value);
  }
  return code;
}

}  // namespace zeropg
