// Vectors: RFC 7914, 11 and 12.
#include "backend/cryptography/scrypt.h"

#include <gtest/gtest.h>

#include "backend/cryptography/derived_keys.h"

namespace zeropg {
namespace {

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4 & 15];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Pbkdf2, MatchesRfc7914) {
  EXPECT_EQ(hex(pbkdf2_hmac_sha256("passwd", "salt", 1, 64)),
            "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc"
            "49ca9cccf179b645991664b39d77ef317c71b845b1e30bd509112041d3a19783");
  EXPECT_EQ(hex(pbkdf2_hmac_sha256("Password", "NaCl", 80000, 64)),
            "4ddcd8f60b98be21830cee5ef22701f9641a4418d04c0414aeff08876b34ab56"
            "a1d425a1225833549adb841b51c9b3176a272bdebba1d078478f62b397f33c8d");
}

TEST(Scrypt, MatchesRfc7914) {
  EXPECT_EQ(hex(scrypt("", "", {.n = 16, .r = 1, .p = 1}, 64)),
            "77d6576238657b203b19ca42c18a0497f16b4844e3074ae8dfdffa3fede21442"
            "fcd0069ded0948f8326a753a0fc81f17e8d3e0fb2e0d3628cf35e20c38d18906");
  EXPECT_EQ(hex(scrypt("password", "NaCl", {.n = 1024, .r = 8, .p = 16}, 64)),
            "fdbabe1c9d3472007856e7190d01e9fe7c6ad7cbc8237830e77376634b373162"
            "2eaf30d92e22a3886ff109279d9830dac727afb94a83ee6d8360cbdfa2cc0640");
  EXPECT_EQ(hex(scrypt("pleaseletmein", "SodiumChloride", {.n = 16384, .r = 8, .p = 1}, 64)),
            "7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2"
            "d5432955613f0fcf62d49705242a9af9e61e85dc0d651e40dfcf017b45575887");
}

TEST(DerivedKeys, TheLastOneOfASecretIsKept) {
  EXPECT_EQ(last_derived_key("one").salt, "");
  const DerivedKey one = derive_key("one", "salt");
  const DerivedKey other = derive_key("other", "salt");
  EXPECT_NE(one.key, other.key);
  EXPECT_EQ(last_derived_key("one").key, one.key);
  EXPECT_EQ(derive_key("one", "salt").key, one.key);
  const DerivedKey next = derive_key("one", "another salt");
  EXPECT_NE(next.key, one.key);
  EXPECT_EQ(last_derived_key("one").salt, "another salt");
  EXPECT_EQ(last_derived_key("other").key, other.key);
}

}  // namespace
}  // namespace zeropg
