#include "backend/cryptography/derived_keys.h"

#include <map>
#include <mutex>

#include "backend/cryptography/hmac_sha256.h"
#include "backend/cryptography/scrypt.h"

namespace zeropg {
namespace {

constexpr ScryptCost kCost{.n = 1 << 14, .r = 8, .p = 1};

struct Keys {
  std::mutex mutex;
  std::map<std::string, DerivedKey> last;  // by secret
};

Keys& keys() {
  static auto* const keys = new Keys;  // threads may outlive static objects
  return *keys;
}

}  // namespace

DerivedKey last_derived_key(const std::string& secret) {
  const std::lock_guard lock(keys().mutex);
  const auto found = keys().last.find(secret);
  return found == keys().last.end() ? DerivedKey() : found->second;
}

DerivedKey derive_key(const std::string& secret, const std::string& salt) {
  const std::lock_guard lock(keys().mutex);
  DerivedKey& last = keys().last[secret];
  if (last.key.empty() || last.salt != salt) last = {salt, scrypt(secret, salt, kCost, sizeof(Digest))};
  return last;
}

}  // namespace zeropg
