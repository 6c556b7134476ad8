// UCX, started: a context with one worker, which moves the messages of one wire.
#pragma once

#ifdef ZEROPG_WITH_UCX

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/transport/network/ucx/ucx_library.h"

namespace zeropg {

// One thread at a time.
class UcxWorker {
 public:
  struct Plan {
    std::string devices;       // what UCX calls TLS; empty: RDMA where UCX can use it, else TCP, and nothing else
    int32_t likely_peers = 1;  // UCX plans its resources by it
    unsigned message_id = 0;
    ucp_am_recv_callback_t on_message = nullptr;  // called by progress()
    void* receiver = nullptr;                     // its first argument
  };

  // DistBackendError where UCX cannot do it.
  UcxWorker(const UcxLibrary& ucx, const Plan& plan);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const UcxLibrary& ucx() const { return ucx_; }
  ucp_context_h context() const { return context_; }
  ucp_worker_h handle() const { return worker_; }
  // Readable when progress() has something to do, if arm() returned true before.
  int descriptor() const { return descriptor_; }
  bool arm() { return ucx_.worker_arm(worker_) == UCS_OK; }
  // Moves nothing any more, and needs no memory but the context's: what is registered can go.
  void stop();
  // What peers need to reach it.
  const std::string& address() const { return address_; }
  void progress() {
    while (ucx_.worker_progress(worker_) != 0) {
    }
  }

 private:
  void start(const Plan& plan);
  void check(ucs_status_t status, const char* what) const;

  const UcxLibrary& ucx_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  std::string address_;
};

}  // namespace zeropg

#endif
