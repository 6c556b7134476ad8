#include "tests/fuzz/encodings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  zeropg::fuzz::encodings({data, bytes});
  return 0;
}
