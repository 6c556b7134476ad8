// Texts of peers, made fit for errors, logs and terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zeropg {

// Bytes of the well-formed UTF-8 character that `text` begins with (Unicode 15, table 3-7); 0: it begins with none.
size_t utf8_length(std::string_view text);

// At most `max_bytes` of `text`, in which control characters and whatever is not UTF-8 have become blanks. (Python
// raises a UnicodeDecodeError instead of an error whose text it cannot decode.)
std::string printable(std::string_view text, size_t max_bytes);

}  // namespace zeropg
