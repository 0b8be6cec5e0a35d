// y[b,s,:] = table[ids[b,s], :]. Ids are global, the table may hold some of the
// rows (a shard of v) and some of the columns (a shard of h).

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

}  // namespace

std::vector<Kernel> CpuEmbeddingKernels() {
  return {
      {"embedding", ByDType<Embedding<float>, Embedding<double>>},
      {"embedding_dw", ByDType<EmbeddingDw<float>, EmbeddingDw<double>>, true},
  };
}

}  // namespace tessera
