// Huffman's code behind another codec, where that is shorter.
#pragma once

#include <memory>

#include "compression/compressor.h"

namespace zeropg {

// `codec` as it is, or with its bytes packed. std::invalid_argument where zeropg was built without libzstd.
std::shared_ptr<const Compressor> with_entropy(std::shared_ptr<const Compressor> codec, bool is_wanted);

}  // namespace zeropg
