// The corpus of every fuzz target, where there is no libFuzzer too. Runs in the root of the repository.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/fuzz/calls.h"
#include "tests/fuzz/encodings.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/records.h"

namespace zeropg {
namespace {

void replay(const char* target, void (*run)(std::span<const uint8_t>)) {
  const std::filesystem::path corpus = std::filesystem::path("tests/fuzz/corpus") / target;
  if (!std::filesystem::is_directory(corpus)) GTEST_SKIP() << "no " << corpus << " in this folder";
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<uint8_t> input{std::istreambuf_iterator<char>(file), {}};
    SCOPED_TRACE(entry.path().string());
    for (size_t bytes = 0; bytes <= input.size(); ++bytes) run(std::span(input).first(bytes));
    ++count;
  }
  EXPECT_GT(count, 0U);
}

TEST(FuzzCorpus, Calls) { replay("calls", &fuzz::calls); }
TEST(FuzzCorpus, Encodings) { replay("encodings", &fuzz::encodings); }
TEST(FuzzCorpus, Frames) { replay("frames", &fuzz::frames); }
TEST(FuzzCorpus, Records) { replay("records", &fuzz::records); }

}  // namespace
}  // namespace zeropg
