// Memory that devices of UCX may read and write, for payloads that they fetch from each other. It is registered once,
// which takes longer than a message, and lent again and again.
#pragma once

#ifdef ZEROPG_WITH_UCX

#include <cstddef>
#include <memory>
#include <vector>

#include "backend/transport/network/ucx/ucx_library.h"

namespace zeropg {

class UcxBuffers {
 public:
  struct Buffer {
    std::byte* data = nullptr;
    ucp_mem_h registration = nullptr;
  };

  // Of `bytes_of_each`, a multiple of a page.
  UcxBuffers(const UcxLibrary& ucx, ucp_context_h context, size_t bytes_of_each)
      : ucx_(ucx), context_(context), bytes_of_each_(bytes_of_each) {}
  // No device may use any of them any more.
  ~UcxBuffers();
  UcxBuffers(const UcxBuffers&) = delete;
  UcxBuffers& operator=(const UcxBuffers&) = delete;

  // DistBackendError where UCX cannot register more memory.
  Buffer take();
  void give_back(Buffer buffer) { free_.push_back(buffer); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };

  void make_more();

  const UcxLibrary& ucx_;
  const ucp_context_h context_;
  const size_t bytes_of_each_;
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::vector<ucp_mem_h> registrations_;  // of each
  std::vector<Buffer> free_;
};

}  // namespace zeropg

#endif
