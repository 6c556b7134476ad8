#include "backend/topology/network_rules.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>

namespace zeropg {
namespace {

template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::vector<uint8_t> parse_address(const std::string& text) {
  std::vector<uint8_t> bytes(sizeof(in6_addr));
  if (::inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(sizeof(in_addr));
  if (::inet_pton(AF_INET, text.c_str(), bytes.data()) != 1) bytes.clear();
  return bytes;
}

bool is_inside(std::span<const uint8_t> address, std::span<const uint8_t> subnet, size_t bits) {
  if (address.size() != subnet.size()) return false;
  for (size_t i = 0; i < address.size() && i * 8 < bits; ++i) {
    const size_t counted = std::min<size_t>(bits - i * 8, 8);
    if (((address[i] ^ subnet[i]) >> (8 - counted)) != 0) return false;
  }
  return true;
}

}  // namespace

InterfaceRules::InterfaceRules(std::string_view text) : text_(text), is_exclusion_(text.starts_with('^')) {
  std::string_view rest = text.substr(is_exclusion_ ? 1 : 0);
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(','), rest.size());
    if (end > 0) rules_.push_back(parse(rest.substr(0, end)));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (text.empty() || !rules_.empty()) return;
  throw std::invalid_argument("[zeropg] interfaces: \"" + text_ + "\" names none; expected names such as eth0, or " +
                              "subnets such as 10.1.0.0/16, with commas between");
}

InterfaceRules::Rule InterfaceRules::parse(std::string_view item) {
  Rule rule;
  const size_t slash = item.find('/');
  if (slash == std::string_view::npos) {
    rule.is_whole_name = item.starts_with('=');
    rule.name = item.substr(rule.is_whole_name ? 1 : 0);
    if (!rule.name.empty() && rule.name.find_first_of("^= ") == std::string::npos) return rule;
    throw std::invalid_argument("[zeropg] interfaces: \"" + std::string(item) + "\" is not the name of an interface; " +
                                "expected names such as eth0 or =eth0, or subnets such as 10.1.0.0/16, with ^ in " +
                                "front of all to exclude them");
  }
  rule.subnet = parse_address(std::string(item.substr(0, slash)));
  const auto bits = parse_number<size_t>(item.substr(slash + 1));
  if (rule.subnet.empty() || !bits || *bits > rule.subnet.size() * 8) {
    throw std::invalid_argument("[zeropg] interfaces: \"" + std::string(item) + "\" is not a subnet; expected one " +
                                "such as 10.1.0.0/16 or fd00::/8");
  }
  rule.subnet_bits = *bits;
  return rule;
}

bool InterfaceRules::fits(const Rule& rule, std::string_view name, std::span<const uint8_t> address) {
  if (rule.name.empty()) return is_inside(address, rule.subnet, rule.subnet_bits);
  return rule.is_whole_name ? name == rule.name : name.starts_with(rule.name);
}

bool InterfaceRules::allow(std::string_view name, std::span<const uint8_t> address) const {
  if (rules_.empty()) return true;
  const bool is_described =
      std::any_of(rules_.begin(), rules_.end(), [&](const Rule& rule) { return fits(rule, name, address); });
  return is_described != is_exclusion_;
}

PortRange parse_ports(std::string_view text) {
  if (text.empty()) return {};
  const size_t dash = std::min(text.find('-'), text.size());
  const auto first = parse_number<uint16_t>(text.substr(0, dash));
  const auto last = dash == text.size() ? first : parse_number<uint16_t>(text.substr(dash + 1));
  if (!first || !last || *first == 0 || *first > *last) {
    throw std::invalid_argument("[zeropg] ports: \"" + std::string(text) + "\" is not a range of ports; expected one " +
                                "such as 29600-29700, from 1 to 65535");
  }
  return {*first, *last};
}

}  // namespace zeropg
