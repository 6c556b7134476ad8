// Sizes in whole units.
#pragma once

#include <cstdint>

namespace zeropg {

// `value` and `unit` are positive, their sum fits.
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace zeropg
