#include "tests/fuzz/frames.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  zeropg::fuzz::frames({data, bytes});
  return 0;
}
