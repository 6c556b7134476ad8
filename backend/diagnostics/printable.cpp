#include "backend/diagnostics/printable.h"

#include <cstdint>

namespace zeropg {
namespace {

bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  const bool is_second_set = first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;  // U+0080 to U+009F
  return first < ' ' || first == 0x7f || is_second_set;
}

}  // namespace

size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t index) -> uint32_t {
    return index < text.size() ? static_cast<unsigned char>(text[index]) : 0;
  };
  const auto is_tail = [&](size_t index) { return (byte(index) & 0xc0) == 0x80; };
  const uint32_t first = byte(0), second = byte(1);
  if (text.empty()) return 0;
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return is_tail(1) ? 2 : 0;
  if (first >= 0xe0 && first < 0xf0) {
    const bool is_shortest = first != 0xe0 || second >= 0xa0;
    const bool is_surrogate = first == 0xed && second >= 0xa0;
    return is_shortest && !is_surrogate && is_tail(1) && is_tail(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first < 0xf5) {
    const bool is_in_range = (first != 0xf0 || second >= 0x90) && (first != 0xf4 || second < 0x90);
    return is_in_range && is_tail(1) && is_tail(2) && is_tail(3) ? 4 : 0;
  }
  return 0;
}

std::string printable(std::string_view text, size_t max_bytes) {
  text = text.substr(0, max_bytes);
  std::string safe;
  safe.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = utf8_length(text);
    const std::string_view character = text.substr(0, bytes == 0 ? 1 : bytes);
    if (bytes == 0 || is_control(character)) {
      safe.append(character.size(), ' ');
    } else {
      safe.append(character);
    }
    text.remove_prefix(character.size());
  }
  return safe;
}

}  // namespace zeropg
