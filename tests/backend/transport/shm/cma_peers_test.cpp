#include "backend/transport/shm/cma_peers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace zeropg {
namespace {

// A process can always read itself, so it stands for the peers too.
TEST(CmaPeers, ReadsAllOnceAllWereMet) {
  CmaPeers memory(3);
  EXPECT_FALSE(memory.reads_all());
  if (const std::string& refusal = memory.meet(0, own_cma_identity()); !refusal.empty()) GTEST_SKIP() << refusal;
  EXPECT_FALSE(memory.reads_all());
  EXPECT_EQ(memory.meet(2, own_cma_identity()), "");
  EXPECT_EQ(memory.meet(2, own_cma_identity()), "");
  EXPECT_TRUE(memory.reads_all());

  const std::vector<int> there{1, 2, 3};
  std::vector<int> here(3);
  EXPECT_EQ(memory.read(2, reinterpret_cast<uint64_t>(there.data()), std::as_writable_bytes(std::span(here))), "");
  EXPECT_EQ(here, there);
}

TEST(CmaPeers, NeverReadsAllAgainAfterOneFailure) {
  CmaPeers memory(2);
  if (const std::string& refusal = memory.meet(1, own_cma_identity()); !refusal.empty()) GTEST_SKIP() << refusal;
  std::vector<std::byte> here(8);
  EXPECT_NE(memory.read(1, 1, here), "");
  EXPECT_FALSE(memory.reads_all());
  memory.meet(1, own_cma_identity());
  EXPECT_FALSE(memory.reads_all());
}

TEST(CmaPeers, KeepsAwayFromAnotherProcessOfThatNumber) {
  CmaPeers memory(2);
  CmaIdentity stranger = own_cma_identity();
  stranger.token[0] ^= 1;
  EXPECT_NE(memory.meet(1, stranger), "");
  EXPECT_FALSE(memory.reads_all());
}

TEST(CmaPeers, AGroupOfOneHasNobodyToRead) { EXPECT_TRUE(CmaPeers(1).reads_all()); }

}  // namespace
}  // namespace zeropg
