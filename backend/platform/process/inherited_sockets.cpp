#include "backend/platform/process/inherited_sockets.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace zeropg {
namespace {

// A fact of the process, like its table of descriptors: not a state of any group. Made when the library is loaded,
// since a fork during the initialisation of a function's static would leave the child waiting; never destroyed, since
// forks come late.
struct Registry {
  std::mutex mutex;
  std::vector<int> sockets;  // guarded by mutex
};
Registry& registry = *new Registry();

void before_fork() { registry.mutex.lock(); }
void in_parent() { registry.mutex.unlock(); }
void in_child() {
  for (const int fd : registry.sockets) ::close(fd);
  registry.sockets.clear();
  registry.mutex.unlock();
}

[[maybe_unused]] const int is_installed = ::pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

void close_in_children(int fd) {
  const std::lock_guard lock(registry.mutex);
  registry.sockets.push_back(fd);
}

void forget_in_children(int fd) {
  const std::lock_guard lock(registry.mutex);
  std::erase(registry.sockets, fd);
}

}  // namespace zeropg
