// Numbers in the names of codecs.
#pragma once

#include <charconv>
#include <string>

namespace zeropg {

// The fewest digits that mean this number and no other, as Python writes it.
inline std::string shortest_decimal(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), number).ptr};
}

}  // namespace zeropg
