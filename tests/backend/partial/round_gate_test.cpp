#include "backend/partial/round_gate.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

TEST(RoundGate, NeedsAllRanksButTheToleratedShare) {
  EXPECT_EQ(RoundGate(8, 0, 1, 1).quorum(), 8);
  EXPECT_EQ(RoundGate(8, 0.1, 1, 1).quorum(), 8);
  EXPECT_EQ(RoundGate(8, 0.125, 1, 1).quorum(), 7);
  EXPECT_EQ(RoundGate(30, 0.1, 1, 1).quorum(), 27);
  EXPECT_EQ(RoundGate(1, 0.99, 1, 1).quorum(), 1);
  EXPECT_EQ(RoundGate(2, 0.999999999999, 1, 1).quorum(), 1);
}

TEST(RoundGate, BeginsWithAQuorumAndNamesTheRest) {
  RoundGate gate(4, 0.25, 1, 1);
  gate.note(0, 1);
  gate.note(3, 1);
  EXPECT_FALSE(gate.may_begin(0));
  EXPECT_EQ(gate.missing(0), (std::vector<int32_t>{1, 2}));
  gate.note(1, 1);
  EXPECT_TRUE(gate.may_begin(0));
  EXPECT_FALSE(gate.may_begin(1));
}

TEST(RoundGate, WaitsForARankThatIsStepsBehind) {
  RoundGate gate(3, 0.34, 2, 1);
  for (const int32_t rank : {0, 1}) {
    gate.note(rank, 4);
  }
  EXPECT_TRUE(gate.may_begin(0));
  EXPECT_TRUE(gate.may_begin(1));
  EXPECT_FALSE(gate.may_begin(2));  // rank 2 has not come to all of step 0
  gate.note(2, 1);
  EXPECT_FALSE(gate.may_begin(2));
  gate.note(2, 2);
  EXPECT_TRUE(gate.may_begin(2));
  EXPECT_TRUE(gate.may_begin(3));
  RoundGate patient(3, 0.34, 2, 2);
  for (const int32_t rank : {0, 1}) {
    patient.note(rank, 6);
  }
  EXPECT_TRUE(patient.may_begin(3));
  EXPECT_FALSE(patient.may_begin(4));
}

TEST(RoundGate, HearsLateNewsOnce) {
  RoundGate gate(2, 0, 1, 1);
  gate.note(0, 5);
  gate.note(0, 3);
  gate.note(1, 5);
  EXPECT_TRUE(gate.may_begin(4));
}

}  // namespace
}  // namespace zeropg
