#include "runtime/device/cpu_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "planner/base/divide.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {

// Sizes are rounded up to an eighth of their power of two: buffers of nearly
// equal size (ragged shards) share memory, and at most an eighth is wasted.
size_t CapacityFor(int64_t bytes, size_t alignment) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 64));
  const size_t step = std::max<size_t>(std::bit_floor(size) / 8, alignment);
  return RoundUp(size, step);
}

// Makes memory that nobody owns useless: not a number in debug builds, and an
// error to touch under the address sanitizer.
void Disown([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifndef NDEBUG
  std::memset(data, 0xff, bytes);
#endif
#ifdef __SANITIZE_ADDRESS__
  ASAN_POISON_MEMORY_REGION(data, bytes);
#endif
}

void Own([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
#endif
}

// Blocks of whole pages are mappings of their own: what is released is the
// system's at once, and fragments nothing.
constexpr size_t kMappedBytes = 32 << 10;

void* Acquire(size_t capacity, size_t alignment) {
  if (capacity < kMappedBytes) {
    return ::operator new(capacity, std::align_val_t(alignment), std::nothrow);
  }
  void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

void ReleaseBlock(void* data, size_t capacity, size_t alignment) {
  Own(data, capacity);
  if (capacity < kMappedBytes) {
    ::operator delete(data, std::align_val_t(alignment));
  } else {
    munmap(data, capacity);
  }
}

}  // namespace

CpuDevice::~CpuDevice() {
  for (const auto& [data, allocation] : in_use_) {
    ReleaseBlock(data, allocation.capacity, alignment_);
  }
  for (const auto& [capacity, blocks] : free_) {
    for (void* data : blocks) ReleaseBlock(data, capacity, alignment_);
  }
}

// Largest first, until `wanted` more bytes from the system leave the pool and
// what is in use within the peak.
void CpuDevice::ReleasePool(size_t wanted) {
  const size_t peak = std::max(peak_bytes_, in_use_bytes_ + wanted);
  const size_t most = peak + peak / 32;
  for (auto it = free_.rbegin(); it != free_.rend(); ++it) {
    auto& [capacity, blocks] = *it;
    while (!blocks.empty()) {
      if (in_use_bytes_ + free_bytes_ + wanted <= most) return;
      ReleaseBlock(blocks.back(), capacity, alignment_);
      blocks.pop_back();
      free_bytes_ -= capacity;
    }
  }
}

Result<void*> CpuDevice::Allocate(Bytes size, MemoryCategory category) {
  const size_t capacity = CapacityFor(size.value, alignment_);
  const std::lock_guard lock(mutex_);
  std::vector<void*>& blocks = free_[capacity];
  void* data = nullptr;
  if (!blocks.empty()) {
    data = blocks.back();
    blocks.pop_back();
    free_bytes_ -= capacity;
  } else {
    ReleasePool(capacity);
    data = Acquire(capacity, alignment_);
    if (data == nullptr) {
      return Error{ErrorCode::kUnavailable,
                   "no host memory for " + std::to_string(size.value) +
                       " bytes of " + std::string(NameOf(category)),
                   ""};
    }
    Disown(data, capacity);
  }
  // Memory that files are read into goes on to the end of the last page.
  const auto used = static_cast<size_t>(size.value);
  Own(data, alignment_ == 64 ? used : RoundUp(used, alignment_));
  in_use_[data] = {size, capacity, category};
  in_use_bytes_ += capacity;
  peak_bytes_ = std::max(peak_bytes_, in_use_bytes_);
  account_.Add(category, size);
  return data;
}

void CpuDevice::Free(void* data) {
  const std::lock_guard lock(mutex_);
  const auto it = in_use_.find(data);
  TESSERA_CHECK(it != in_use_.end()) << "not in use: " << data;
  const Allocation& allocation = it->second;
  Own(data, allocation.capacity);
  Disown(data, allocation.capacity);
  account_.Remove(allocation.category, allocation.size);
  free_[allocation.capacity].push_back(data);
  in_use_bytes_ -= allocation.capacity;
  free_bytes_ += allocation.capacity;
  in_use_.erase(it);
}

void CpuDevice::Zero(void* data, Bytes size) {
  std::memset(data, 0, static_cast<size_t>(size.value));
}

void CpuDevice::Copy(void* to, const void* from, const StridedCopy& copy) {
  for (int d = 0; d < copy.dims; ++d) {
    TESSERA_CHECK(copy.extents[static_cast<size_t>(d)] >= 1) << d;
  }
  const auto run_bytes = static_cast<size_t>(copy.run_bytes);
  std::array<int64_t, kMaxDims> at = {};
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  for (;;) {
    std::memcpy(target, source, run_bytes);
    int dim = copy.dims - 1;
    for (; dim >= 0; --dim) {
      const auto d = static_cast<size_t>(dim);
      target += copy.to_strides[d];
      source += copy.from_strides[d];
      if (++at[d] < copy.extents[d]) break;
      target -= copy.to_strides[d] * copy.extents[d];
      source -= copy.from_strides[d] * copy.extents[d];
      at[d] = 0;
    }
    if (dim < 0) return;
  }
}

void CpuDevice::Write(void* device_to, const void* host_from, Bytes size) {
  std::memcpy(device_to, host_from, static_cast<size_t>(size.value));
}

void CpuDevice::Read(void* host_to, const void* device_from, Bytes size) {
  std::memcpy(host_to, device_from, static_cast<size_t>(size.value));
}

Result<const Kernel*> CpuDevice::FindKernel(std::string_view kernel) const {
  return FindCpuKernel(kernel);
}

}  // namespace tessera
