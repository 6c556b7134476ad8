#include "backend/platform/process/peer_doorbells.h"

#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace zeropg {
namespace {

struct Known {
  const pid_t owner = ::getpid();
  std::mutex mutex;
  std::map<std::array<uint64_t, 2>, std::weak_ptr<const Descriptor>> by_process;  // guarded by mutex
};

// A forked child begins anew: another thread of its parent may have held the lock. Hence none here either. Never
// destroyed: groups may outlive static destructors.
Known& known_of_this_process() {
  static std::atomic<Known*> known{nullptr};
  Known* found = known.load();
  while (found == nullptr || found->owner != ::getpid()) {
    auto fresh = std::make_unique<Known>();
    if (known.compare_exchange_strong(found, fresh.get())) {
      return *fresh.release();
    }
  }
  return *found;
}

bool is_same_file(const Descriptor& one, const Descriptor& other) {
  const pid_t own = ::getpid();
  return ::syscall(SYS_kcmp, own, own, KCMP_FILE, one.get(), other.get()) == 0;
}

}  // namespace

std::shared_ptr<const Descriptor> share_doorbell(const std::array<uint64_t, 2>& process, Descriptor doorbell) {
  Known& known = known_of_this_process();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.by_process.find(process);
  const std::shared_ptr<const Descriptor> shared = found == known.by_process.end() ? nullptr : found->second.lock();
  if (shared && is_same_file(*shared, doorbell)) return shared;
  auto own = std::make_shared<const Descriptor>(std::move(doorbell));
  if (!shared) {
    std::erase_if(known.by_process, [](const auto& entry) { return entry.second.expired(); });
    known.by_process[process] = own;
  }
  return own;
}

}  // namespace zeropg
