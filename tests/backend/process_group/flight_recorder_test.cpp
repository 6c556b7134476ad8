#include "backend/process_group/flight_recorder.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

RecordedOperation operation(uint64_t key) { return {.completion_key = key, .name = "op" + std::to_string(key)}; }

TEST(FlightRecorder, KeepsTheNewestOperationsInOrder) {
  FlightRecorder recorder(2);
  for (uint64_t key = 1; key <= 3; ++key) {
    recorder.record(operation(key));
  }
  const auto kept = recorder.operations();
  ASSERT_EQ(kept.size(), 2);
  EXPECT_EQ(kept[0].name, "op2");
  EXPECT_EQ(kept[0].id, 2);
  EXPECT_EQ(kept[1].name, "op3");
  EXPECT_GT(kept[1].created_ns, 0);
}

TEST(FlightRecorder, OnlyWhatCompletedHasATime) {
  FlightRecorder recorder(2);
  for (uint64_t key = 1; key <= 3; ++key) {
    recorder.record(operation(key));
  }
  recorder.complete(1, 5.0F);  // dropped already
  recorder.complete(3, 2.5F);
  const auto kept = recorder.operations();
  EXPECT_EQ(kept[0].completed_ns, 0);
  EXPECT_GE(kept[1].completed_ns, kept[1].created_ns);
  EXPECT_EQ(kept[1].duration_ms, 2.5F);
}

}  // namespace
}  // namespace zeropg
