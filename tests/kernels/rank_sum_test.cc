// Sums over ranks are the host's, bit for bit. Part of two binaries:
// tests/kernels/kernel_device.h.

#include "runtime/kernels/cuda/rank_sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/comm/reduce.h"
#include "runtime/float16.h"
#include "tests/kernels/kernel_device.h"

namespace tessera {
namespace {

// Numbers of mixed signs and magnitudes, so that the order of a sum shows.
std::vector<std::byte> Numbers(int source, int64_t count, DType dtype) {
  std::vector<std::byte> bytes(static_cast<size_t>(count * SizeOf(dtype)));
  for (int64_t i = 0; i < count; ++i) {
    const double x = CounterNormal(static_cast<uint64_t>(source) + 1,
                                   static_cast<uint64_t>(i)) *
                     ((i + source) % 3 == 0 ? 1e3 : 1.0);
    const auto single = static_cast<float>(x);
    const auto whole = static_cast<int32_t>(x * 1e6);
    std::byte* const place = bytes.data() + i * SizeOf(dtype);
    switch (dtype) {
      case DType::kFloat64:
        std::memcpy(place, &x, 8);
        break;
      case DType::kFloat32:
        std::memcpy(place, &single, 4);
        break;
      case DType::kInt32:
        std::memcpy(place, &whole, 4);
        break;
      case DType::kBFloat16:
      case DType::kFloat16:
        Narrow(&single, 1, dtype, place);
        break;
    }
  }
  return bytes;
}

TEST(RankSumKernels, EqualTheHostsBitForBit) {
  const auto device = MakeKernelDevice();
  if (device == nullptr) GTEST_SKIP() << "no CUDA device";
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                            DType::kFloat16, DType::kInt32}) {
    for (const int sources : {1, 2, 5}) {
      for (const int64_t count : {1, 255, 5000}) {
        const auto bytes = static_cast<size_t>(count * SizeOf(dtype));
        std::vector<std::vector<std::byte>> host;
        std::vector<const std::byte*> on_host;
        std::vector<const std::byte*> on_device;
        std::vector<std::byte*> allocated;
        for (int s = 0; s < sources; ++s) {
          host.push_back(Numbers(s, count, dtype));
          allocated.push_back(device->Allocate(bytes));
          device->Write(allocated.back(), host.back().data(), bytes);
          on_device.push_back(allocated.back());
        }
        for (const auto& source : host) on_host.push_back(source.data());
        std::vector<std::byte> expected(bytes);
        SumInOrder(on_host, expected.data(), nullptr, count, dtype, false);
        // In place of the last source.
        EnqueueRankSum(on_device, allocated.back(), count, dtype,
                       device->queue());
        EXPECT_EQ(device->queue().error, "");
        std::vector<std::byte> sum(bytes);
        device->Read(sum.data(), allocated.back(), bytes);
        EXPECT_EQ(std::memcmp(sum.data(), expected.data(), bytes), 0)
            << NameOf(dtype) << " of " << sources << " x " << count;
        for (std::byte* data : allocated) device->Free(data);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
