#include "backend/diagnostics/printable.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

constexpr size_t kPlenty = 100;

TEST(Printable, LeavesTextsOfAnyLanguageAlone) {
  for (const char* text : {"", "rank 1: no space left", "/data/jürgen", "ранг", "等級", "🚀"}) {
    EXPECT_EQ(printable(text, kPlenty), text);
  }
}

TEST(Printable, ControlCharactersBecomeBlanks) {
  EXPECT_EQ(printable(std::string("a\0b\n\x1b[31m\x7f", 10), kPlenty), "a b  [31m ");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "31m",
                      kPlenty),
            "a  31m")
      << "the second set has an escape of its own";
}

TEST(Printable, WhatIsNotUtf8BecomesBlanks) {
  EXPECT_EQ(printable("\xff", kPlenty), " ");
  EXPECT_EQ(printable("a\x80z", kPlenty), "a z");
  EXPECT_EQ(printable("\xc0\xaf", kPlenty), "  ") << "longer than it must be";
  EXPECT_EQ(printable("\xed\xa0\x80", kPlenty), "   ") << "a surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80", kPlenty), "    ") << "beyond Unicode";
  EXPECT_EQ(printable("\xe7\xad", kPlenty), "  ") << "the end is missing";
}

TEST(Printable, WhatIsCutInTheMiddleOfACharacterEndsInBlanks) {
  EXPECT_EQ(printable("等級", 6), "等級");
  EXPECT_EQ(printable("等級", 5), "等  ");
  EXPECT_EQ(printable("等級", 3), "等");
}

}  // namespace
}  // namespace zeropg
