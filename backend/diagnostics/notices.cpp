#include "backend/diagnostics/notices.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace zeropg {
namespace {

// What was said is a fact of the process, like its stderr; no group reads it.
struct Notices {
  std::mutex mutex;
  std::set<std::string, std::less<>> kinds;  // guarded by mutex
  std::vector<std::string> waiting;          // guarded by mutex
  NoticeBell bell = nullptr;                 // guarded by mutex
};

Notices& notices() {
  static auto* all = new Notices();  // never destroyed: threads may outlive static destructors
  return *all;
}

void print(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

}  // namespace

void notice(std::string_view kind, std::string line) {
  NoticeBell bell = nullptr;
  {
    const std::lock_guard lock(notices().mutex);
    if (!notices().kinds.emplace(kind).second) return;
    bell = notices().bell;
    if (bell != nullptr) notices().waiting.push_back(std::move(line));
  }
  if (bell != nullptr) {
    bell();
  } else {
    print(line);
  }
}

void set_notice_bell(NoticeBell bell) {
  std::vector<std::string> left;
  {
    const std::lock_guard lock(notices().mutex);
    notices().bell = bell;
    if (bell == nullptr) left.swap(notices().waiting);
  }
  for (const std::string& line : left) print(line);
}

std::vector<std::string> take_notices() {
  const std::lock_guard lock(notices().mutex);
  return std::exchange(notices().waiting, {});
}

}  // namespace zeropg
