// The keys that this process works with instead of its users' secrets.
//
// Note [Guessing secrets]
// Ranks prove that they know the group's secret, and such a proof lets whoever sees it check a guess: the one who reads
// the store finds signatures in it, the one on the path sees proofs. So neither is made with the secret itself but with
// a key that scrypt derives from it: a guess costs an attacker what it costs a rank, 16 MiB and tens of milliseconds of
// a core, where a plain HMAC would let one GPU make billions of guesses a second.
//
// - Leaving the signatures out of the store would not help for long: the proofs between nodes would still be there for
//   whoever listens, or lures a rank to an address of his own. Only a password-authenticated key exchange keeps those
//   from being checked. It needs an elliptic curve, which neither torch nor a bare system offers for linking.
// - The implementation is ours because every rank must derive the same key: C++ programs have no Python (whose hashlib
//   has a scrypt), and a wheel must not need a libcrypto that a machine may lack. The RFC's vectors are in the tests.
// - All ranks together make the salt, so that it is fresh for each of them and no table can be made beforehand. Groups
//   whose ranks have derived a key already share it (GroupMap::salt): every proof also covers the group's name.
// - A secret that zeropg draws itself has 256 bits. Guessing it is hopeless, so it is used as it is.
#pragma once

#include <string>

namespace zeropg {

struct DerivedKey {
  std::string salt;
  std::string key;
};

// The one that this process derived last from `secret`; empty where there is none. Any thread.
DerivedKey last_derived_key(const std::string& secret);
// Takes tens of milliseconds, unless it is the last one. Any thread; one at a time, since each takes 16 MiB.
DerivedKey derive_key(const std::string& secret, const std::string& salt);

}  // namespace zeropg
