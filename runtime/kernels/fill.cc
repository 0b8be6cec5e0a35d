#include "runtime/kernels/fill.h"

#include <algorithm>

#include "planner/base/divide.h"
#include "planner/base/fnv1a.h"
#include "runtime/kernels/counter.h"

namespace tessera {
namespace {

// Elements of a thread's turn.
constexpr int64_t kChunk = 1 << 14;

template <typename T>
void Fill(const LocalTensor& tensor, Range elements, const Initializer& init,
          uint64_t key, ThreadPool* threads) {
  T* const data = tensor.as<T>();
  if (!(init.stddev > 0)) {
    std::fill_n(data, elements.size(), static_cast<T>(init.constant));
    return;
  }
  const auto fill = [&](int64_t chunk) {
    const int64_t begin = elements.begin + chunk * kChunk;
    const int64_t end = std::min(begin + kChunk, elements.end);
    const int64_t length = RunLength(tensor);
    ForEachRun(
        tensor, begin / length, (end - 1) / length + 1,
        [&](int64_t local, int64_t global, int64_t) {
          const int64_t first = std::max(begin, local);
          const int64_t last = std::min(end, local + length);
          for (int64_t i = first; i < last; ++i) {
            const auto counter = static_cast<uint64_t>(global + i - local);
            data[i - elements.begin] =
                static_cast<T>(init.stddev * CounterNormal(key, counter));
          }
        });
  };
  const int64_t chunks = DivideUp(elements.size(), kChunk);
  if (threads != nullptr) {
    threads->For(chunks, fill);
  } else {
    for (int64_t i = 0; i < chunks; ++i) fill(i);
  }
}

}  // namespace

void FillWeight(const LocalTensor& tensor, Range elements,
                const Initializer& init, std::string_view tensor_name,
                uint64_t seed, ThreadPool* threads) {
  const uint64_t key = Mix64(seed ^ Fnv1a().Add(tensor_name).value());
  switch (tensor.dtype) {
    case DType::kFloat64:
      return Fill<double>(tensor, elements, init, key, threads);
    case DType::kFloat32:
      return Fill<float>(tensor, elements, init, key, threads);
    default:
      TESSERA_CHECK(false) << tensor_name << " is " << NameOf(tensor.dtype);
  }
}

void FillWeight(const LocalTensor& tensor, const Initializer& init,
                std::string_view tensor_name, uint64_t seed) {
  FillWeight(tensor, {0, tensor.elements()}, init, tensor_name, seed, nullptr);
}

}  // namespace tessera
