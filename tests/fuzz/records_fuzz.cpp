#include "tests/fuzz/records.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  zeropg::fuzz::records({data, bytes});
  return 0;
}
