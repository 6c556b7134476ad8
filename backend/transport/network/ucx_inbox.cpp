#include "backend/transport/network/ucx_inbox.h"

#ifdef ZEROPG_WITH_UCX

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

namespace zeropg {

std::span<const std::byte> UcxInbox::Message::payload() const {
  if (fetched) return {fetched->data, frame.payload_bytes};
  if (held != nullptr) return {static_cast<const std::byte*>(held), frame.payload_bytes};
  return own.span();
}

UcxInbox::Message& UcxInbox::expect(const Envelope& envelope) {
  Message& message = ahead_[envelope.number];
  message.inbox = this;
  message.frame = envelope.frame;
  message.payload_digest = envelope.payload_digest;
  return message;
}

UcxInbox::Numbered::iterator UcxInbox::forget(Numbered::iterator message, UcxWorker& worker, UcxBuffers& buffers) {
  if (message->second.fetched) buffers.give_back(*message->second.fetched);
  if (message->second.held != nullptr) worker.ucx().am_data_release(worker.handle(), message->second.held);
  return ahead_.erase(message);
}

void UcxInbox::forget_all_that_came(UcxWorker& worker, UcxBuffers& buffers) {
  for (auto next = ahead_.begin(); next != ahead_.end();) {
    next = next->second.has_come ? forget(next, worker, buffers) : std::next(next);
  }
}

bool UcxInbox::hand_over(UcxWorker& worker, UcxBuffers& buffers, FrameSink& sink) {
  while (!ahead_.empty() && ahead_.begin()->first == taken_ && ahead_.begin()->second.has_come) {
    if (sink.has_enough()) return false;
    Message& message = ahead_.begin()->second;
    const FrameHeader frame = message.frame;
    if (!std::exchange(message.is_checked, true)) {
      sink.note_sign_of_life(peer_);
      sink.check_frame(peer_, frame);
    }
    // To where it is awaited.
    std::span<const std::byte> rest = message.payload().subspan(message.placed);
    while (!rest.empty()) {
      const std::span<std::byte> place = sink.place_for(peer_, frame);
      if (place.empty()) break;
      const size_t bytes = std::min(place.size(), rest.size());
      std::memcpy(place.data(), rest.data(), bytes);
      rest = rest.subspan(bytes);
      message.placed += bytes;
      sink.note_placed(peer_, frame, bytes);
    }
    if (!rest.empty() && sink.has_enough()) return false;  // the next place is for the rest
    // What is left, in memory of its own.
    Payload payload;
    if (message.own.data && message.placed == 0) {
      payload = std::move(message.own);
    } else if (!rest.empty()) {
      payload = {std::make_unique_for_overwrite<std::byte[]>(rest.size()), rest.size()};
      std::memcpy(payload.data.get(), rest.data(), rest.size());
    }
    forget(ahead_.begin(), worker, buffers);
    ++taken_;
    sink.take_frame(peer_, frame, std::move(payload));
  }
  return true;
}

}  // namespace zeropg

#endif
