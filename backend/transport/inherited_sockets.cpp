#include "backend/transport/inherited_sockets.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace zeropg {
namespace {

// A fact of the process, like its table of descriptors: not a state of any group.
struct Registry {
  std::mutex mutex;
  std::vector<int> sockets;  // guarded by mutex
};
Registry& registry() {
  static auto* registry = new Registry();  // never destroyed: forks come late
  return *registry;
}

void before_fork() { registry().mutex.lock(); }
void in_parent() { registry().mutex.unlock(); }
void in_child() {
  for (const int fd : registry().sockets) ::close(fd);
  registry().sockets.clear();
  registry().mutex.unlock();
}

}  // namespace

void close_in_children(int fd) {
  static const int is_installed = ::pthread_atfork(before_fork, in_parent, in_child);
  static_cast<void>(is_installed);
  const std::lock_guard lock(registry().mutex);
  registry().sockets.push_back(fd);
}

void forget_in_children(int fd) {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().sockets, fd);
}

}  // namespace zeropg
