// What a user says about connections between nodes: the interfaces that they may use, and the ports.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeropg {

// "eth,ib0": names or beginnings of names; "=eth0": this name alone; "10.1.0.0/16", "fd00::/8": the addresses of a
// subnet; "^docker,10.0.0.0/8": whatever none of these describes. By default everything is allowed.
class InterfaceRules {
 public:
  InterfaceRules() = default;
  // Throws std::invalid_argument naming the part that says none of the above.
  explicit InterfaceRules(std::string_view text);

  // `address`: 4 or 16 bytes, in the order of the network.
  bool allow(std::string_view name, std::span<const uint8_t> address) const;
  const std::string& text() const { return text_; }

 private:
  struct Rule {
    std::string name;  // empty: `subnet` counts
    bool is_whole_name = false;
    std::vector<uint8_t> subnet;
    size_t subnet_bits = 0;
  };
  static Rule parse(std::string_view item);
  static bool fits(const Rule& rule, std::string_view name, std::span<const uint8_t> address);

  std::string text_;
  bool is_exclusion_ = false;
  std::vector<Rule> rules_;
};

// The ports that ranks may listen on, both ends included. By default the system chooses.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;

  int32_t count() const { return last - first + 1; }
  bool is_any() const { return first == 0; }
};

// "29600-29700", "29600", or "" for any. Throws std::invalid_argument for anything else.
PortRange parse_ports(std::string_view text);

}  // namespace zeropg
