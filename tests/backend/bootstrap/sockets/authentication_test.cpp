#include "backend/bootstrap/sockets/authentication.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

const ProofContext kContext{"place", random_nonce(), random_nonce()};

TEST(Authentication, ProofDependsOnEverythingItCovers) {
  const Digest proof = prove("secret", Role::kMember, kContext);
  EXPECT_TRUE(is_same_mac(proof, prove("secret", Role::kMember, kContext)));
  EXPECT_FALSE(is_same_mac(proof, prove("Secret", Role::kMember, kContext)));
  EXPECT_FALSE(is_same_mac(proof, prove("secret", Role::kLeader, kContext))) << "reflection";
  EXPECT_FALSE(is_same_mac(proof, session_key("secret", kContext)));
  ProofContext other = kContext;
  other.leader_nonce = random_nonce();
  EXPECT_FALSE(is_same_mac(proof, prove("secret", Role::kMember, other))) << "replay to the leader";
  other = kContext;
  other.member_nonce = random_nonce();
  EXPECT_FALSE(is_same_mac(proof, prove("secret", Role::kMember, other))) << "replay to the member";
  other = kContext;
  other.name = "another place";
  EXPECT_FALSE(is_same_mac(proof, prove("secret", Role::kMember, other))) << "another group";
}

TEST(Authentication, RandomIsNotRepeated) {
  EXPECT_NE(random_nonce(), random_nonce());
  EXPECT_EQ(random_hex(16).size(), 32U);
  EXPECT_NE(random_hex(16), random_hex(16));
}

}  // namespace
}  // namespace zeropg
