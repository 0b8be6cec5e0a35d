#include "runtime/kernels/fill.h"

#include <algorithm>

#include "runtime/kernels/counter.h"

namespace tessera {
namespace {

// FNV-1a, 64 bits (Fowler, Noll and Vo), which unlike std::hash is the same on
// every platform.
uint64_t HashName(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

template <typename T>
void Fill(const LocalTensor& tensor, const Initializer& init, uint64_t key) {
  T* const data = tensor.as<T>();
  if (!(init.stddev > 0)) {
    std::fill_n(data, tensor.elements(), static_cast<T>(init.constant));
    return;
  }
  ForEachRun(tensor, 0, RunCount(tensor),
             [&](int64_t local, int64_t global, int64_t length) {
               for (int64_t i = 0; i < length; ++i) {
                 const auto counter = static_cast<uint64_t>(global + i);
                 data[local + i] =
                     static_cast<T>(init.stddev * CounterNormal(key, counter));
               }
             });
}

}  // namespace

void FillWeight(const LocalTensor& tensor, const Initializer& init,
                std::string_view tensor_name, uint64_t seed) {
  const uint64_t key = Mix64(seed ^ HashName(tensor_name));
  switch (tensor.dtype) {
    case DType::kFloat64:
      return Fill<double>(tensor, init, key);
    case DType::kFloat32:
      return Fill<float>(tensor, init, key);
    default:
      TESSERA_CHECK(false) << tensor_name << " is " << NameOf(tensor.dtype);
  }
}

}  // namespace tessera
