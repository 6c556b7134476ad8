// How an operation is called in errors, statistics and traces.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zeropg {

// Whom a message goes to or comes from.
struct MessageRoute {
  static constexpr int32_t kAnySource = -1;

  bool is_send = false;
  int32_t peer = 0;  // of a receive also kAnySource
  int32_t tag = 0;

  bool is_from_anybody() const { return peer == kAnySource; }
};

struct OperationLabel {
  int32_t rank = 0;
  int32_t world_size = 1;
  const char* members = "";                // of describe_members
  const char* title = "zeropg:operation";  // a literal: the profiler keeps the pointer
  uint64_t sequence = 0;                   // of the group's collectives, or of this rank's messages; 0: not counted yet
  int64_t bytes = 0;
  std::optional<MessageRoute> route{};  // of a message

  const char* name() const;  // the title without "zeropg:"
  // "[zeropg rank 3/8] reduce_scatter #41 (4096 bytes)"; of a message "... recv #7 from rank 1 with tag 0 (4096
  // bytes)". Of a group that is not the world "[zeropg rank 0/2 of global ranks 1, 3] ..."; other ranks in an error are
  // the group's, too.
  std::string prefix() const;
};

}  // namespace zeropg
