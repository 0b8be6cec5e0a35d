#pragma once
// What the CUDA kernels share: access to tensors of every floating-point type,
// and their dispatch by it. For .cu files.
//
// Arithmetic is in fp32. A thread works on vectors of kVector elements that
// begin at multiples of kVector in their tensor, which it loads and stores 128
// bits at a time where the tensor is aligned; what is computed, and in which
// order, does not depend on that.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "planner/base/check.h"
#include "planner/base/divide.h"
#include "runtime/float16.h"
#include "runtime/kernels/cuda/launch.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

inline constexpr int kVector = 8;

// ---- Values -----------------------------------------------------------------

__device__ inline float Fp32(float x) {
  return x;
}
__device__ inline float Fp32(BFloat16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
__device__ inline float Fp32(Float16 x) {
  return __half2float(__ushort_as_half(x.bits));
}

// Rounds to nearest even.
template <typename T>
__device__ T Rounded(float x);
template <>
__device__ inline float Rounded(float x) {
  return x;
}
template <>
__device__ inline BFloat16 Rounded(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ inline Float16 Rounded(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

__device__ inline float Sigmoid(float x) {
  return __fdividef(1.0F, 1.0F + expf(-x));
}

// The elements of a vector that an operation is about: [begin, end).
struct Span {
  int begin = 0;
  int end = kVector;

  __device__ bool Has(int j) const { return begin <= j && j < end; }
  __device__ bool Whole() const { return begin == 0 && end == kVector; }
};

// All of them, as is known at compile time.
struct WholeSpan {
  __device__ static constexpr bool Has(int) { return true; }
  __device__ operator Span() const { return {}; }
};

// The first elements of a vector of which `left` are there.
__device__ inline Span FirstOf(int64_t left) {
  return {0, static_cast<int>(left < kVector ? left : int64_t{kVector})};
}

// ---- Vectors in memory ------------------------------------------------------

// 16 bytes, loaded and stored at once. nvcc makes of the store of a struct, or
// of four floats, a store for each of its elements: hence the instruction.
struct alignas(16) Words {
  uint32_t of[4];
};

__device__ inline Words LoadWords(const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  return {{words.x, words.y, words.z, words.w}};
}
__device__ inline void StoreWords(const Words& words, void* to) {
#ifdef TESSERA_EMULATE_CUDA
  *static_cast<Words*>(to) = words;
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(words.of[0]), "r"(words.of[1]), "r"(words.of[2]),
               "r"(words.of[3])
               : "memory");
#endif
}

// A vector as it is stored: registers for the time between load and use, half
// of those of its values where these have 16 bits.
template <typename T>
struct Stored {
  static constexpr int kWords = kVector * int{sizeof(T)} / 16;
  Words words[kWords];

  __device__ void Load(const T* from) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = LoadWords(from + w * kEach);
  }
  __device__ void Store(T* to) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) StoreWords(words[w], to + w * kEach);
  }
  __device__ void Unpack(float (&x)[kVector]) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = Fp32(Element(j));
  }
  __device__ void Pack(const float (&x)[kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) SetElement(j, Rounded<T>(x[j]));
  }
  // j is known at compile time.
  __device__ T Element(int j) const {
    const uint32_t word = words[j / kEach].of[j % kEach / kOfWord];
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word);
    } else {
      return {static_cast<uint16_t>(word >> (16 * (j % kOfWord)))};
    }
  }
  __device__ void SetElement(int j, T value) {
    uint32_t& word = words[j / kEach].of[j % kEach / kOfWord];
    if constexpr (sizeof(T) == 4) {
      word = __float_as_uint(value);
    } else if (j % kOfWord == 0) {
      word = value.bits;
    } else {
      word |= uint32_t{value.bits} << 16;
    }
  }

 private:
  static constexpr int kEach = 16 / int{sizeof(T)};  // elements of 16 bytes
  static constexpr int kOfWord = 4 / int{sizeof(T)};
};

// ---- Tensors ----------------------------------------------------------------

// Storage as dtypes tell, for calls whose tensors are not all of one type, and
// for the few numbers of each row (statistics) or call.
struct Any {};

// The elements of a tensor, which are T; a value that is passed to kernels.
template <typename T>
struct Elements {
  T* data = nullptr;
  bool aligned = false;  // to 16 bytes

  Elements() = default;
  explicit Elements(const LocalTensor& tensor)
      : data(tensor.as<T>()),
        aligned(reinterpret_cast<uintptr_t>(data) % 16 == 0) {}

  __device__ float Get(int64_t i) const { return Fp32(data[i]); }
  __device__ void Set(int64_t i, float value) const {
    data[i] = Rounded<T>(value);
  }
  // x[j] becomes element first + j for the j of the span, and 0 for others.
  // `first` may be anything; where it is no multiple of kVector, elements are
  // loaded one by one.
  __device__ void Load(int64_t first, Span span, float (&x)[kVector]) const {
    if (IsVector(first, span)) {
      Stored<T> stored;
      stored.Load(data + first);
      stored.Unpack(x);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = span.Has(j) ? Get(first + j) : 0;
  }
  __device__ void Store(int64_t first, Span span,
                        const float (&x)[kVector]) const {
    if (IsVector(first, span)) {
      Stored<T> stored;
      stored.Pack(x);
      stored.Store(data + first);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) Set(first + j, x[j]);
    }
  }

  // Of whole vectors of aligned tensors.
  __device__ void Load(int64_t first, WholeSpan, float (&x)[kVector]) const {
    LoadStored(first, WholeSpan()).Unpack(x);
  }
  __device__ void Store(int64_t first, WholeSpan,
                        const float (&x)[kVector]) const {
    Stored<T> stored;
    stored.Pack(x);
    stored.Store(data + first);
  }
  __device__ Stored<T> LoadStored(int64_t first, WholeSpan) const {
    Stored<T> stored;
    stored.Load(data + first);
    return stored;
  }
  // The same as it is stored, to be unpacked later.
  __device__ Stored<T> LoadStored(int64_t first, Span span) const {
    Stored<T> stored;
    if (IsVector(first, span)) {
      stored.Load(data + first);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        stored.SetElement(j, span.Has(j) ? data[first + j] : T{});
      }
    }
    return stored;
  }

 private:
  __device__ bool IsVector(int64_t first, Span span) const {
    return aligned && span.Whole() && first % kVector == 0;
  }
};

// Values of unlike types are kept as fp32.
template <>
struct Stored<Any> {
  float values[kVector];

  __device__ void Unpack(float (&x)[kVector]) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = values[j];
  }
};

template <>
struct Elements<Any> {
  void* data = nullptr;
  DType dtype = DType::kFloat32;

  Elements() = default;
  explicit Elements(const LocalTensor& tensor)
      : data(tensor.data), dtype(tensor.dtype) {
    TESSERA_CHECK(dtype == DType::kFloat32 || Is16Bit(dtype))
        << "CUDA has no kernels for " << NameOf(dtype);
  }

  __device__ float Get(int64_t i) const {
    switch (dtype) {
      case DType::kBFloat16:
        return Fp32(static_cast<const BFloat16*>(data)[i]);
      case DType::kFloat16:
        return Fp32(static_cast<const Float16*>(data)[i]);
      default:
        return static_cast<const float*>(data)[i];
    }
  }
  __device__ void Set(int64_t i, float value) const {
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<BFloat16*>(data)[i] = Rounded<BFloat16>(value);
        break;
      case DType::kFloat16:
        static_cast<Float16*>(data)[i] = Rounded<Float16>(value);
        break;
      default:
        static_cast<float*>(data)[i] = value;
    }
  }
  __device__ void Load(int64_t first, Span span, float (&x)[kVector]) const {
    for (int j = 0; j < kVector; ++j) x[j] = span.Has(j) ? Get(first + j) : 0;
  }
  __device__ void Store(int64_t first, Span span,
                        const float (&x)[kVector]) const {
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) Set(first + j, x[j]);
    }
  }
  __device__ Stored<Any> LoadStored(int64_t first, Span span) const {
    Stored<Any> stored;
    Load(first, span, stored.values);
    return stored;
  }
};

// Whether rows of `width` are whole vectors in all these tensors.
inline bool HaveWholeRows(std::initializer_list<LocalTensor> tensors,
                          int64_t width) {
  const bool alike =
      std::all_of(tensors.begin(), tensors.end(), [&](const LocalTensor& t) {
        return t.dtype == tensors.begin()->dtype &&
               reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
      });
  return alike && width % kVector == 0;
}

// Calls f.operator()<T>() with T the type of all these tensors, or Any.
template <typename F>
void ByType(std::span<const LocalTensor> tensors, F f) {
  const DType dtype = tensors[0].dtype;
  const bool alike =
      std::all_of(tensors.begin(), tensors.end(),
                  [&](const LocalTensor& t) { return t.dtype == dtype; });
  if (!alike) return f.template operator()<Any>();
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kBFloat16:
      return f.template operator()<BFloat16>();
    case DType::kFloat16:
      return f.template operator()<Float16>();
    default:
      TESSERA_CHECK(false) << "CUDA has no kernels for " << NameOf(dtype);
  }
}

template <typename F>
void ByType(std::initializer_list<LocalTensor> tensors, F f) {
  ByType(std::span<const LocalTensor>(tensors.begin(), tensors.size()), f);
}

// A call of some of the tensors.
inline KernelCall PartOf(const KernelCall& call,
                         std::span<const LocalTensor> operands,
                         std::span<const LocalTensor> results) {
  KernelCall part = call;
  part.operands = operands;
  part.results = results;
  return part;
}

// ---- Elementwise kernels ----------------------------------------------------

inline constexpr unsigned kThreads =
    256;  // of a block, where nothing else asks

// Blocks for `items` work items of one thread each; threads loop over the rest.
// Some waves of blocks even out the work; more do not.
inline unsigned BlocksFor(const CudaQueue& queue, int64_t items) {
  const int64_t most = std::max(queue.multiprocessors, 1) * int64_t{32};
  return static_cast<unsigned>(std::min(DivideUp(items, kThreads), most));
}
inline unsigned BlocksForVectors(const CudaQueue& queue, int64_t elements) {
  return BlocksFor(queue, DivideUp(elements, kVector));
}

// Calls f(first, span) for the vectors of n elements, on all threads of the
// grid.
template <typename F>
__device__ void ForEachVector(int64_t n, F f) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kVector;
  int64_t first =
      (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * int64_t{kVector};
  for (; first < n; first += step) {
    f(first, FirstOf(n - first));
  }
}

}  // namespace tessera
