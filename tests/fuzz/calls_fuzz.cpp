#include "tests/fuzz/calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  zeropg::fuzz::calls({data, bytes});
  return 0;
}
