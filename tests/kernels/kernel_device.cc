#include "tests/kernels/kernel_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// A tensor on the device, with margins that nobody may touch, nor gaps between
// its rows.
class OnDevice {
 public:
  OnDevice(KernelDevice& device, const LocalTensor& tensor, bool filled)
      : device_(device), host_(static_cast<std::byte*>(tensor.data)) {
    const auto elements = static_cast<size_t>(tensor.elements());
    const auto size = static_cast<size_t>(SizeOf(tensor.dtype));
    row_ = stride_ = bytes_ = elements * size;
    if (tensor.row_stride > 0 && elements > 0) {
      row_ = static_cast<size_t>(tensor.row) * size;
      stride_ = static_cast<size_t>(tensor.row_stride) * size;
      bytes_ = (bytes_ / row_ - 1) * stride_ + row_;
    }
    if (host_ == nullptr) return;
    front_ = kMargin + reinterpret_cast<uintptr_t>(host_) % kMargin;
    before_.assign(front_ + bytes_ + kMargin, kPoison);
    if (filled) {
      ForEachRow([&](size_t at) {
        std::memcpy(before_.data() + front_ + at, host_ + at, row_);
      });
    }
    memory_ = device.Allocate(before_.size());
    device.Write(memory_, before_.data(), before_.size());
    device.Guard(memory_, front_);
    device.Guard(data() + bytes_, kMargin);
    ForEachRow([&](size_t at) {
      if (at + row_ < bytes_) device.Guard(data() + at + row_, stride_ - row_);
    });
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (memory_ != nullptr) device_.Free(memory_);
  }

  std::byte* data() const {
    return memory_ == nullptr ? nullptr : memory_ + front_;
  }

  // `written`: the tensor may have changed, and goes back.
  void Return(bool written, const std::string& name) {
    if (memory_ == nullptr) return;
    device_.Unguard(memory_, before_.size());
    std::vector<unsigned char> after(before_.size());
    device_.Read(after.data(), memory_, after.size());
    if (written) {
      ForEachRow([&](size_t at) {
        std::memcpy(host_ + at, after.data() + front_ + at, row_);
        std::memcpy(before_.data() + front_ + at, after.data() + front_ + at,
                    row_);
      });
    }
    for (size_t i = 0; i < after.size(); ++i) {
      ASSERT_EQ(after[i], before_[i])
          << "written to: byte " << static_cast<int64_t>(i - front_) << " of "
          << name << ", which has " << bytes_;
    }
  }

 private:
  // body(where it begins), in bytes.
  template <typename Body>
  void ForEachRow(Body body) const {
    for (size_t at = 0; at < bytes_; at += stride_) body(at);
  }

  static constexpr size_t kMargin = 256;
  static constexpr unsigned char kPoison = 0xff;

  KernelDevice& device_;
  std::byte* host_;
  size_t bytes_;
  size_t row_;
  size_t stride_;
  size_t front_ = 0;
  std::vector<unsigned char> before_;
  std::byte* memory_ = nullptr;
};

// As bytes of the device.
LocalTensor AsTensor(StepNumbers& numbers) {
  static_assert(sizeof(StepNumbers) % sizeof(int32_t) == 0);
  LocalTensor tensor;
  tensor.data = &numbers;
  tensor.dtype = DType::kInt32;
  tensor.shape = {sizeof(StepNumbers) / sizeof(int32_t)};
  return tensor;
}

std::string ErrorOnDevice(KernelDevice& device, const Kernel& kernel,
                          const KernelCall& call, bool in_place);

}  // namespace

void RunOnDevice(KernelDevice& device, std::string_view kernel,
                 const KernelCall& call, bool in_place) {
  const auto found = FindCudaKernel(kernel);
  ASSERT_TRUE(found) << found.error().message;
  RunOnDevice(device, **found, call, in_place);
}

void RunOnDevice(KernelDevice& device, const Kernel& kernel,
                 const KernelCall& call, bool in_place) {
  EXPECT_EQ(ErrorOnDevice(device, kernel, call, in_place), "") << kernel.name;
}

std::string ErrorOnDevice(KernelDevice& device, std::string_view kernel,
                          const KernelCall& call, bool in_place) {
  const auto found = FindCudaKernel(kernel);
  EXPECT_TRUE(found) << found.error().message;
  return ErrorOnDevice(device, **found, call, in_place);
}

namespace {

std::string ErrorOnDevice(KernelDevice& device, const Kernel& kernel,
                          const KernelCall& call, bool in_place) {
  std::vector<std::unique_ptr<OnDevice>> tensors;
  const auto upload = [&](std::span<const LocalTensor> side, bool filled) {
    std::vector<LocalTensor> uploaded(side.begin(), side.end());
    for (LocalTensor& tensor : uploaded) {
      tensors.push_back(std::make_unique<OnDevice>(device, tensor, filled));
      tensor.data = tensors.back()->data();
    }
    return uploaded;
  };
  const std::vector<LocalTensor> operands = upload(call.operands, true);
  const std::vector<LocalTensor> results =
      upload(call.results, call.accumulate || in_place);
  StepNumbers of_step;
  if (call.numbers != nullptr) of_step = *call.numbers;
  const OnDevice numbers(device, AsTensor(of_step), true);
  KernelCall there = call;
  there.operands = operands;
  there.results = results;
  there.queue = &device.queue();
  if (call.numbers != nullptr) {
    there.numbers = reinterpret_cast<const StepNumbers*>(numbers.data());
  }
  kernel.run(there);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool is_operand = i < operands.size();
    tensors[i]->Return(
        !is_operand, std::string(kernel.name) + "'s " +
                         (is_operand ? "operand " : "result ") +
                         std::to_string(is_operand ? i : i - operands.size()));
  }
  return std::exchange(device.queue().error, {});
}

}  // namespace

void RunListOnDevice(KernelDevice& device, std::string_view kernel,
                     std::span<const KernelCall> calls) {
  struct Uploaded {
    std::unique_ptr<OnDevice> tensor;
    bool written = false;
  };
  std::map<void*, Uploaded> tensors;
  const auto upload = [&](std::span<const LocalTensor> side, bool written) {
    std::vector<LocalTensor> uploaded(side.begin(), side.end());
    for (LocalTensor& tensor : uploaded) {
      Uploaded& once = tensors[tensor.data];
      if (once.tensor == nullptr) {
        once.tensor = std::make_unique<OnDevice>(device, tensor, true);
      }
      once.written = once.written || written;
      tensor.data = once.tensor->data();
    }
    return uploaded;
  };
  std::deque<std::vector<LocalTensor>> sides;
  std::vector<KernelCall> there(calls.begin(), calls.end());
  for (KernelCall& call : there) {
    call.operands = sides.emplace_back(upload(call.operands, false));
    call.results = sides.emplace_back(upload(call.results, true));
    call.queue = &device.queue();
  }
  const auto found = FindCudaKernel(kernel);
  ASSERT_TRUE(found) << found.error().message;
  ASSERT_NE((*found)->run_list, nullptr) << kernel;
  (*found)->run_list(there);
  for (const auto& [data, once] : tensors) {
    once.tensor->Return(once.written, std::string(kernel) + "'s tensor");
  }
  EXPECT_EQ(device.queue().error, "") << kernel;
  device.queue().error.clear();
}

}  // namespace tessera
