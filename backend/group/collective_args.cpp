#include "backend/group/collective_args.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <numeric>

namespace zeropg {

int64_t counted_bytes(const CollectiveArgs& request) {
  return std::accumulate(request.send_bytes.begin(), request.send_bytes.end(), request.bytes);
}

const char* OperationLabel::name() const { return std::strchr(title, ':') + 1; }

std::string OperationLabel::prefix() const {
  std::string text = c10::str("[zeropg rank ", rank, "/", world_size, "] ", name());
  if (sequence > 0) {
    text += c10::str(" #", sequence);
  }
  if (route) {
    text += route->is_send ? " to " : " from ";
    text += route->peer < 0 ? std::string("any rank") : c10::str("rank ", route->peer);
    text += c10::str(" with tag ", route->tag);
  }
  if (bytes > 0) {
    text += c10::str(" (", bytes, " bytes)");
  }
  return text;
}

}  // namespace zeropg
