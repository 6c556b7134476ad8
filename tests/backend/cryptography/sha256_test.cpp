// Vectors: FIPS 180-4 examples (NIST CSRC) and RFC 4231.
#include "backend/cryptography/sha256.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "backend/cryptography/hmac_sha256.h"

namespace zeropg {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Sha256, MatchesNistVectors) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(
      hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                 "mnopqrstnopqrstu")),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, IsTheSameInWhateverPartsAMessageComes) {
  std::mt19937 random(1);
  const std::string message(1000, 'a');
  const std::span<const std::byte> bytes = std::as_bytes(std::span(message));
  for (int round = 0; round < 200; ++round) {
    const size_t length = random() % message.size();
    Sha256 hash;
    for (size_t at = 0; at < length;) {
      const size_t part = std::min<size_t>(length - at, random() % 150);
      hash.update(bytes.subspan(at, part));
      at += part;
    }
    EXPECT_EQ(hash.finish(), sha256(std::string_view(message).substr(0, length))) << length;
  }
}

TEST(Sha256, ThePortableBlocksAreThoseOfTheProcessorsInstructions) {
  const Sha256Blocks extension = sha_extension_blocks();
  if (extension == nullptr) GTEST_SKIP() << "this processor has no SHA extensions";
  std::mt19937 random(2);
  std::vector<std::byte> blocks(17 * kSha256BlockBytes + 1);
  for (std::byte& byte : blocks) byte = static_cast<std::byte>(random());
  for (const size_t count : {0, 1, 2, 3, 17}) {
    Sha256State state = kSha256Start;
    Sha256State expected = kSha256Start;
    extension(state, blocks.data() + 1, count);
    absorb_portable(expected, blocks.data() + 1, count);
    EXPECT_EQ(state, expected) << count;
  }
}

TEST(HmacSha256, MatchesRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (char c = 1; c <= 25; ++c) key += c;
  EXPECT_EQ(hex(hmac_sha256(key, std::string(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than block-size data. The "
                            "key needs to be hashed before being used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, TakesOneMessageAfterTheOther) {
  HmacSha256 mac("Jefe");
  const std::string text = "what do ya want for nothing?";
  for (int message = 0; message < 3; ++message) {
    for (const char& character : text) mac.update(std::as_bytes(std::span(&character, 1)));
    EXPECT_EQ(mac.finish(), hmac_sha256("Jefe", text));
  }
}

TEST(HmacSha256, DigestsDifferInAnyByte) {
  const Digest a{};
  EXPECT_TRUE(is_same_mac(a, a));
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] = 0x80;
    EXPECT_FALSE(is_same_mac(a, b));
  }
}

}  // namespace
}  // namespace zeropg
