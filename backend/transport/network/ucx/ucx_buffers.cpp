#include "backend/transport/network/ucx/ucx_buffers.h"

#ifdef ZEROPG_WITH_UCX

#include <c10/util/Exception.h>

#include <cstdlib>
#include <new>
#include <utility>

namespace zeropg {
namespace {

constexpr size_t kRegisteredAtOnce = 4;  // buffers
constexpr size_t kPageBytes = 4096;

}  // namespace

void UcxBuffers::Free::operator()(std::byte* data) const { std::free(data); }

UcxBuffers::~UcxBuffers() {
  for (ucp_mem_h registration : registrations_) ucx_.mem_unmap(context_, registration);
}

UcxBuffers::Buffer UcxBuffers::take() {
  if (free_.empty()) make_more();
  const Buffer buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void UcxBuffers::make_more() {
  const size_t bytes = kRegisteredAtOnce * bytes_of_each_;
  free_.reserve(kRegisteredAtOnce * (registrations_.size() + 1));  // for all: give_back() runs where nothing may throw
  std::unique_ptr<std::byte, Free> memory(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  ucp_mem_map_params_t parameters{};
  parameters.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  parameters.address = memory.get();
  parameters.length = bytes;
  ucp_mem_h registration = nullptr;
  const ucs_status_t status = ucx_.mem_map(context_, &parameters, &registration);
  TORCH_CHECK_WITH(DistBackendError, status == UCS_OK, "UCX at ", ucx_.path, " cannot register ", bytes,
                   " bytes of memory: ", ucx_.status_string(status),
                   "; look at `ulimit -l`, which limits locked memory");
  for (size_t i = 0; i < kRegisteredAtOnce; ++i) free_.push_back({memory.get() + i * bytes_of_each_, registration});
  registrations_.push_back(registration);
  memory_.push_back(std::move(memory));
}

}  // namespace zeropg

#endif
