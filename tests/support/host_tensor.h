#pragma once
// A block of a tensor in host memory, for tests of kernels. A plain value that
// owns its elements and knows its place in the whole.

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "runtime/float16.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

class HostTensor {
 public:
  HostTensor() = default;
  // A whole tensor of zeros.
  HostTensor(Shape shape, DType dtype)
      : shape_(shape),
        offset_(shape.size(), 0),
        global_shape_(std::move(shape)),
        dtype_(dtype) {
    Allocate();
  }
  HostTensor(Shape shape, DType dtype, const std::vector<double>& values)
      : HostTensor(std::move(shape), dtype) {
    for (size_t i = 0; i < values.size(); ++i) {
      Set(static_cast<int64_t>(i), values[i]);
    }
  }

  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  int64_t elements() const {
    int64_t n = 1;
    for (int64_t extent : shape_) n *= extent;
    return n;
  }

  double At(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat64:
        return Element<double>(i);
      case DType::kFloat32:
        return Element<float>(i);
      case DType::kBFloat16:
        return ToFloat(Element<BFloat16>(i));
      case DType::kFloat16:
        return ToFloat(Element<Float16>(i));
      default:
        return Element<int32_t>(i);
    }
  }
  void Set(int64_t i, double value) {
    switch (dtype_) {
      case DType::kFloat64:
        Element<double>(i) = value;
        break;
      case DType::kFloat32:
        Element<float>(i) = static_cast<float>(value);
        break;
      case DType::kBFloat16:
        Element<BFloat16>(i) = ToBFloat16(static_cast<float>(value));
        break;
      case DType::kFloat16:
        Element<Float16>(i) = ToFloat16(static_cast<float>(value));
        break;
      default:
        Element<int32_t>(i) = static_cast<int32_t>(value);
    }
  }
  std::vector<double> Values() const {
    std::vector<double> values;
    for (int64_t i = 0; i < elements(); ++i) values.push_back(At(i));
    return values;
  }

  // Owned by this tensor.
  LocalTensor Local() const {
    return {.data = const_cast<char*>(Data()),
            .dtype = dtype_,
            .shape = shape_,
            .offset = offset_,
            .global_shape = global_shape_};
  }

  // A copy with other storage: floats become `dtype`, integers stay. `skew`
  // elements stand before the data, so that copies may differ in alignment.
  HostTensor As(DType dtype, int64_t skew = 0) const {
    HostTensor copy = *this;
    if (IsFloat(dtype_)) copy.dtype_ = dtype;
    copy.skew_ = skew;
    copy.Allocate();
    for (int64_t i = 0; i < elements(); ++i) copy.Set(i, At(i));
    return copy;
  }

  // The indices [begin, end) of dimension `dim` of this whole tensor.
  HostTensor Part(size_t dim, int64_t begin, int64_t end) const {
    Shape shape = shape_;
    shape[dim] = end - begin;
    HostTensor part(shape, dtype_);
    part.offset_[dim] = begin;
    part.global_shape_ = shape_;
    for (int64_t i = 0; i < part.elements(); ++i) {
      part.Set(i, At(part.GlobalIndex(i)));
    }
    return part;
  }
  // Adds a part's elements to this whole tensor.
  void Add(const HostTensor& part) {
    for (int64_t i = 0; i < part.elements(); ++i) {
      const int64_t global = part.GlobalIndex(i);
      Set(global, At(global) + part.At(i));
    }
  }
  // Makes a part believe that it is the whole.
  void ForgetPlace() {
    offset_.assign(shape_.size(), 0);
    global_shape_ = shape_;
  }

  bool SameBits(const HostTensor& other) const {
    return shape_ == other.shape_ && dtype_ == other.dtype_ &&
           std::memcmp(Data(), other.Data(),
                       static_cast<size_t>(elements() * SizeOf(dtype_))) == 0;
  }

 private:
  struct alignas(64) Line {
    char bytes[64] = {};
  };

  // Zeros. Storage is in units of cache lines, which align it.
  void Allocate() {
    const auto bytes =
        static_cast<size_t>((elements() + skew_) * SizeOf(dtype_));
    lines_.assign(bytes / sizeof(Line) + 1, Line());
  }
  const char* Data() const { return lines_[0].bytes + skew_ * SizeOf(dtype_); }
  template <typename T>
  const T& Element(int64_t i) const {
    return reinterpret_cast<const T*>(Data())[i];
  }
  template <typename T>
  T& Element(int64_t i) {
    return const_cast<T&>(std::as_const(*this).Element<T>(i));
  }
  int64_t GlobalIndex(int64_t local) const {
    int64_t global = 0;
    int64_t stride = 1;
    for (size_t dim = shape_.size(); dim-- > 0;) {
      global += stride * (offset_[dim] + local % shape_[dim]);
      local /= shape_[dim];
      stride *= global_shape_[dim];
    }
    return global;
  }

  Shape shape_;
  Shape offset_;
  Shape global_shape_;
  DType dtype_ = DType::kFloat64;
  int64_t skew_ = 0;
  std::vector<Line> lines_;
};

}  // namespace tessera
