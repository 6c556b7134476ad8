#include "backend/bootstrap/link_probe.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace zeropg {
namespace {

Topology two_racks() { return make_topology({{"a", "", "r"}, {"b", "", "r"}, {"c", "", "s"}, {"a", "", "r"}}, 0); }

TEST(EncodedLinks, AreReadBackAsTheyWere) {
  const Topology topology = two_racks();
  for (const LinkModel& links : {LinkModel(), LinkModel{.node_bytes_per_us = {1, 0.5, 1e6}},
                                 LinkModel{.node_bytes_per_us = {1, 2, 3}, .uplink_bytes_per_us = {4, 5}},
                                 LinkModel{.node_bytes_per_us = {1, 2, 3}, .is_followed = true}}) {
    const std::string bytes = encode_links(links, topology);
    EXPECT_EQ(bytes.size(), encoded_links_bytes(topology));
    EXPECT_EQ(decode_links(bytes, topology), links);
  }
}

TEST(EncodedLinks, ThatMakeNoSenseAreRefused) {
  const Topology topology = two_racks();
  const std::string bytes = encode_links({.node_bytes_per_us = {1, 2, 3}}, topology);
  EXPECT_THROW(decode_links(bytes.substr(1), topology), c10::DistBackendError);
  EXPECT_THROW(decode_links(bytes + "x", topology), c10::DistBackendError);
  EXPECT_THROW(decode_links(bytes.substr(0, bytes.size() - 1) + "?", topology), c10::DistBackendError);
  for (const double wrong : {-1.0, 0.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW(decode_links(encode_links({.node_bytes_per_us = {1, wrong, 3}}, topology), topology),
                 c10::DistBackendError);
  }
}

}  // namespace
}  // namespace zeropg
