// The way to another rank broke: it died, or left because it lost a third one.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

namespace zeropg {

class PeerLost final : public c10::DistNetworkError {
 public:
  PeerLost(c10::SourceLocation where, const std::string& text, int32_t rank)
      : DistNetworkError(where, text), rank_(rank) {}
  int32_t rank() const { return rank_; }

 private:
  int32_t rank_;
};

}  // namespace zeropg
