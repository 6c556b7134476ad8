// Reads JSON (RFC 8259) piece by piece, as its user knows that it must look: no value of any kind, no recursion and no
// limit of depth are needed for files that others wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zeropg {

// Every call throws std::invalid_argument, "byte 7: expected ..., found ...", where something else comes next.
class JsonReader {
 public:
  // `json` outlives the reader; errors count bytes from `first_byte`.
  explicit JsonReader(std::string_view json, size_t first_byte = 0) : json_(json), first_byte_(first_byte) {}

  // `read_value(key)` consumes the value. A key may come twice.
  template <typename ReadValue>
  void read_object(ReadValue read_value) {
    expect('{');
    if (take('}')) return;
    do {
      std::string key = read_string();
      expect(':');
      read_value(std::move(key));
    } while (take(','));
    expect('}');
  }
  // `read_element()` consumes an element.
  template <typename ReadElement>
  void read_array(ReadElement read_element) {
    expect('[');
    if (take(']')) return;
    do {
      read_element();
    } while (take(','));
    expect(']');
  }
  std::string read_string();  // valid UTF-8
  int64_t read_integer();     // not negative
  double read_number();
  void finish();  // nothing but spaces is left

  [[noreturn]] void fail(const std::string& what) const;

 private:
  void skip_spaces();
  bool take(char wanted);
  void expect(char wanted);
  void append_escape(std::string& text);
  uint32_t read_hex4();
  [[noreturn]] void fail_here(const std::string& wanted) const;

  std::string_view json_;
  size_t first_byte_ = 0;
  size_t position_ = 0;
};

}  // namespace zeropg
