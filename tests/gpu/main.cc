// Without a GPU most of these tests are skipped. Where nothing failed, the exit
// code says that.

#include <gtest/gtest.h>

#include <cstdio>

#include "runtime/device/cuda_device.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;  // SKIP_RETURN_CODE in tests/CMakeLists.txt
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  if (result != 0 || tessera::CudaDeviceCount() > 0) return result;
  std::puts("no CUDA device: the tests that need one were skipped");
  return kSkipped;
}
