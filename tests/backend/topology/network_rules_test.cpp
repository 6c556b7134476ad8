#include "backend/topology/network_rules.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace zeropg {
namespace {

using Bytes = std::vector<uint8_t>;

const Bytes kAddress{10, 1, 2, 3};

bool allows(const std::string& text, const std::string& name, const Bytes& address = kAddress) {
  return InterfaceRules(text).allow(name, address);
}

TEST(InterfaceRules, NamesBeginningsAndSubnetsAreAllowed) {
  EXPECT_TRUE(allows("", "anything"));
  EXPECT_TRUE(allows("eth,ib0", "eth1"));
  EXPECT_TRUE(allows("eth,ib0", "ib0"));
  EXPECT_FALSE(allows("eth,ib0", "docker0"));
  EXPECT_TRUE(allows("=eth1", "eth1"));
  EXPECT_FALSE(allows("=eth1", "eth10"));
  EXPECT_TRUE(allows("192.168.0.0/16,10.1.0.0/16", "eth0"));
  EXPECT_TRUE(allows("10.1.2.2/31", "eth0"));
  EXPECT_FALSE(allows("10.1.2.0/31", "eth0"));
  EXPECT_TRUE(allows("0.0.0.0/0", "eth0"));
  Bytes address(16);
  address[0] = 0xfd;
  EXPECT_FALSE(allows("0.0.0.0/0", "eth0", address));
  EXPECT_TRUE(allows("fc00::/7", "eth0", address));
  EXPECT_FALSE(allows("fe00::/7", "eth0", address));
}

TEST(InterfaceRules, ACaretAllowsWhatIsNotDescribed) {
  EXPECT_FALSE(allows("^docker,10.0.0.0/8", "docker0", {192, 168, 0, 1}));
  EXPECT_FALSE(allows("^docker,10.0.0.0/8", "eth0"));
  EXPECT_TRUE(allows("^docker,10.0.0.0/8", "eth0", {192, 168, 0, 1}));
}

TEST(InterfaceRules, WhatIsNoRuleIsNamed) {
  for (const char* text : {"10.1.0.0/33", "10.1/16", "eth0,fd00::/x", "eth0,^docker", "=", ",", "^", "eth 0", "/8"}) {
    EXPECT_THROW(InterfaceRules{text}, std::invalid_argument) << text;
  }
}

TEST(PortRange, IsReadOrRefused) {
  EXPECT_TRUE(parse_ports("").is_any());
  EXPECT_EQ(parse_ports("29600-29700").count(), 101);
  EXPECT_EQ(parse_ports("29600").first, 29600);
  EXPECT_EQ(parse_ports("29600").count(), 1);
  EXPECT_EQ(parse_ports("1-65535").count(), 65535);
  for (const char* text : {"0", "0-5", "7-6", "-", "1-", "-1", "65536", "1-65536", "a", "1-2-3", " 1"}) {
    EXPECT_THROW(parse_ports(text), std::invalid_argument) << text;
  }
}

}  // namespace
}  // namespace zeropg
