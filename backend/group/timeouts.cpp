#include "backend/group/timeouts.h"

namespace zeropg {

void Timeouts::extend(std::chrono::milliseconds extra) {
  auto extension = std::make_shared<TimeoutExtension>();
  extension->extra = extra;
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.push_back(std::move(extension));
  has_extensions_ = true;
}

OperationTimeout Timeouts::next(std::chrono::milliseconds asked) {
  OperationTimeout granted{asked.count() > 0 ? bounded(asked) : get()};
  if (!has_extensions_.load()) {
    return granted;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(extensions_, [](const auto& extension) { return extension->is_over.load(); });
  has_extensions_ = !extensions_.empty();
  granted.extensions = extensions_;
  for (const auto& extension : extensions_) {
    granted.timeout = bounded(granted.timeout + bounded(extension->extra));
  }
  return granted;
}

}  // namespace zeropg
