#include "backend/topology/topology_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace zeropg {
namespace {

std::string fault_of(const std::string& json) {
  try {
    parse_racks(json);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

TEST(TopologyFile, NamesRacksHostsAndLinks) {
  const std::vector<Rack> racks = parse_racks(
      R"( {"racks": [{"name": "a", "hosts": ["n1", "n\u00fc2"], "node_gbps": 1.25e0, "uplink_gbps": 5, "pod": "x"},
                     {"nodes": 8}]} )");
  ASSERT_EQ(racks.size(), 2U);
  EXPECT_EQ(racks[0].hosts, (std::vector<std::string>{"n1", "nü2"}));
  EXPECT_EQ(racks[0].nodes, 2);
  EXPECT_EQ(racks[0].node_gbps, 1.25);
  EXPECT_EQ(racks[0].uplink_gbps, 5);
  EXPECT_EQ(racks[0].pod, "x");
  EXPECT_EQ(racks[1].name, "number 1");
  EXPECT_EQ(racks[1].nodes, 8);
  EXPECT_EQ(racks[1].uplink_gbps, 0);
  EXPECT_EQ(find_rack(racks, "n1"), &racks[0]);
  EXPECT_EQ(find_rack(racks, "n3"), nullptr);
}

TEST(TopologyFile, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "byte 0: expected '{', found the end"},
      {R"({"racks": {"a": 1}})", "byte 10: expected '[', found {\"a\": 1}}"},
      {R"({"racks": [{"name": "a", "nodes": 2.5}]})", "byte 34: expected a non-negative integer, found 2.5}]}"},
      {"{}", "it has no racks"},
      {R"({"racks": []})", "it has no racks"},
      {R"({"racks": [], "racks": []})", "expected racks alone"},
      {R"({"racks": [{"name": "a", "nodes": 1}]} x)", "there is text after"},
      {R"({"racks": [{"name": "a", "nodes": 1, "name": "b"}]})", "the key 'name' stands twice"},
      {R"({"racks": [{"name": "a", "nodes": 1, "uplink_gbps": 1e999}]})", "expected a number"},
      {R"({"racks": [{"name": "a", "nodes": 1, "uplink_gbps": nan}]})", "expected a number"},
      {R"({"racks": [{"name": "a", "nodes": 99999999999999999999}]})", "too large"},
      {R"({"racks": [{"name": "a", "nodes": 9999999}]})", "at most 1000000"},
      {R"({"racks": [{"name": "", "nodes": 1}]})", "a rack's name is empty"},
  };
  for (const auto& [json, words] : cases) EXPECT_NE(fault_of(json).find(words), std::string::npos) << fault_of(json);
  const std::string whole = R"({"racks": [{"name": "a", "hosts": ["x", "y"], "node_gbps": 2.5}]})";
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) EXPECT_NE(fault_of(whole.substr(0, bytes)), "none");
}

TEST(TopologyFile, IsNamedInWhatIsWrongWithIt) {
  const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / "zeropg-topology";
  std::ofstream(path) << R"({"racks": [{"name": "a", "hosts": ["x"]}]})";
  EXPECT_EQ(read_topology_file(path).racks.size(), 1U);
  std::ofstream(path) << "[]";
  for (const std::string& wrong : {path.string(), path.string() + "-none", std::string("/dev/zero")}) {
    try {
      read_topology_file(wrong);
      FAIL();
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()).rfind("topology file " + wrong + ": ", 0), 0U) << error.what();
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace zeropg
