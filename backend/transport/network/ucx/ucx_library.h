// UCX, found and loaded at run time: nothing of it is needed where there is one node, or TCP between them.
#pragma once

#ifdef ZEROPG_WITH_UCX

#include <ucp/api/ucp.h>

#include <string>

namespace zeropg {

// The functions of libucp and libucs that are used here. Loaded once per process and never unloaded: its threads and
// its hooks outlive every group.
struct UcxLibrary {
  std::string path;  // of libucp
  bool has_rdma = false;

  decltype(&::ucp_config_read) config_read = nullptr;
  decltype(&::ucp_config_modify) config_modify = nullptr;
  decltype(&::ucp_config_release) config_release = nullptr;
  decltype(&::ucp_init_version) init_version = nullptr;
  decltype(&::ucp_cleanup) cleanup = nullptr;
  decltype(&::ucp_worker_create) worker_create = nullptr;
  decltype(&::ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&::ucp_worker_query) worker_query = nullptr;
  decltype(&::ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&::ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = nullptr;
  decltype(&::ucp_worker_progress) worker_progress = nullptr;
  decltype(&::ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&::ucp_worker_arm) worker_arm = nullptr;
  decltype(&::ucp_ep_create) ep_create = nullptr;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx = nullptr;
  decltype(&::ucp_am_send_nbx) am_send_nbx = nullptr;
  decltype(&::ucp_am_recv_data_nbx) am_recv_data_nbx = nullptr;
  decltype(&::ucp_am_data_release) am_data_release = nullptr;
  decltype(&::ucp_mem_map) mem_map = nullptr;
  decltype(&::ucp_mem_unmap) mem_unmap = nullptr;
  decltype(&::ucp_request_check_status) request_check_status = nullptr;
  decltype(&::ucp_request_free) request_free = nullptr;
  decltype(&::ucs_status_string) status_string = nullptr;
};

// `root`: a folder with lib/libucp.so.0 that wins over all others. Else the system's UCX if this machine has RDMA and
// that UCX can use it, else the libucx wheel beside torch. DistBackendError that names what is missing.
const UcxLibrary& ucx_library(const std::string& root);

}  // namespace zeropg

#endif
