#include "backend/transport/network/ucx/ucx_outbox.h"

#ifdef ZEROPG_WITH_UCX

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeropg {

void UcxOutbox::post(int32_t peer, ucp_ep_h endpoint, unsigned message_id, Header header,
                     std::span<const std::byte> payload, bool is_fetched) {
  if (idle_.empty()) {
    idle_.reserve(messages_.size() + 1);  // for all of them: finish() runs where nothing may be thrown
    idle_.push_back(&messages_.emplace_back());
  }
  Message& message = *idle_.back();
  if (is_fetched) message.registered = buffers_.take();
  idle_.pop_back();
  message.outbox = this;
  message.peer = peer;
  message.bytes = header.size() + payload.size();
  std::copy(header.begin(), header.end(), message.header.begin());
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  parameters.cb.send = on_sent;
  parameters.user_data = &message;
  const std::byte* data = nullptr;
  if (is_fetched) {
    std::memcpy(message.registered->data, payload.data(), payload.size());
    data = message.registered->data;
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    parameters.memh = message.registered->registration;
    parameters.flags = UCP_AM_SEND_FLAG_RNDV;
  } else {
    message.payload.assign(payload.begin(), payload.end());
    data = message.payload.data();
    parameters.flags = UCP_AM_SEND_FLAG_EAGER;
  }
  in_flight_bytes_ += message.bytes;
  ucs_status_ptr_t request = ucx_.am_send_nbx(endpoint, message_id, message.header.data(), message.header.size(), data,
                                              payload.size(), &parameters);
  if (!UCS_PTR_IS_PTR(request)) finish(message, UCS_PTR_STATUS(request));
}

void UcxOutbox::on_sent(void* request, ucs_status_t status, void* message) {
  auto* sent = static_cast<Message*>(message);
  UcxOutbox* outbox = sent->outbox;
  outbox->finish(*sent, status);
  outbox->ucx_.request_free(request);
}

void UcxOutbox::finish(Message& message, ucs_status_t status) {
  if (message.registered) buffers_.give_back(*std::exchange(message.registered, std::nullopt));
  in_flight_bytes_ -= message.bytes;
  idle_.push_back(&message);
  on_done_(message.peer, message.bytes, status);
}

}  // namespace zeropg

#endif
