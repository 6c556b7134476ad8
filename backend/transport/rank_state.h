// What a rank says of itself to the others of its group.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeropg {

enum class RankState : uint32_t {
  kJoining = 0,
  kAlive,
  kFailed,    // raised an error; its text goes with it
  kDeparted,  // left the group on purpose
};

// Longest error text that a rank tells its peers.
constexpr size_t kFailureBytes = 1020;

}  // namespace zeropg
