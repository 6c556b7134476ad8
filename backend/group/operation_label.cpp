#include "backend/group/operation_label.h"

#include <c10/util/StringUtil.h>

#include <cstring>

namespace zeropg {

const char* OperationLabel::name() const { return std::strchr(title, ':') + 1; }

std::string OperationLabel::prefix() const {
  std::string text = c10::str("[zeropg rank ", rank, "/", world_size, members, "] ", name());
  if (sequence > 0) {
    text += c10::str(" #", sequence);
  }
  if (route) {
    text += route->is_send ? " to " : " from ";
    text += route->is_from_anybody() ? std::string("any rank") : c10::str("rank ", route->peer);
    text += c10::str(" with tag ", route->tag);
  }
  if (bytes > 0) {
    text += c10::str(" (", bytes, " bytes)");
  }
  return text;
}

}  // namespace zeropg
