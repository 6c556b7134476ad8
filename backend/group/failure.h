// What ended an operation, and with it its group (Note [Failure] in group_context.h), as a record: nobody reads its
// text but people.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

#include "backend/group/operation_label.h"

namespace zeropg {

enum class FailureKind : uint8_t {
  kHere,     // this rank found out: different calls, a peer that is gone, damaged memory
  kTimeout,  // this rank waited until the deadline
  kPeer,     // another rank failed before
};

struct Failure {
  FailureKind kind = FailureKind::kHere;
  std::string text;        // whole: rank, operation, what happened
  std::string cause{};     // kPeer: the text of the rank that failed first
  bool is_wanted = false;  // the program has ended the group: no flight recorder is dumped

  // What other ranks are told: a failure travels, each puts its own operation in front, and only the first is news.
  const std::string& news() const { return kind == FailureKind::kPeer ? cause : text; }
};

// An error that is a group's failure already, or is to become it: it names its operation.
class OperationError final : public c10::DistBackendError {
 public:
  OperationError(c10::SourceLocation where, Failure failure)
      : DistBackendError(where, failure.text), failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// Throws one. The text behind the operation's prefix.
template <typename... Text>
[[noreturn]] void fail_operation(const OperationLabel& label, const Text&... text) {
  throw OperationError({__func__, __FILE__, __LINE__}, {.text = c10::str(label.prefix(), ": ", text...)});
}

}  // namespace zeropg
