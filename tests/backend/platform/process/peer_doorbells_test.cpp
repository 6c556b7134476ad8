#include "backend/platform/process/peer_doorbells.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

using Process = std::array<uint64_t, 2>;

Descriptor new_bell() { return Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }
Descriptor copy_of(const Descriptor& bell) { return Descriptor(::dup(bell.get())); }
bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST(PeerDoorbells, GroupsThatShareAProcessShareItsDescriptor) {
  const Descriptor bell = new_bell();
  const auto first = share_doorbell(Process{1, 1}, copy_of(bell));
  Descriptor copy = copy_of(bell);
  const int number = copy.get();
  const auto second = share_doorbell(Process{1, 1}, std::move(copy));
  EXPECT_EQ(first->get(), second->get());
  EXPECT_FALSE(is_open(number));
}

TEST(PeerDoorbells, WhoClaimsAnothersNameRingsNobodyElse) {
  const auto honest = share_doorbell(Process{2, 2}, new_bell());
  const auto liar = share_doorbell(Process{2, 2}, new_bell());
  EXPECT_NE(honest->get(), liar->get());
}

TEST(PeerDoorbells, TheLastGroupClosesIt) {
  const Descriptor bell = new_bell();
  auto first = share_doorbell(Process{3, 3}, copy_of(bell));
  auto second = share_doorbell(Process{3, 3}, copy_of(bell));
  const int number = first->get();
  first.reset();
  EXPECT_TRUE(is_open(number));
  second.reset();
  EXPECT_FALSE(is_open(number));
  EXPECT_TRUE(is_open(share_doorbell(Process{3, 3}, copy_of(bell))->get()));
}

TEST(PeerDoorbells, AForkedChildBeginsAnew) {
  const Descriptor bell = new_bell();
  const auto of_parent = share_doorbell(Process{4, 4}, copy_of(bell));
  ChildProcess child([&] { return share_doorbell(Process{4, 4}, copy_of(bell))->get() != of_parent->get(); });
  EXPECT_TRUE(child.succeeded());
}

}  // namespace
}  // namespace zeropg
