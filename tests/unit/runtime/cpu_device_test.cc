#include "runtime/device/cpu_device.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "runtime/device/process_memory.h"

namespace tessera {
namespace {

constexpr auto kActivations = static_cast<size_t>(MemoryCategory::kActivation);
constexpr auto kGradients = static_cast<size_t>(MemoryCategory::kGradient);

TEST(CpuDevice, PeakIsThePartsAtOneMoment) {
  CpuDevice device;
  void* const a = *device.Allocate({1000}, MemoryCategory::kActivation);
  device.Free(a);
  void* const b = *device.Allocate({600}, MemoryCategory::kGradient);
  void* const c = *device.Allocate({500}, MemoryCategory::kActivation);
  // 1000 of activations, then 600 + 500: the peak is 1100 and not 1600.
  const MemoryUse& peak = device.account().peak();
  EXPECT_EQ(peak.total.value, 1100);
  EXPECT_EQ(peak.parts[kActivations].value, 500);
  EXPECT_EQ(peak.parts[kGradients].value, 600);
  device.Free(b);
  device.Free(c);
  EXPECT_EQ(device.account().current(), MemoryUse());
  EXPECT_EQ(device.account().peak().total.value, 1100);
}

TEST(CpuDevice, FreedMemoryIsUsedAgain) {
  CpuDevice device;
  void* const a = *device.Allocate({4000}, MemoryCategory::kActivation);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 64, 0u);
  device.Free(a);
  // 3990 rounds up to the same size: eighths of 2048 are 256.
  void* const b = *device.Allocate({3990}, MemoryCategory::kGradient);
  EXPECT_EQ(a, b);
  void* const c = *device.Allocate({4000}, MemoryCategory::kGradient);
  EXPECT_NE(b, c);
  device.Free(b);
  device.Free(c);
}

// The sanitizers' allocators abort instead, and keep accounts of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Buffers of many sizes, one after another: 40 to 120 MB each, 40 to 160 MB
// together. A pool that kept each size would hold 40 + 60 + 80 + 100 + 120.
TEST(CpuDevice, TheProcessHoldsWhatTheAccountSays) {
  const Bytes before = ResidentBytes();
  ResetPeakResident();
  CpuDevice device;
  const auto touch = [&](int64_t megabytes) {
    const Bytes size{megabytes * 1'000'000};
    void* const data = *device.Allocate(size, MemoryCategory::kActivation);
    std::memset(data, 1, static_cast<size_t>(size.value));
    return data;
  };
  void* const kept = touch(40);
  for (int64_t megabytes : {60, 80, 100, 120, 90, 70}) {
    device.Free(touch(megabytes));
  }
  device.Free(kept);
  const auto account = static_cast<double>(device.account().peak().total.value);
  EXPECT_EQ(account, 160e6);
  const auto process =
      static_cast<double>((PeakResidentBytes() - before).value);
  EXPECT_NEAR(process / account, 1, 0.05);
}

TEST(CpuDevice, NoMemoryIsAnError) {
  CpuDevice device;
  const auto result =
      device.Allocate({int64_t{1} << 50}, MemoryCategory::kParameter);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(device.account().current(), MemoryUse());
}

#endif

TEST(CpuDevice, StridedCopyPicksColumns) {
  CpuDevice device;
  // Columns 1 and 2 of a 3x4 matrix into a 3x2 matrix.
  const int32_t from[12] = {0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23};
  int32_t to[6] = {};
  StridedCopy copy;
  copy.run_bytes = 8;
  copy.dims = 1;
  copy.extents[0] = 3;
  copy.from_strides[0] = 16;
  copy.to_strides[0] = 8;
  device.Copy(to, from + 1, copy);
  const int32_t expected[6] = {1, 2, 11, 12, 21, 22};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(to[i], expected[i]) << i;
  // A grid without a point is no copy.
  copy.extents[0] = 0;
  EXPECT_DEATH(device.Copy(to, from, copy), "check failed");
}

}  // namespace
}  // namespace tessera
