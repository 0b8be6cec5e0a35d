// Layer norm and RMS norm over the last dimension: rows by one warp or one
// block each, kept in registers. Formulas: runtime/kernels/cpu/norm.cc.

#include <vector>

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

// The mean and the reciprocal deviation of rows; an RMS norm has no mean.
template <bool kCentred>
struct Statistics {
  Elements<Any> mean;
  Elements<Any> rstd;

  __device__ float Mean(int64_t row) const {
    return kCentred ? mean.Get(row) : 0;
  }
};

// The matrix whose rows are normalised: x, or the sum of two terms, which is
// stored, too.
template <typename T, int kTerms>
struct NormInput {
  Elements<T> terms[kTerms];
  Elements<T> sum;

  // Element j, as it is stored.
  __device__ static float Get(const float (&of)[kTerms][kVector], int j) {
    if constexpr (kTerms == 1) {
      return of[0][j];
    } else {
      return Fp32(Rounded<T>(of[0][j] + of[1][j]));
    }
  }
};

// x, scale [, shift] -> [sum,] y, [mean,] rstd.
template <typename T, bool kCentred, bool kWhole, int kTerms>
__global__ void __launch_bounds__(kMostRowThreads)
    Norm(NormInput<T, kTerms> x, Elements<T> scale, Elements<T> shift,
         Elements<T> y, Statistics<kCentred> statistics, int64_t rows,
         int64_t width, float epsilon) {
  using Input = NormInput<T, kTerms>;
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const StoredRow<kTerms, T, kWhole> values(row, width, x.terms);
  const auto n = static_cast<float>(width);
  float mean = 0;
  if (kCentred) {
    values.ForEach(
        [&](int64_t, int64_t, auto, const float(&v)[kTerms][kVector]) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) mean += Input::Get(v, j);
        });
    mean = Sum(mean) / n;
  }
  float squares = 0;
  values.ForEach(
      [&](int64_t, int64_t, auto span, const float(&v)[kTerms][kVector]) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const float d = span.Has(j) ? Input::Get(v, j) - mean : 0;
          squares += d * d;
        }
      });
  const float rstd = 1 / sqrtf(Sum(squares) / n + epsilon);
  values.ForEach([&](int64_t first, int64_t column, auto span,
                     const float(&v)[kTerms][kVector]) {
    float s[kVector];
    float t[kVector] = {};
    float of_x[kVector];
    scale.Load(column, span, s);
    if (kCentred) shift.Load(column, span, t);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      of_x[j] = Input::Get(v, j);
      t[j] = (of_x[j] - mean) * rstd * s[j] + t[j];
    }
    if (kTerms > 1) x.sum.Store(first, span, of_x);
    y.Store(first, span, t);
  });
  if (threadIdx.x > 0) return;
  if (kCentred) statistics.mean.Set(row, mean);
  statistics.rstd.Set(row, rstd);
}

// dy, x, scale, [mean,] rstd -> dx.
template <typename T, bool kCentred, bool kWhole>
__global__ void __launch_bounds__(kMostRowThreads)
    NormDx(Elements<T> dy, Elements<T> x, Elements<T> scale, Elements<T> dx,
           Statistics<kCentred> statistics, int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const float mean = statistics.Mean(row);
  const float rstd = statistics.rstd.Get(row);
  const Elements<T> operands[2] = {dy, x};
  const StoredRow<2, T, kWhole> values(row, width, operands);
  float average = 0;  // of dy scale
  float slope = 0;    // of that times the normalised x
  values.ForEach(
      [&](int64_t, int64_t column, auto span, const float(&v)[2][kVector]) {
        float s[kVector];
        scale.Load(column, span, s);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          average += v[0][j] * s[j];
          slope += v[0][j] * s[j] * ((v[1][j] - mean) * rstd);
        }
      });
  const auto n = static_cast<float>(width);
  average = kCentred ? Sum(average) / n : 0;
  slope = Sum(slope) / n;
  values.ForEach([&](int64_t first, int64_t column, auto span,
                     const float(&v)[2][kVector]) {
    float d[kVector];
    scale.Load(column, span, d);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float normalised = (v[1][j] - mean) * rstd;
      d[j] = rstd * (v[0][j] * d[j] - average - normalised * slope);
    }
    dx.Store(first, span, d);
  });
}

// dy, x, [mean,] rstd -> dscale [, dshift].
template <typename T, bool kCentred>
struct NormDw {
  Elements<T> dy;
  Elements<T> x;
  Statistics<kCentred> statistics;
  int64_t width;

  template <typename S>
  __device__ void operator()(int64_t row, int64_t column, S span,
                             float (&sums)[kCentred ? 2 : 1][kVector]) const {
    const float mean = statistics.Mean(row);
    const float rstd = statistics.rstd.Get(row);
    float of_dy[kVector];
    float of_x[kVector];
    dy.Load(row * width + column, span, of_dy);
    x.Load(row * width + column, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[0][j] += of_dy[j] * ((of_x[j] - mean) * rstd);
      if (kCentred) sums[kCentred][j] += of_dy[j];
    }
  }
};

// ---- All gradients at once --------------------------------------------------

// A thread keeps kKept vectors of a row, and the sums of their columns: more
// would not stay in registers.
constexpr int kKept = 2;
constexpr int64_t kWidestKept = int64_t{kKept} * kVector * kMostRowThreads;
// Of a multiprocessor: these have enough loads under way, and each row of
// threads leaves sums to be added.
constexpr unsigned kBackwardThreads = 512;

// Sums over a row.
struct RowSums {
  float average;  // of dy scale
  float slope;    // of that times the normalised x
};

// dy, x, scale, [mean,] rstd [, added] -> dx (+ added), and in
// partial[row of threads][kSums][width] the sums for dscale [, dshift] [, the
// columns of dx]. Each row of threads takes the rows of its number modulo
// theirs.
template <typename T, bool kCentred, bool kAdds, bool kColumns>
__global__ void __launch_bounds__(kMostRowThreads)
    NormBackward(Elements<T> dy, Elements<T> x, Elements<T> scale,
                 Elements<T> added, Elements<T> dx,
                 Statistics<kCentred> statistics, int64_t rows, int64_t width,
                 float* partial) {
  constexpr int kSums = 1 + kCentred + kColumns;
  const auto vectors = static_cast<int>(width / kVector);
  const auto vector = [](int k) {
    return static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
  };
  const int64_t mine = RowOfThread();
  float sums[kKept][kSums][kVector] = {};
  for (int64_t row = mine; row < rows; row += int64_t{gridDim.x} * blockDim.y) {
    Stored<T> of_dy[kKept];
    Stored<T> of_x[kKept];
    Stored<T> of_added[kKept];
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (vector(k) >= vectors) break;
      const int64_t first = row * width + int64_t{vector(k)} * kVector;
      of_dy[k] = dy.LoadStored(first, WholeSpan());
      of_x[k] = x.LoadStored(first, WholeSpan());
      if (kAdds) of_added[k] = added.LoadStored(first, WholeSpan());
    }
    const float mean = statistics.Mean(row);
    const float rstd = statistics.rstd.Get(row);
    RowSums all = {0, 0};
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (vector(k) >= vectors) break;
      float d[kVector];
      float v[kVector];
      float s[kVector];
      of_dy[k].Unpack(d);
      of_x[k].Unpack(v);
      scale.Load(int64_t{vector(k)} * kVector, WholeSpan(), s);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float normalised = (v[j] - mean) * rstd;
        all.average += d[j] * s[j];
        all.slope += d[j] * s[j] * normalised;
        sums[k][0][j] += d[j] * normalised;
        if (kCentred) sums[k][kCentred][j] += d[j];
      }
    }
    all = Reduce(all, RowSums{0, 0}, [](RowSums a, RowSums b) {
      return RowSums{a.average + b.average, a.slope + b.slope};
    });
    const auto n = static_cast<float>(width);
    const float average = kCentred ? all.average / n : 0;
    const float slope = all.slope / n;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (vector(k) >= vectors) break;
      float d[kVector];
      float v[kVector];
      float s[kVector];
      float more[kVector] = {};
      of_dy[k].Unpack(d);
      of_x[k].Unpack(v);
      scale.Load(int64_t{vector(k)} * kVector, WholeSpan(), s);
      if (kAdds) of_added[k].Unpack(more);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float normalised = (v[j] - mean) * rstd;
        d[j] = rstd * (d[j] * s[j] - average - normalised * slope) + more[j];
        if (kColumns) sums[k][kSums - 1][j] += Fp32(Rounded<T>(d[j]));
      }
      dx.Store(row * width + int64_t{vector(k)} * kVector, WholeSpan(), d);
    }
  }
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (vector(k) >= vectors) break;
#pragma unroll
    for (int of = 0; of < kSums; ++of) {
      float* const to =
          partial + (mine * kSums + of) * width + int64_t{vector(k)} * kVector;
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[j] = sums[k][of][j];
    }
  }
}

// ---- Calls ------------------------------------------------------------------

// The statistics are the tensors from `first` on.
template <bool kCentred>
Statistics<kCentred> StatisticsOf(std::span<const LocalTensor> tensors,
                                  size_t first) {
  Statistics<kCentred> result;
  if (kCentred) result.mean = Elements<Any>(tensors[first]);
  result.rstd = Elements<Any>(tensors[first + kCentred]);
  return result;
}

// Operands: the terms, scale [, shift]. Results: [sum,] y, [mean,] rstd.
template <typename T, bool kCentred, bool kWhole, int kTerms>
void LaunchNorm(const KernelCall& call) {
  constexpr size_t kFirst = kTerms > 1 ? 1 : 0;  // result of the norm
  NormInput<T, kTerms> x;
  for (size_t t = 0; t < kTerms; ++t) {
    x.terms[t] = Elements<T>(call.operands[t]);
  }
  if (kTerms > 1) x.sum = Elements<T>(call.results[0]);
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.results[kFirst + 1].elements();
  const RowGrid grid = RowGridFor(rows, width);
  Launch(Norm<T, kCentred, kWhole, kTerms>, grid.grid, grid.block, 0,
         *call.queue, x, Elements<T>(call.operands[kTerms]),
         Elements<T>(call.operands[kTerms + (kCentred ? 1 : 0)]),
         Elements<T>(call.results[kFirst]),
         StatisticsOf<kCentred>(call.results, kFirst + 1), rows, width,
         static_cast<float>(call.attribute("epsilon")));
}

template <bool kCentred>
void CallNorm(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& scale = call.operands[1];
  const LocalTensor& shift = call.operands[kCentred ? 2 : 1];
  const LocalTensor& y = call.results[0];
  ByType({x, scale, shift, y}, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({x, scale, shift, y}, x.shape.back())) {
        return LaunchNorm<T, kCentred, true, 1>(call);
      }
    }
    LaunchNorm<T, kCentred, false, 1>(call);
  });
}

// The sum's operands, scale [, shift] -> sum, y, [mean,] rstd.
template <bool kCentred>
void CallAddNorm(const KernelCall& call) {
  constexpr size_t kOfNorm = kCentred ? 2 : 1;  // operands besides x
  const size_t terms = call.operands.size() - kOfNorm;
  const LocalTensor& sum = call.results[0];
  const LocalTensor& scale = call.operands[terms];
  const LocalTensor& shift = call.operands.back();
  const auto fuses = [&] {
    const LocalTensor& a = call.operands[0];
    const LocalTensor& b = call.operands[1];
    return terms == 2 && a.data != nullptr && b.data != nullptr &&
           HaveWholeRows({a, b, scale, shift, sum, call.results[1]},
                         sum.shape.back());
  };
  if (fuses()) {
    return ByType({sum}, [&]<typename T>() {
      if constexpr (!std::is_same_v<T, Any>) {
        LaunchNorm<T, kCentred, true, 2>(call);
      }
    });
  }
  FindCudaKernel("add").value()->run(
      PartOf(call, call.operands.first(terms), call.results.first(1)));
  std::vector<LocalTensor> operands = {sum};
  operands.insert(operands.end(), call.operands.end() - kOfNorm,
                  call.operands.end());
  CallNorm<kCentred>(PartOf(call, operands, call.results.subspan(1)));
}

template <bool kCentred>
void CallNormDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& scale = call.operands[2];
  const LocalTensor& dx = call.results[0];
  const int64_t width = x.shape.back();
  const int64_t rows = call.operands[3].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({dy, x, scale, dx}, [&]<typename T>() {
    const auto launch = [&](auto kernel) {
      Launch(kernel, grid.grid, grid.block, 0, *call.queue, Elements<T>(dy),
             Elements<T>(x), Elements<T>(scale), Elements<T>(dx),
             StatisticsOf<kCentred>(call.operands, 3), rows, width);
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({dy, x, scale, dx}, width)) {
        return launch(NormDx<T, kCentred, true>);
      }
    }
    launch(NormDx<T, kCentred, false>);
  });
}

template <bool kCentred>
void CallNormDw(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const int64_t width = x.shape.back();
  ByType({dy, x}, [&]<typename T>() {
    const NormDw<T, kCentred> term = {Elements<T>(dy), Elements<T>(x),
                                      StatisticsOf<kCentred>(call.operands, 2),
                                      width};
    constexpr int kSums = kCentred ? 2 : 1;
    const int64_t rows = call.operands[2].elements();
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({dy, x}, width)) {
        return SumColumns<kSums, true>(call, term, rows, width);
      }
    }
    SumColumns<kSums>(call, term, rows, width);
  });
}

// What NormBackward makes in one go.
template <bool kCentred, bool kAdds, bool kColumns>
void LaunchBackward(const KernelCall& call, int64_t rows, int64_t width) {
  constexpr int kSums = 1 + kCentred + kColumns;
  const LocalTensor& dx = call.results[0];
  CudaQueue& queue = *call.queue;
  const int64_t vectors = width / kVector;
  const auto threads = static_cast<unsigned>((vectors + kKept * kWarp - 1) /
                                             (kKept * kWarp) * kWarp);
  const unsigned shared = threads == kWarp ? 4 : 1;  // rows of a block
  const unsigned blocks_of_each =
      std::max(1U, kBackwardThreads / (threads * shared));
  const auto partial_bytes = static_cast<int64_t>(shared * sizeof(float)) *
                             kSums * width;  // of a block
  const int64_t blocks =
      std::min({int64_t{blocks_of_each} * std::max(queue.multiprocessors, 1),
                (rows + shared - 1) / int64_t{shared},
                std::max<int64_t>(1, queue.workspace_bytes / partial_bytes)});
  auto* const partial = reinterpret_cast<float*>(
      queue.Workspace(blocks * partial_bytes, "gradients of a norm"));
  if (partial == nullptr) return;
  ByType({dx}, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, Any>) {
      Launch(NormBackward<T, kCentred, kAdds, kColumns>,
             static_cast<unsigned>(blocks), dim3(threads, shared), 0, queue,
             Elements<T>(call.operands[0]), Elements<T>(call.operands[1]),
             Elements<T>(call.operands[2]),
             kAdds ? Elements<T>(call.operands.back()) : Elements<T>(),
             Elements<T>(dx), StatisticsOf<kCentred>(call.operands, 3), rows,
             width, partial);
    }
  });
  AddChunksOf<kSums>(call, call.results.subspan(1), partial, blocks * shared,
                     width);
}

// dy, x, scale, [mean,] rstd [, added] -> dx (+ added) [, dscale [, dshift]]
// [, the sums of dx's columns].
template <bool kCentred, bool kAdds, bool kWeights, bool kColumns>
void CallNormBackward(const KernelCall& call) {
  constexpr size_t kOfNorm = kCentred ? 5 : 4;
  constexpr size_t kOfWeights = kWeights ? 1 + kCentred : 0;
  const auto& in = call.operands;
  const LocalTensor& dx = call.results[0];
  const int64_t width = dx.shape.back();
  const int64_t rows = in[3].elements();
  if constexpr (kWeights) {
    // The bias may be wider than the norm: of all heads.
    const bool fuses = rows > 0 && width <= kWidestKept &&
                       (!kColumns || call.results.back().elements() == width) &&
                       in.size() == kOfNorm + kAdds &&
                       HaveWholeRows({in[0], in[1], in[2], dx}, width) &&
                       (!kAdds || HaveWholeRows({dx, in.back()}, width));
    if (fuses) {
      return LaunchBackward<kCentred, kAdds, kColumns>(call, rows, width);
    }
  }
  KernelCall once = call;
  once.accumulate = false;
  CallNormDx<kCentred>(PartOf(once, in.first(kOfNorm), call.results.first(1)));
  if (kAdds) {
    std::vector<LocalTensor> terms = {dx};
    terms.insert(terms.end(), in.begin() + kOfNorm, in.end());
    FindCudaKernel("sum").value()->run(
        PartOf(once, terms, call.results.first(1)));
  }
  if (kWeights) {
    std::vector<LocalTensor> operands = {in[0], in[1]};
    operands.insert(operands.end(), in.begin() + 3, in.begin() + kOfNorm);
    CallNormDw<kCentred>(
        PartOf(call, operands, call.results.subspan(1, kOfWeights)));
  }
  if (kColumns) {
    FindCudaKernel("linear_db")
        .value()
        ->run(PartOf(call, call.results.first(1),
                     call.results.subspan(1 + kOfWeights)));
  }
}

}  // namespace

std::vector<Kernel> CudaNormKernels() {
  return {
      {"layer_norm", CallNorm<true>},
      {"layer_norm_dx", CallNormDx<true>},
      {"layer_norm_dw", CallNormDw<true>, true},
      {"rms_norm", CallNorm<false>},
      {"rms_norm_dx", CallNormDx<false>},
      {"rms_norm_dw", CallNormDw<false>, true},
  };
}

std::vector<Kernel> CudaFusedNormKernels() {
  return {
      {"add+layer_norm", CallAddNorm<true>},
      {"add+rms_norm", CallAddNorm<false>},
      {"layer_norm_dx+sum", CallNormBackward<true, true, false, false>},
      {"rms_norm_dx+sum", CallNormBackward<false, true, false, false>},
      {"layer_norm_dx+dw", CallNormBackward<true, false, true, false>, true},
      {"rms_norm_dx+dw", CallNormBackward<false, false, true, false>, true},
      {"layer_norm_dx+sum+dw", CallNormBackward<true, true, true, false>, true},
      {"rms_norm_dx+sum+dw", CallNormBackward<false, true, true, false>, true},
      {"layer_norm_dx+dw+db", CallNormBackward<true, false, true, true>, true},
      {"layer_norm_dx+sum+dw+db", CallNormBackward<true, true, true, true>,
       true},
  };
}

}  // namespace tessera
