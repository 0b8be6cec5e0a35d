// Losses that are means over elements (planner/ops/losses.cc). Formulas:
// runtime/kernels/cpu/losses.cc.

#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/losses.h"

namespace tessera {
namespace {

struct SquaredError {
  __device__ float operator()(float x, float t) const {
    return (x - t) * (x - t);
  }
};
struct SquaredErrorDx {
  __device__ float operator()(float x, float t) const { return 2 * (x - t); }
};
struct BinaryEntropy {
  __device__ float operator()(float x, float t) const {
    return (x > 0 ? x : 0) - x * t + log1pf(expf(-fabsf(x)));
  }
};
struct BinaryEntropyDx {
  __device__ float operator()(float x, float t) const {
    return 1 / (1 + expf(-x)) - t;
  }
};
// It does not depend on the targets.
struct BinaryEntropyDt {
  __device__ float operator()(float x, float) const { return -x; }
};

// partial[block] = weight * the block's sum of F(x, t).
template <typename T, typename F>
__global__ void SumOfLosses(Elements<T> x, Elements<T> t, int64_t n,
                            double weight, double* partial) {
  double sum = 0;
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    float of_t[kVector];
    x.Load(first, span, of_x);
    t.Load(first, span, of_t);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) sum += double{F()(of_x[j], of_t[j])};
    }
  });
  sum = Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = weight * sum;
}

// dx = F(x, t) [* loss scale] * weight.
template <typename T, typename F>
__global__ void GradientOfLosses(Elements<T> x, Elements<T> t, Elements<T> dx,
                                 int64_t n, Elements<Any> loss_scale,
                                 double weight) {
  const float scale = static_cast<float>(
      (loss_scale.data == nullptr ? 1.0 : double{loss_scale.Get(0)}) * weight);
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    float of_t[kVector];
    x.Load(first, span, of_x);
    t.Load(first, span, of_t);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      of_x[j] = F()(of_x[j], of_t[j]) * scale;
    }
    dx.Store(first, span, of_x);
  });
}

// x, t -> loss.
template <typename F>
void CallMean(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& t = call.operands[1];
  const int64_t n = x.elements();
  const unsigned blocks = BlocksForVectors(*call.queue, n);
  auto* const partial = reinterpret_cast<double*>(
      call.queue->Workspace(blocks * int64_t{sizeof(double)}, "a sum"));
  if (partial == nullptr) return;
  ByType({x, t}, [&]<typename T>() {
    Launch(SumOfLosses<T, F>, blocks, kThreads, 0, *call.queue, Elements<T>(x),
           Elements<T>(t), n, WeightOf(call, x), partial);
  });
  CallSumPartials(call, blocks);
}

// x, t [, loss scale] -> dx; without t where kOperands is 1.
template <typename F, size_t kOperands = 2>
void CallGradient(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& t = call.operands[kOperands - 1];
  const LocalTensor& dx = call.results[0];
  const int64_t n = dx.elements();
  const Elements<Any> loss_scale = call.operands.size() > kOperands
                                       ? Elements<Any>(call.operands[kOperands])
                                       : Elements<Any>();
  ByType({x, t, dx}, [&]<typename T>() {
    Launch(GradientOfLosses<T, F>, BlocksForVectors(*call.queue, n), kThreads,
           0, *call.queue, Elements<T>(x), Elements<T>(t), Elements<T>(dx), n,
           loss_scale, WeightOf(call, dx));
  });
}

}  // namespace

std::vector<Kernel> CudaLossesKernels() {
  return {
      {"mean_squared_error", CallMean<SquaredError>, true},
      {"mean_squared_error_dx", CallGradient<SquaredErrorDx>},
      {"binary_cross_entropy", CallMean<BinaryEntropy>, true},
      {"binary_cross_entropy_dx", CallGradient<BinaryEntropyDx>},
      {"binary_cross_entropy_dt", CallGradient<BinaryEntropyDt, 1>},
  };
}

}  // namespace tessera
