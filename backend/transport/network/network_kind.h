// What carries bytes between nodes.
#pragma once

#include <cstdint>

namespace zeropg {

enum class NetworkKind : uint8_t {
  kAutomatic,  // UCX where every rank has it with RDMA, else TCP
  kTcp,        // our own frames over TCP
  kUcx,
};

}  // namespace zeropg
