#include "backend/transport/network/registry.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace zeropg {
namespace {

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const WireEntry& wire : wires()) names.emplace_back(wire.name);
  return names;
}

const WireEntry& best() {
  return *std::max_element(wires().begin(), wires().end(),
                           [](const WireEntry& a, const WireEntry& b) { return a.preference < b.preference; });
}

TEST(WireRegistry, EveryRowIsWhole) {
  std::set<std::string_view> names;
  std::set<int> preferences;
  for (const WireEntry& wire : wires()) {
    EXPECT_TRUE(names.insert(wire.name).second) << wire.name;
    EXPECT_TRUE(preferences.insert(wire.preference).second) << wire.name;
    EXPECT_FALSE(wire.title.empty()) << wire.name;
    EXPECT_NE(wire.probe, nullptr) << wire.name;
    EXPECT_NE(wire.join, nullptr) << wire.name;
  }
  EXPECT_FALSE(names.contains(kAutomaticNetwork));
}

TEST(WireRegistry, AnUnknownNetworkIsRefusedWithAllThatAreKnown) {
  check_network(kAutomaticNetwork);
  for (const WireEntry& wire : wires()) check_network(wire.name);
  try {
    check_network("pigeons");
    FAIL();
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("network is 'pigeons', expected automatic"), std::string::npos) << text;
    for (const WireEntry& wire : wires()) EXPECT_NE(text.find(wire.name), std::string::npos) << text;
  }
}

TEST(WireRegistry, AWireThatTheUserInsistsOnIsOfferedAlone) {
  for (const WireEntry& wire : wires()) {
    EXPECT_EQ(offer_wires(wire.name, "/nowhere").names(), std::vector<std::string>{std::string(wire.name)});
  }
}

TEST(WireRegistry, AutomaticOffersWhatIsViableThePreferredFirst) {
  const WireOffer offer = offer_wires(kAutomaticNetwork, "");
  EXPECT_TRUE(std::is_sorted(offer.wires.begin(), offer.wires.end(),
                             [](const WireEntry* a, const WireEntry* b) { return a->preference > b->preference; }));
  for (const WireEntry& wire : wires()) {
    const bool is_offered = std::find(offer.wires.begin(), offer.wires.end(), &wire) != offer.wires.end();
    EXPECT_EQ(is_offered, wire.probe("").is_viable) << wire.name;
  }
  EXPECT_FALSE(offer.wires.empty()) << "there is no machine without a way to others";
}

TEST(WireRegistry, ThePreferredWireOfThoseThatAllHaveIsUsed) {
  EXPECT_EQ(common_wire(std::vector(3, all_names())), &best());
  std::vector<std::string> lesser = all_names();
  std::erase(lesser, best().name);
  const WireEntry* next = common_wire(std::vector{all_names(), lesser, all_names()});
  EXPECT_NE(next, &best());
  EXPECT_EQ(next == nullptr, lesser.empty());
  EXPECT_EQ(common_wire(std::vector<std::vector<std::string>>{all_names(), {}}), nullptr);
}

TEST(WireRegistry, WhateverNamesRanksOfferNoWireIsInvented) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> noise(random() % 64);
    for (std::string& name : noise) {
      name = random() % 4 == 0 ? all_names()[0].substr(random() % 2) : std::string(random() % 20, '\0');
      for (char& c : name) c = random() % 3 == 0 ? static_cast<char>(random()) : c;
    }
    const WireEntry* wire = common_wire(std::vector{noise, all_names()});
    EXPECT_TRUE(wire == nullptr || std::find(noise.begin(), noise.end(), wire->name) != noise.end());
  }
}

}  // namespace
}  // namespace zeropg
