// The GPU as a device: memory, copies, accounts, errors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/cpu_device.h"
#include "runtime/device/cuda_device.h"
#include "runtime/kernels/cuda/queue.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// Needs no GPU.
TEST(CudaDeviceTest, AGpuThatIsNotThereIsAnError) {
  const auto device = MakeCudaDevice(CudaDeviceCount());
  ASSERT_FALSE(device);
  EXPECT_EQ(device.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(device.error().message, HasSubstr("there is no GPU"));
  EXPECT_FALSE(MakeCudaDevice(-1));
}

// CUDA reads it when it starts, which the first of these calls makes it do.
TEST(CudaDeviceTest, ConnectionsAreSetBeforeCudaStarts) {
  constexpr char kVariable[] = "CUDA_DEVICE_MAX_CONNECTIONS";
  const std::string before = getenv(kVariable) ? getenv(kVariable) : "32";
  unsetenv(kVariable);
  (void)CudaDeviceCount();
  EXPECT_STREQ(getenv(kVariable), "32");
  EXPECT_NE(getenv("CUDA_DEVICE_ORDER"), nullptr);
  unsetenv(kVariable);
  (void)PropertiesOfGpu(0);
  EXPECT_STREQ(getenv(kVariable), "32");
  setenv(kVariable, "8", /*overwrite=*/1);
  (void)CudaDeviceCount();
  EXPECT_STREQ(getenv(kVariable), "8");
  setenv(kVariable, before.c_str(), /*overwrite=*/1);
}

class DeviceGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
    auto device = MakeCudaDevice(0);
    ASSERT_TRUE(device) << device.error().ToString();
    device_ = std::move(*device);
  }

  void* Allocate(int64_t bytes) {
    return device_->Allocate({bytes}, MemoryCategory::kActivation).value();
  }
  template <typename T>
  void* Upload(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    void* const data = Allocate(bytes);
    device_->Write(data, values.data(), {bytes});
    return data;
  }
  template <typename T>
  std::vector<T> Download(const void* data, size_t count) {
    std::vector<T> values(count);
    device_->Read(values.data(), data,
                  {static_cast<int64_t>(count * sizeof(T))});
    return values;
  }
  void ExpectWell() {
    const auto done = device_->Synchronize();
    EXPECT_TRUE(done) << done.error().ToString();
  }

  std::unique_ptr<CudaDevice> device_;
};

// 22 MB are more pieces than there are of staging memory, the last one ragged.
TEST_F(DeviceGpuTest, WriteReadAndZero) {
  std::vector<int> values(5'500'001);
  std::iota(values.begin(), values.end(), 17);
  void* const data = Upload(values);
  EXPECT_EQ(Download<int>(data, values.size()), values);
  device_->Zero(data, {4000});
  std::fill(values.begin(), values.begin() + 1000, 0);
  EXPECT_EQ(Download<int>(data, values.size()), values);
  ExpectWell();
}

// Host memory may be overwritten as soon as Write returns.
TEST_F(DeviceGpuTest, WriteTakesItsCopyBeforeItReturns) {
  std::vector<void*> data;
  std::vector<int> values(500'000);
  for (int i = 0; i < 20; ++i) {
    std::fill(values.begin(), values.end(), i);
    data.push_back(Upload(values));
  }
  for (int i = 0; i < 20; ++i) {
    const auto back = Download<int>(data[static_cast<size_t>(i)], 500'000);
    EXPECT_EQ(back, std::vector<int>(500'000, i));
  }
  ExpectWell();
}

// The same as on the CPU, for every width of word that the kernel copies by.
TEST_F(DeviceGpuTest, StridedCopiesEqualTheCpus) {
  std::vector<uint8_t> source(1 << 20);
  for (size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<uint8_t>(i * 31 + i / 251);
  }
  const std::vector<uint8_t> target(source.size(), 0xee);
  CpuDevice cpu;
  for (const int64_t run : {1, 2, 4, 8, 16, 48, 100}) {
    for (int dims = 0; dims <= kMaxDims; ++dims) {
      StridedCopy copy;
      copy.run_bytes = run;
      copy.dims = dims;
      // Innermost first: gaps of one run on the one side, none on the other.
      int64_t from_stride = 2 * run;
      int64_t to_stride = run;
      for (int d = dims - 1; d >= 0; --d) {
        const auto dim = static_cast<size_t>(d);
        copy.extents[dim] = d % 3 + 1;
        copy.from_strides[dim] = from_stride;
        copy.to_strides[dim] = to_stride;
        from_stride *= copy.extents[dim];
        to_stride *= copy.extents[dim];
      }
      ASSERT_LE(from_stride, static_cast<int64_t>(source.size()));
      std::vector<uint8_t> expected = target;
      cpu.Copy(expected.data(), source.data(), copy);
      void* const from = Upload(source);
      void* const to = Upload(target);
      device_->Copy(to, from, copy);
      EXPECT_EQ(Download<uint8_t>(to, target.size()), expected)
          << "run " << run << ", dims " << dims;
      device_->Free(from);
      device_->Free(to);
    }
  }
  ExpectWell();
}

TEST_F(DeviceGpuTest, TheAccountIsThatOfTheCpu) {
  void* const parameter =
      device_->Allocate({1000}, MemoryCategory::kParameter).value();
  void* const activation =
      device_->Allocate({77}, MemoryCategory::kActivation).value();
  EXPECT_EQ(device_->account().current().total.value, 1077);
  device_->Free(activation);
  EXPECT_EQ(device_->account().current().total.value, 1000);
  EXPECT_EQ(device_->account().peak().total.value, 1077);
  device_->Free(parameter);
  EXPECT_EQ(device_->account().current().total.value, 0);
}

TEST_F(DeviceGpuTest, AWarmDeviceReservesNothing) {
  const auto step = [&] {
    std::vector<void*> blocks;
    for (int64_t i = 1; i <= 64; ++i) blocks.push_back(Allocate(i * 1'000'000));
    for (void* block : blocks) device_->Free(block);
  };
  step();
  const Bytes reserved = device_->reserved();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(device_->reserved(), reserved);
}

// A petabyte. The device goes on.
TEST_F(DeviceGpuTest, OutOfMemoryIsAnErrorAndHarmsNothing) {
  const auto data =
      device_->Allocate({int64_t{1} << 50}, MemoryCategory::kGradient);
  ASSERT_FALSE(data);
  EXPECT_EQ(data.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(data.error().message, HasSubstr("cudaErrorMemoryAllocation"));
  const std::vector<int> values = {1, 2, 3};
  EXPECT_EQ(Download<int>(Upload(values), 3), values);
  ExpectWell();
}

TEST_F(DeviceGpuTest, StreamsAreOrderedByEvents) {
  auto stream = device_->MakeStream(StreamRole::kComm);
  ASSERT_TRUE(stream) << stream.error().ToString();
  EXPECT_TRUE(device_->Order(device_->queue(), *stream));
  auto event = device_->Record(*stream);
  ASSERT_TRUE(event) << event.error().ToString();
  EXPECT_TRUE(device_->Wait(*event));
  EXPECT_TRUE(device_->IsDone(*event).value());
  device_->Recycle(*event);
}

// Two queues in a capture: the second copies what the first wrote, the first
// goes on behind it. Replays take what is in memory then. What is before a
// replay and behind it in the queue keeps its order.
TEST_F(DeviceGpuTest, ACaptureIsReplayed) {
  const int queue = device_->MakeQueue(StreamRole::kCopyOut).value();
  constexpr int kBefore = 0, kFork = 1, kJoin = 2, kAfter = 3;
  std::vector<int> values(1000);
  void* const from = Upload(values);
  void* const middle = Upload(values);
  const std::vector<int> before(values.size(), 7);
  void* const to = Upload(before);
  const int64_t bytes = std::ssize(values) * int64_t{sizeof(int)};
  StridedCopy copy;
  copy.run_bytes = bytes;
  ExpectWell();
  ASSERT_TRUE(device_->BeginCapture());
  device_->Copy(middle, from, copy);
  device_->Mark(kFork);
  device_->UseQueue(queue);
  device_->Await(kFork);
  device_->Copy(to, middle, copy);
  device_->Mark(kJoin);
  device_->UseQueue(0);
  device_->Await(kJoin);
  device_->Zero(middle, {bytes});
  const auto graph = device_->EndCapture();
  ASSERT_TRUE(graph) << graph.error().ToString();
  EXPECT_EQ(Download<int>(to, values.size()), before);  // nothing has run
  for (int i = 1; i <= 3; ++i) {
    std::fill(values.begin(), values.end(), i);
    device_->Write(from, values.data(), {bytes});
    device_->Mark(kBefore);
    device_->Replay(*graph);
    device_->Mark(kAfter);
    EXPECT_EQ(Download<int>(to, values.size()), values);
    EXPECT_EQ(Download<int>(middle, values.size()), std::vector<int>(1000));
    ExpectWell();
    const auto replay = device_->Between(kBefore, kAfter);
    ASSERT_TRUE(replay) << replay.error().ToString();
    EXPECT_GT(replay->picoseconds, 0);
  }
}

// What is no part of a capture is told, and the device goes on.
TEST_F(DeviceGpuTest, ACaptureThatCannotBeIsAnError) {
  const std::vector<int> values = {1, 2, 3};
  void* const data = Upload(values);
  const int queue = device_->MakeQueue(StreamRole::kCopyOut).value();
  ExpectWell();
  ASSERT_TRUE(device_->BeginCapture());
  device_->Mark(0);
  device_->UseQueue(queue);
  device_->Await(0);
  device_->Zero(data, {8});
  device_->UseQueue(0);  // which does not wait for the other one
  EXPECT_FALSE(device_->EndCapture());
  EXPECT_EQ(Download<int>(data, 3), values);
  ExpectWell();
}

// Of calls that no graph has: where more than a queue takes without holding the
// host back are behind what waits for a peer, its watcher is called all the
// same.
TEST_F(DeviceGpuTest, TheWatcherIsCalledWhileKernelsAreEnqueued) {
  // Of two launches, as the norms are.
  static void* data = nullptr;
  data = Allocate(8);
  const Kernel twice = {.name = "twice", .run = [](const KernelCall& call) {
                          for (int i = 0; i < 2; ++i) {
                            (void)cudaMemsetAsync(data, i, 8,
                                                  call.queue->stream);
                          }
                        }};
  std::atomic<int> looks = 0;
  device_->set_while_waiting([&]() -> Result<void> {
    ++looks;
    return {};
  });
  // A peer that comes once the watcher has been called more often than calls
  // without a wait do it: 5 * 1000 / 32 = 156 times.
  device_->EnqueueOnHost([&]() -> Result<void> {
    while (looks < 160) std::this_thread::yield();
    return {};
  });
  for (int i = 0; i < 1000; ++i) {
    device_->Launch(twice, {});
    device_->Zero(data, {8});
    device_->Copy(data, static_cast<std::byte*>(data) + 4, {.run_bytes = 4});
    device_->Mark(0);
    device_->Await(0);
  }
  EXPECT_GE(looks, 160);
  ExpectWell();
}

// What is called while waiting can end a wait.
TEST_F(DeviceGpuTest, AWaitEndsWithTheErrorOfItsWatcher) {
  std::vector<char> large(256 << 20);
  void* const data = Allocate(static_cast<int64_t>(large.size()));
  device_->set_while_waiting(
      []() -> Result<void> { return InvalidInput("enough"); });
  // Some milliseconds of work, so that the wait does not find it done.
  for (int i = 0; i < 100; ++i) {
    device_->Zero(data, {static_cast<int64_t>(large.size())});
  }
  const auto waited = device_->Synchronize();
  device_->set_while_waiting(nullptr);
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().message, "enough");
  ExpectWell();
}

}  // namespace
}  // namespace tessera
