// A codec in Python's hands; pybind11 holds no pointers to const.
#pragma once

#include <memory>

#include "compression/metered.h"

namespace zeropg {

struct BoundCodec {
  std::shared_ptr<const Metered> codec;  // life shared with models and hooks
};

}  // namespace zeropg
