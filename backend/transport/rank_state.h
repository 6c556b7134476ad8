// What a rank says of itself to the others of its group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zeropg {

enum class RankState : uint32_t {
  kJoining = 0,
  kAlive,
  kFailed,    // raised an error; its text goes with it
  kDeparted,  // left the group on purpose
};

// Longest error text that a rank tells its peers.
constexpr size_t kFailureBytes = 1020;

// A peer's bytes end up in logs and terminals: control characters become blanks, the rest is cut.
inline std::string printable(std::string_view text) {
  std::string safe(text.substr(0, kFailureBytes));
  for (char& c : safe) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = ' ';
  }
  return safe;
}

}  // namespace zeropg
