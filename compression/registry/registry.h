// All compressors by name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "compression/compressor.h"

namespace zeropg {

// What a compressor is made from, e.g. {"bits": 4, "block": 256}.
using CompressorParameters = std::map<std::string, double>;

// std::invalid_argument for a name that is not registered (it lists those that are), for a parameter that the
// compressor does not have, and for a value that it refuses.
std::shared_ptr<const Compressor> make_compressor(std::string_view name, const CompressorParameters& parameters);

// What users see of a compressor: python/zeropg/compression makes a class of each. A parameter is a flag, an integer or
// a real number, as its default is.
using CompressorDefault = std::variant<bool, int64_t, double>;
struct CompressorDescription {
  std::string_view name;
  std::string_view help;                                              // of its class
  std::vector<std::pair<std::string, CompressorDefault>> parameters;  // in order, each with what it is unless given
};
std::vector<CompressorDescription> compressors();

}  // namespace zeropg
