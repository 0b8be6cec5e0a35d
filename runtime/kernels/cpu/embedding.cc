// y[b,s,:] = table[ids[b,s], :], and of bags y[b,:] = sum over n of
// table[ids[b,n], :]. Ids are global, the table may hold some of the rows (a
// shard of v) and some of the columns (a shard of h).

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// The row of `table` that holds `id`, or -1.
int64_t LocalRow(const LocalTensor& table, int32_t id) {
  const int64_t row = id - table.offset[0];
  return row >= 0 && row < table.shape[0] ? row : -1;
}

// ids, table -> y.
template <typename T>
void Embedding(const KernelCall& call) {
  const LocalTensor& ids = call.operands[0];
  const LocalTensor& table = call.operands[1];
  const int64_t width = table.shape[1];
  ForEachRange(
      call, ids.elements(), RowGrain(width), [&](int64_t begin, int64_t end) {
        T* y = call.results[0].as<T>() + begin * width;
        for (int64_t i = begin; i < end; ++i, y += width) {
          const int64_t row = LocalRow(table, ids.as<const int32_t>()[i]);
          if (row < 0) {
            std::fill_n(y, width, T{0});
          } else {
            std::copy_n(table.as<const T>() + row * width, width, y);
          }
        }
      });
}

// dy, ids -> dtable. Tokens are added in order.
template <typename T>
void EmbeddingDw(const KernelCall& call) {
  const LocalTensor& ids = call.operands[1];
  const LocalTensor& table = call.results[0];
  const int64_t width = table.shape[1];
  if (!call.accumulate) std::fill_n(table.as<T>(), table.elements(), T{0});
  const int64_t tokens = ids.elements();
  ForEachRange(call, width, RowGrain(tokens), [&](int64_t begin, int64_t end) {
    const T* dy = call.operands[0].as<const T>();
    for (int64_t i = 0; i < tokens; ++i, dy += width) {
      const int64_t row = LocalRow(table, ids.as<const int32_t>()[i]);
      if (row < 0) continue;
      T* const out = table.as<T>() + row * width;
      for (int64_t j = begin; j < end; ++j) out[j] += dy[j];
    }
  });
}

// What each row of a bag counts: 1, or of a mean one over the ids that are no
// padding, whichever shards have their rows.
double WeightOfBag(const KernelCall& call, const int32_t* ids, int64_t length) {
  if (call.attribute("mean") == 0) return 1;
  const auto counted =
      std::count_if(ids, ids + length, [](int32_t id) { return id >= 0; });
  return 1 / static_cast<double>(std::max<int64_t>(1, counted));
}

// ids[b,n], table -> y[b,h].
template <typename T>
void EmbeddingBag(const KernelCall& call) {
  const LocalTensor& ids = call.operands[0];
  const LocalTensor& table = call.operands[1];
  const int64_t width = table.shape[1];
  const int64_t length = ids.shape[1];
  ForEachRange(
      call, ids.shape[0], RowGrain(width * length),
      [&](int64_t begin, int64_t end) {
        for (int64_t bag = begin; bag < end; ++bag) {
          const int32_t* const of = ids.as<const int32_t>() + bag * length;
          T* const y = call.results[0].as<T>() + bag * width;
          std::fill_n(y, width, T{0});
          for (int64_t i = 0; i < length; ++i) {
            const int64_t row = of[i] < 0 ? -1 : LocalRow(table, of[i]);
            if (row < 0) continue;
            const T* const x = table.as<const T>() + row * width;
            for (int64_t j = 0; j < width; ++j) y[j] += x[j];
          }
          const T weight = static_cast<T>(WeightOfBag(call, of, length));
          for (int64_t j = 0; j < width; ++j) y[j] *= weight;
        }
      });
}

// dy, ids -> dtable. Bags are added in order.
template <typename T>
void EmbeddingBagDw(const KernelCall& call) {
  const LocalTensor& ids = call.operands[1];
  const LocalTensor& table = call.results[0];
  const int64_t width = table.shape[1];
  const int64_t length = ids.shape[1];
  if (!call.accumulate) std::fill_n(table.as<T>(), table.elements(), T{0});
  ForEachRange(
      call, width, RowGrain(ids.elements()), [&](int64_t begin, int64_t end) {
        const T* dy = call.operands[0].as<const T>();
        for (int64_t bag = 0; bag < ids.shape[0]; ++bag, dy += width) {
          const int32_t* const of = ids.as<const int32_t>() + bag * length;
          const T weight = static_cast<T>(WeightOfBag(call, of, length));
          for (int64_t i = 0; i < length; ++i) {
            const int64_t row = of[i] < 0 ? -1 : LocalRow(table, of[i]);
            if (row < 0) continue;
            T* const out = table.as<T>() + row * width;
            for (int64_t j = begin; j < end; ++j) out[j] += dy[j] * weight;
          }
        }
      });
}

}  // namespace

std::vector<Kernel> CpuEmbeddingKernels() {
  return {
      {"embedding", ByDType<Embedding<float>, Embedding<double>>},
      {"embedding_dw", ByDType<EmbeddingDw<float>, EmbeddingDw<double>>, true},
      {"embedding_bag", ByDType<EmbeddingBag<float>, EmbeddingBag<double>>},
      {"embedding_bag_dw",
       ByDType<EmbeddingBagDw<float>, EmbeddingBagDw<double>>, true},
  };
}

}  // namespace tessera
