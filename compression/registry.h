// All compressors by name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "compression/compressor.h"

namespace zeropg {

// What a compressor is made from, e.g. {"bits": 4, "block": 256}.
using CompressorParameters = std::map<std::string, double>;

// std::invalid_argument for a name that is not registered (it lists those that are), for a parameter that the
// compressor does not have, and for a value that it refuses.
std::shared_ptr<const Compressor> make_compressor(std::string_view name, const CompressorParameters& parameters);

std::vector<std::string_view> compressor_names();

}  // namespace zeropg
