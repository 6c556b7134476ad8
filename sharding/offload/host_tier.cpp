#include "sharding/offload/host_tier.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "sharding/offload/aligned_buffer.h"

namespace zeropg {
namespace {

// The lines of caches and of vector registers.
constexpr uint64_t kHostAlignment = 64;

// An extent's offset is its address. Transfers are copies by the caller, so they are done, in order, when they return.
class HostTier final : public Tier {
 public:
  explicit HostTier(bool is_pinned)
      : Tier("cpu", kHostAlignment), pinned_(is_pinned ? at::getHostAllocator(at::kCUDA) : nullptr) {}

  std::byte* address(const TierExtent& extent) override { return at(extent.offset); }
  std::string describe() const override { return pinned_ != nullptr ? "pinned host memory" : "host memory"; }

 private:
  struct Block {
    AlignedBuffer pages;
    c10::DataPtr pinned;
  };

  static std::byte* at(uint64_t offset) { return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(offset)); }

  TierExtent reserve(uint64_t bytes, std::string_view what) override {
    Block block;
    try {
      if (pinned_ != nullptr) {
        block.pinned = pinned_->allocate(bytes);
        std::memset(block.pinned.get(), 0, bytes);
      } else {
        block.pages = AlignedBuffer(bytes);
      }
    } catch (const std::bad_alloc&) {
      throw TierError(c10::str("[zeropg] offload: no ", bytes, " bytes of host memory for ", what,
                               "; use more ranks or offload_optimizer=\"/path/on/a/disk\"."),
                      ENOMEM);
    }
    void* memory = pinned_ != nullptr ? block.pinned.get() : block.pages.data();
    const TierExtent extent{reinterpret_cast<uintptr_t>(memory), bytes};
    const std::lock_guard lock(mutex_);
    blocks_[extent.offset] = std::move(block);
    return extent;
  }

  void release(const TierExtent& extent) override {
    const std::lock_guard lock(mutex_);
    blocks_.erase(extent.offset);
  }

  Transfer start_read(uint64_t offset, std::span<std::byte> buffer) override {
    const std::lock_guard lock(mutex_);
    std::memcpy(buffer.data(), at(offset), buffer.size());
    return {};
  }

  Transfer start_write(uint64_t offset, std::span<const std::byte> buffer) override {
    const std::lock_guard lock(mutex_);
    std::memcpy(at(offset), buffer.data(), buffer.size());
    return {};
  }

  at::HostAllocator* const pinned_;  // null: pages of our own
  std::mutex mutex_;
  std::map<uint64_t, Block> blocks_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Tier> make_host_tier(bool is_pinned) { return std::make_unique<HostTier>(is_pinned); }

}  // namespace zeropg
