#include "backend/transport/network/ucx/ucx_worker.h"

#ifdef ZEROPG_WITH_UCX

#include <c10/util/Exception.h>

#include <utility>

namespace zeropg {

UcxWorker::UcxWorker(const UcxLibrary& ucx, const Plan& plan) : ucx_(ucx) {
  try {
    start(plan);
  } catch (...) {
    stop();
    if (context_ != nullptr) ucx_.cleanup(context_);
    throw;
  }
}

UcxWorker::~UcxWorker() {
  stop();
  ucx_.cleanup(context_);
}

void UcxWorker::start(const Plan& plan) {
  ucp_config_t* config = nullptr;
  check(ucx_.config_read(nullptr, nullptr, &config), "read its configuration");
  const std::string devices = !plan.devices.empty() ? plan.devices : ucx_.has_rdma ? "ib" : "tcp";
  ucx_.config_modify(config, "TLS", devices.c_str());
  ucx_.config_modify(config, "TCP_PUT_ENABLE", "n");
  // Otherwise a thread that reaches a peer waits in the kernel, for minutes where nobody answers.
  ucx_.config_modify(config, "TCP_CONN_NB", "y");
  ucx_.config_modify(config, "POSIX_ERROR_HANDLING", "y");  // without it UCX leaves shared memory alone
  ucp_params_t context{};
  context.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  context.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  context.estimated_num_eps = static_cast<size_t>(plan.likely_peers);
  const ucs_status_t status = ucx_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &context, config, &context_);
  ucx_.config_release(config);
  check(status, "start");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucx_.worker_create(context_, &worker, &worker_), "make a worker");
  check(ucx_.worker_get_efd(worker_, &descriptor_), "be waited for");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = plan.message_id;
  handler.cb = plan.on_message;
  handler.arg = plan.receiver;
  check(ucx_.worker_set_am_recv_handler(worker_, &handler), "receive");
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
  if (plan.devices.empty()) {
    attributes.field_mask |= UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
    attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  }
  check(ucx_.worker_query(worker_, &attributes), "tell its address");
  address_.assign(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucx_.worker_release_address(worker_, attributes.address);
}

void UcxWorker::stop() {
  if (worker_ != nullptr) ucx_.worker_destroy(std::exchange(worker_, nullptr));
}

void UcxWorker::check(ucs_status_t status, const char* what) const {
  TORCH_CHECK_WITH(DistBackendError, status == UCS_OK, "UCX at ", ucx_.path, " cannot ", what, ": ",
                   ucx_.status_string(status));
}

}  // namespace zeropg

#endif
