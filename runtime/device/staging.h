#pragma once
// Memory for one call, accounted as communication and freed on the way out.

#include <utility>

#include "runtime/device/device.h"

namespace tessera {

class Staging {
 public:
  static Result<Staging> Allocate(RankDevice& device, Bytes size) {
    TESSERA_TRY(void* const data,
                device.Allocate(size, MemoryCategory::kCommunication));
    return Staging(device, data);
  }
  Staging(Staging&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
  Staging& operator=(Staging&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Staging() {
    if (data_ != nullptr) device_->Free(data_);
  }

  void* data() const { return data_; }

 private:
  Staging(RankDevice& device, void* data) : device_(&device), data_(data) {}

  RankDevice* device_;
  void* data_;
};

}  // namespace tessera
