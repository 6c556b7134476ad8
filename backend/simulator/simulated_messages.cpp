#include "backend/simulator/simulated_messages.h"

#include <algorithm>
#include <string>

#include "backend/collectives/schedule/encodings.h"

namespace zeropg {

SimulatedMessages::SimulatedMessages(const SimulatorOptions& options, const SimulatedNodes& nodes,
                                     const RankPrograms& programs, SimulatedMemory& memory,
                                     std::vector<RankAccount>& accounts)
    : options_(options),
      nodes_(nodes),
      programs_(programs),
      memory_(memory),
      accounts_(accounts),
      ranks_(options.world_size) {}

bool SimulatedMessages::can_send(int32_t rank) const {
  const int32_t peer = programs_.step_of(rank).peer;
  const auto mailbox = mailboxes_.find({rank, peer});
  return mailbox == mailboxes_.end() || mailbox->second.used_bytes < nodes_.capacity(rank, peer);
}

bool SimulatedMessages::can_receive(int32_t rank) const {
  const auto mailbox = mailboxes_.find({programs_.step_of(rank).peer, rank});
  return mailbox != mailboxes_.end() && !mailbox->second.pieces.empty();
}

bool SimulatedMessages::send(int32_t rank, Dice& dice) {
  const Step& step = programs_.step_of(rank);
  Message& message = ranks_[rank];
  check_peer(rank);
  const int64_t length = sent_length(rank);
  if (message.moved_bytes == 0) {
    accounts_[rank].traffic.sent_bytes[step.peer] += length;
    message.arrival_us = start(rank, step.peer, length);
  }
  Mailbox& mailbox = mailboxes_[{rank, step.peer}];
  const int64_t room = std::min(length - message.moved_bytes, nodes_.capacity(rank, step.peer) - mailbox.used_bytes);
  const int64_t bytes = room == 0 || dice.draw(2) == 0 ? room : 1 + dice.draw(room);
  mailbox.pieces.push_back({.size = bytes, .bytes = {}, .arrival_us = message.arrival_us});
  const std::byte* source = memory_.resolve(rank, step.source, length, false) + message.moved_bytes;
  mailbox.pieces.back().bytes.assign(source, source + bytes);
  mailbox.used_bytes += bytes;
  message.moved_bytes += bytes;
  if (message.moved_bytes < length) return false;
  message.moved_bytes = 0;
  return true;
}

bool SimulatedMessages::receive(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  Message& message = ranks_[rank];
  check_peer(rank);
  Mailbox& mailbox = mailboxes_[{step.peer, rank}];
  Mailbox::Piece& piece = mailbox.pieces.front();
  const int64_t bytes = std::min(received_length(rank) - message.moved_bytes, piece.size);
  message.received.resize(static_cast<size_t>(message.moved_bytes + bytes));
  std::copy_n(piece.bytes.begin(), bytes, message.received.begin() + message.moved_bytes);
  piece.bytes.erase(piece.bytes.begin(), piece.bytes.begin() + bytes);
  take_time_to_receive(rank, step.peer, piece.arrival_us, bytes);
  piece.size -= bytes;
  if (piece.size == 0) mailbox.pieces.pop_front();
  mailbox.used_bytes -= bytes;
  message.moved_bytes += bytes;
  const int64_t length = received_length(rank);
  if (message.moved_bytes < length) return false;
  if (!nodes_.is_near(rank, step.peer)) accounts_[rank].clock.take_far(options_.model);
  std::copy_n(message.received.begin(), length, memory_.resolve(rank, step.destination, step.bytes, true));
  message.moved_bytes = 0;
  return true;
}

void SimulatedMessages::check_all_received() const {
  for (const auto& [pair, mailbox] : mailboxes_) {
    if (mailbox.used_bytes == 0) continue;
    throw SimulationError(std::to_string(mailbox.used_bytes) + " bytes from rank " + std::to_string(pair.first) +
                          " to rank " + std::to_string(pair.second) + " were sent but never received");
  }
}

// Of a message, or of as much of it as is known yet.
int64_t SimulatedMessages::sent_length(int32_t rank) {
  const Step& step = programs_.step_of(rank);
  if (!step.is_sized) return step.bytes;
  return kSizeBytes + get_size(memory_.resolve_as<const std::byte>(rank, step.source, step.bytes, false));
}

int64_t SimulatedMessages::received_length(int32_t rank) const {
  const Step& step = programs_.step_of(rank);
  const Message& message = ranks_[rank];
  if (!step.is_sized) return step.bytes;
  if (message.moved_bytes < kSizeBytes) return kSizeBytes;
  const int64_t length = kSizeBytes + get_size(message.received);
  if (length > step.bytes) programs_.fail(rank, "a message of " + std::to_string(length) + " bytes for that room");
  return length;
}

// When it begins to arrive; within a node, where the sender copies it, when it has arrived.
double SimulatedMessages::start(int32_t rank, int32_t peer, int64_t bytes) {
  RankClock& clock = accounts_[rank].clock;
  return nodes_.is_near(rank, peer) ? clock.send_near(nodes_.link(rank, peer), bytes)
                                    : clock.send_far(nodes_.link(rank, peer), bytes, options_.model);
}

void SimulatedMessages::take_time_to_receive(int32_t rank, int32_t peer, double arrival_us, int64_t bytes) {
  RankClock& clock = accounts_[rank].clock;
  if (nodes_.is_near(rank, peer)) {
    clock.receive_near(arrival_us);
  } else {
    clock.receive_far(nodes_.link(peer, rank), arrival_us, bytes);
  }
}

void SimulatedMessages::check_peer(int32_t rank) const {
  const Step& step = programs_.step_of(rank);
  if (step.peer < 0 || step.peer >= options_.world_size || step.peer == rank) {
    programs_.fail(rank, "there is no such peer");
  }
  // Between nodes, and where counts are not announced, there is still the header, which says just that.
  const bool has_header = !nodes_.is_near(rank, step.peer) || options_.world_size > kMostAnnouncedBlocks;
  if (step.bytes == 0 && !has_header) programs_.fail(rank, "a message without bytes");
}

}  // namespace zeropg
