// Layer norm and RMS norm over the last dimension: rows by one warp or one
// block each, kept in registers. Formulas: runtime/kernels/cpu/norm.cc.

#include <vector>

#include "runtime/kernels/cuda/mma.h"
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

// The threads of a row work on kKept vectors of it each, and keep the sums of
// its columns in registers: where they are fewer, more rows are under way, and
// a row of one warp needs no barrier.
template <int kKept>
struct Backward {
  // Of a block at most, and of a multiprocessor, by the registers they take:
  // nvcc 13.0 gives those of three vectors at most 141.
  static constexpr unsigned kThreads = kKept == 3 ? 128 : kMostRowThreads;
  static constexpr unsigned kOfAll = kKept == 1 ? 1024 : kKept == 2 ? 512 : 448;
};

// Two vectors of 16 bits in each thread, or one of fp32: 96 KiB of shared
// memory, which GPUs from sm_80 on have.
int64_t WidestKept(DType dtype) {
  return int64_t{Is16Bit(dtype) ? 2 : 1} * kVector * kMostRowThreads;
}

// Sums over a row.
struct RowSums {
  float average;  // of dy scale
  float slope;    // of that times the normalised x
};

// What a thread works on of a row, which is copied to shared memory while it
// works on the row before: `kOperands` tensors' kKept vectors. No other thread
// reads it.
template <typename T, int kOperands, int kKept>
class RowAhead {
 public:
  static constexpr int kStages = 2;
  // Of a thread.
  static constexpr size_t kBytes =
      sizeof(Stored<T>) * kStages * kKept * kOperands;

  __device__ RowAhead(const Elements<T> (&operands)[kOperands], int64_t width)
      : width_(width), vectors_(static_cast<int>(width / kVector)) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o) operands_[o] = operands[o].data;
  }

  __device__ static int Vector(int k) {
    return static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
  }
  __device__ bool Has(int k) const {
    return Vector(k) < vectors_;
  }

  // Begins to copy a row.
  __device__ void Fetch(int64_t row, int stage) const {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (!Has(k)) break;
      const int64_t first = row * width_ + int64_t{Vector(k)} * kVector;
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        const auto* const from =
            reinterpret_cast<const Words*>(operands_[o] + first);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          CopyAsync16(Place(stage, k, o, w), from + w);
        }
      }
    }
  }
  // REQUIRES: the row's copies were waited for.
  __device__ void Get(int stage, int k, int o, float (&x)[kVector]) const {
    Stored<T> stored;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      stored.words[w] = *Place(stage, k, o, w);
    }
    stored.Unpack(x);
  }

 private:
  static constexpr int kWords = Stored<T>::kWords;

  // Of neighbouring threads these are neighbours.
  __device__ static Words* Place(int stage, int k, int o, int w) {
    const unsigned threads = blockDim.x * blockDim.y;
    const unsigned mine = threadIdx.y * blockDim.x + threadIdx.x;
    const int of_thread = ((stage * kKept + k) * kOperands + o) * kWords + w;
    return reinterpret_cast<Words*>(DynamicShared()) +
           static_cast<unsigned>(of_thread) * threads + mine;
  }

  const T* operands_[kOperands];
  int64_t width_;
  int vectors_;
};

// dy, x, scale, [mean,] rstd [, added] -> dx (+ added), and in
// partial[block][kSums][width] the sums for dscale [, dshift] [, the
// columns of dx]. Each row of threads takes the rows of its number modulo
// theirs.
template <typename T, bool kCentred, bool kAdds, bool kColumns, int kKept>
__global__ void __launch_bounds__(Backward<kKept>::kThreads,
                                  Backward<kKept>::kOfAll /
                                      Backward<kKept>::kThreads)
    NormBackward(Elements<T> dy, Elements<T> x, Elements<T> scale,
                 Elements<T> added, Elements<T> dx,
                 Statistics<kCentred> statistics, int64_t rows, int64_t width,
                 float* partial) {
  constexpr int kSums = 1 + kCentred + kColumns;
  constexpr int kOperands = 2 + kAdds;
  Elements<T> operands[kOperands] = {dy, x};
  if constexpr (kAdds) operands[2] = added;
  const RowAhead<T, kOperands, kKept> ahead(operands, width);
  const int64_t mine = RowOfThread();
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  float sums[kKept][kSums][kVector] = {};
  float next_mean = 0;
  float next_rstd = 0;
  const auto fetch = [&](int64_t row, int stage) {
    if (row < rows) {
      ahead.Fetch(row, stage);
      next_mean = statistics.Mean(row);
      next_rstd = statistics.rstd.Get(row);
    }
    CommitCopies();
  };
  fetch(mine, 0);
  int stage = 0;
  for (int64_t row = mine; row < rows; row += step, stage ^= 1) {
    const float mean = next_mean;
    const float rstd = next_rstd;
    fetch(row + step, stage ^ 1);
    WaitForCopies<1>();
    RowSums all = {0, 0};
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (!ahead.Has(k)) break;
      float d[kVector];
      float v[kVector];
      float s[kVector];
      ahead.Get(stage, k, 0, d);
      ahead.Get(stage, k, 1, v);
      scale.Load(int64_t{ahead.Vector(k)} * kVector, WholeSpan(), s);
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
      if (!ahead.Has(k)) break;
      const int64_t column = int64_t{ahead.Vector(k)} * kVector;
      float d[kVector];
      float v[kVector];
      float s[kVector];
      float more[kVector] = {};
      ahead.Get(stage, k, 0, d);
      ahead.Get(stage, k, 1, v);
      if constexpr (kAdds) ahead.Get(stage, k, 2, more);
      scale.Load(column, WholeSpan(), s);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float normalised = (v[j] - mean) * rstd;
        d[j] = rstd * (d[j] * s[j] - average - normalised * slope) + more[j];
        if (kColumns) sums[k][kSums - 1][j] += Fp32(Rounded<T>(d[j]));
      }
      dx.Store(row * width + column, WholeSpan(), d);
    }
  }
  const bool alone = blockDim.y == 1;
  float* const of_rows = reinterpret_cast<float*>(DynamicShared());
  float* const of_block = partial + blockIdx.x * int64_t{kSums} * width;
  if (!alone) __syncthreads();  // its last rows were read
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (!ahead.Has(k)) break;
#pragma unroll
    for (int of = 0; of < kSums; ++of) {
      float* const to =
          (alone ? of_block : of_rows + threadIdx.y * kSums * width) +
          of * width + int64_t{ahead.Vector(k)} * kVector;
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[j] = sums[k][of][j];
    }
  }
  if (alone) return;
  __syncthreads();
  const auto n = static_cast<int>(kSums * width);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < n;
       i += blockDim.x * blockDim.y) {
    float sum = of_rows[i];
    for (unsigned y = 1; y < blockDim.y; ++y) sum += of_rows[y * n + i];
    of_block[i] = sum;
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
template <typename T, bool kCentred, bool kAdds, bool kColumns, int kKept>
void LaunchBackward(const KernelCall& call, int64_t rows, int64_t width) {
  constexpr int kSums = 1 + kCentred + kColumns;
  const LocalTensor& dx = call.results[0];
  CudaQueue& queue = *call.queue;
  const auto threads =
      static_cast<unsigned>(DivideUp(width / kVector, kKept * kWarp) * kWarp);
  const unsigned of_block = threads == kWarp ? 4 : 1;  // rows
  const auto partial_bytes =
      static_cast<int64_t>(sizeof(float)) * kSums * width;  // of a block
  const size_t shared = std::max(
      RowAhead<T, 2 + kAdds, kKept>::kBytes * threads * of_block,
      of_block > 1 ? of_block * static_cast<size_t>(partial_bytes) : 0);
  const unsigned blocks_of_each =
      std::max(1U, Backward<kKept>::kOfAll / (threads * of_block));
  const int64_t blocks =
      std::min({int64_t{blocks_of_each} * std::max(queue.multiprocessors, 1),
                DivideUp(rows, of_block),
                std::max<int64_t>(1, queue.workspace_bytes / partial_bytes)});
  auto* const partial = reinterpret_cast<float*>(
      queue.Workspace(blocks * partial_bytes, "gradients of a norm"));
  if (partial == nullptr) return;
  Launch(NormBackward<T, kCentred, kAdds, kColumns, kKept>,
         static_cast<unsigned>(blocks), dim3(threads, of_block), shared, queue,
         Elements<T>(call.operands[0]), Elements<T>(call.operands[1]),
         Elements<T>(call.operands[2]),
         kAdds ? Elements<T>(call.operands.back()) : Elements<T>(),
         Elements<T>(dx), StatisticsOf<kCentred>(call.operands, 3), rows, width,
         partial);
  AddChunksOf<kSums>(call, call.results.subspan(1), partial, blocks, width);
}

// By measurement from 768 on (docs/gpu.md).
template <bool kCentred, bool kAdds, bool kColumns>
void LaunchBackward(const KernelCall& call, int64_t rows, int64_t width) {
  constexpr int64_t kWidestOfOne = int64_t{kWarp} * kVector;
  constexpr int64_t kWidestOfThree = int64_t{2} * kWarp * 3 * kVector;
  ByType({call.results[0]}, [&]<typename T>() {
    const auto launch = [&]<int kKept>() {
      LaunchBackward<T, kCentred, kAdds, kColumns, kKept>(call, rows, width);
    };
    if constexpr (std::is_same_v<T, float>) {
      launch.template operator()<1>();
    } else if constexpr (!std::is_same_v<T, Any>) {
      if (width <= kWidestOfOne) return launch.template operator()<1>();
      width <= kWidestOfThree ? launch.template operator()<3>()
                              : launch.template operator()<2>();
    }
  });
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
    const bool fuses = rows > 0 && width <= WidestKept(dx.dtype) &&
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
