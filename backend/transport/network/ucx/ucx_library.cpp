#include "backend/transport/network/ucx/ucx_library.h"

#ifdef ZEROPG_WITH_UCX

#include <c10/util/Backtrace.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>
#include <vector>

#include "backend/transport/network/ucx/rdma.h"

namespace zeropg {
namespace {

namespace fs = std::filesystem;

template <typename Function>
void find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  TORCH_CHECK_WITH(DistBackendError, *function != nullptr, "UCX: it has no ", name, "; use UCX 1.14 or newer");
}

UcxLibrary load(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) C10_THROW_ERROR(DistBackendError, c10::str("UCX: ", ::dlerror()));
  UcxLibrary ucx;
  find(library, "ucp_config_read", &ucx.config_read);
  find(library, "ucp_config_modify", &ucx.config_modify);
  find(library, "ucp_config_release", &ucx.config_release);
  find(library, "ucp_init_version", &ucx.init_version);
  find(library, "ucp_cleanup", &ucx.cleanup);
  find(library, "ucp_worker_create", &ucx.worker_create);
  find(library, "ucp_worker_destroy", &ucx.worker_destroy);
  find(library, "ucp_worker_query", &ucx.worker_query);
  find(library, "ucp_worker_release_address", &ucx.worker_release_address);
  find(library, "ucp_worker_set_am_recv_handler", &ucx.worker_set_am_recv_handler);
  find(library, "ucp_worker_progress", &ucx.worker_progress);
  find(library, "ucp_worker_get_efd", &ucx.worker_get_efd);
  find(library, "ucp_worker_arm", &ucx.worker_arm);
  find(library, "ucp_ep_create", &ucx.ep_create);
  find(library, "ucp_ep_close_nbx", &ucx.ep_close_nbx);
  find(library, "ucp_am_send_nbx", &ucx.am_send_nbx);
  find(library, "ucp_am_recv_data_nbx", &ucx.am_recv_data_nbx);
  find(library, "ucp_am_data_release", &ucx.am_data_release);
  find(library, "ucp_mem_map", &ucx.mem_map);
  find(library, "ucp_mem_unmap", &ucx.mem_unmap);
  find(library, "ucp_request_check_status", &ucx.request_check_status);
  find(library, "ucp_request_free", &ucx.request_free);
  find(library, "ucs_status_string", &ucx.status_string);  // of libucs, which libucp brings along
  Dl_info info{};
  ucx.path = ::dladdr(reinterpret_cast<void*>(ucx.init_version), &info) != 0 ? info.dli_fname : path;
  return ucx;
}

// Whether it was built with verbs and finds a device: a context with nothing else can be made.
bool can_use_rdma(const UcxLibrary& ucx) {
  if (!machine_has_rdma()) return false;
  ucp_config_t* config = nullptr;
  if (ucx.config_read(nullptr, nullptr, &config) != UCS_OK) return false;
  ucx.config_modify(config, "TLS", "ib");
  ucp_params_t parameters{};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
  parameters.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  const bool is_made = ucx.init_version(UCP_API_MAJOR, UCP_API_MINOR, &parameters, config, &context) == UCS_OK;
  ucx.config_release(config);
  if (is_made) ucx.cleanup(context);
  return is_made;
}

// site-packages/torch/lib/libc10.so -> site-packages/libucx/lib/libucp.so.0
std::string path_of_wheel() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&::c10::get_backtrace), &info) == 0) return "";
  const fs::path packages = fs::path(info.dli_fname).parent_path().parent_path().parent_path();
  return packages / "libucx" / "lib" / "libucp.so.0";
}

UcxLibrary choose(const std::string& root) {
  if (!root.empty()) {
    UcxLibrary ucx = load(fs::path(root) / "lib" / "libucp.so.0");
    ucx.has_rdma = can_use_rdma(ucx);
    return ucx;
  }
  if (machine_has_rdma()) {
    try {
      UcxLibrary ucx = load("libucp.so.0");
      ucx.has_rdma = can_use_rdma(ucx);
      if (ucx.has_rdma) return ucx;
    } catch (const c10::DistBackendError&) {
      // None, or one that is too old: the wheel is next.
    }
  }
  const std::string wheel = path_of_wheel();
  std::error_code ignored;
  TORCH_CHECK_WITH(DistBackendError, fs::exists(wheel, ignored), "UCX: there is none at ", wheel,
                   "; run `pip install libucx-cu13`, or set ZEROPG_UCX_ROOT to the folder of another one");
  UcxLibrary ucx = load(wheel);
  ucx.has_rdma = can_use_rdma(ucx);
  return ucx;
}

}  // namespace

const UcxLibrary& ucx_library(const std::string& root) {
  static std::mutex mutex;
  static std::optional<UcxLibrary> library;  // a fact of the process, like every loaded library
  const std::lock_guard lock(mutex);
  if (!library) library = choose(root);
  return *library;
}

}  // namespace zeropg

#endif
