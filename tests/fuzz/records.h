// What anybody may write to the rendezvous store.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "backend/bootstrap/sockets/tcp_socket.h"
#include "backend/bootstrap/store_records.h"

namespace zeropg::fuzz {

// The first byte says what the rest is taken for. What is read without an error is written back as it was.
inline void records(std::span<const uint8_t> input) {
  if (input.empty()) return;
  const std::string_view bytes(reinterpret_cast<const char*>(input.data()) + 1, input.size() - 1);
  try {
    switch (input[0] % 6) {
      case 0:
        if (encode(decode_record(bytes)) != bytes) std::abort();
        break;
      case 1: {
        const GroupMap map = decode_map(bytes, 1 + input[0] / 6);
        if (map.error.empty() && encode(map) != bytes) std::abort();
        break;
      }
      case 2: {
        const TcpAddress address = decode_tcp_address(bytes);
        if (decode_tcp_address(encode(address)).hosts != address.hosts) std::abort();
        break;
      }
      case 4:
        if (encode(decode_break(bytes)) != bytes) std::abort();
        break;
      case 5:
        if (encode_ranks(decode_ranks(bytes, 1 + input[0] / 6)) != bytes) std::abort();
        break;
      default:
        verify_address({"group", "a secret that no input knows"}, 1, bytes);
        std::abort();
    }
  } catch (const c10::DistBackendError&) {
    // Refused.
  }
}

}  // namespace zeropg::fuzz
