// Optimizer steps on flat shards. Formulas: runtime/kernels/cpu/optimizer.cc.
// Nothing waits for the host: the coefficient of clipping and the state of the
// loss scale are read where they lie.

#include "runtime/kernels/cuda/reduce.h"
#include "runtime/loss_scale.h"

namespace tessera {
namespace {

// ---- Steps ------------------------------------------------------------------

struct AdamWOptions {
  double lr, beta1, beta2, epsilon, weight_decay;
  double step;  // 0-based, skipped ones included
};

// gradient, clip coefficient [, loss scale] -> parameter, m, v (in place).
// `skipped` is null, or the number of skipped steps.
template <typename G, typename P>
__global__ void AdamW(Elements<G> gradient, Elements<Any> coefficient,
                      const float* skipped, Elements<P> parameter,
                      Elements<P> m, Elements<P> v, int64_t n,
                      AdamWOptions options) {
  TESSERA_SHARED(corrections, float[2]);
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  if (threadIdx.x == 0) {
    const double t =
        options.step + 1 - (skipped == nullptr ? 0.0 : double{*skipped});
    corrections[0] =
        static_cast<float>(options.lr / (1 - pow(options.beta1, t)));
    corrections[1] = static_cast<float>(sqrt(1 - pow(options.beta2, t)));
  }
  __syncthreads();
  const float rate = corrections[0];
  const float root = corrections[1];
  const auto decay = static_cast<float>(1 - options.lr * options.weight_decay);
  const auto epsilon = static_cast<float>(options.epsilon);
  const auto keep1 = static_cast<float>(options.beta1);
  const auto take1 = static_cast<float>(1 - options.beta1);
  const auto keep2 = static_cast<float>(options.beta2);
  const auto take2 = static_cast<float>(1 - options.beta2);
  ForEachVector(n, [&](int64_t first, Span span) {
    float g[kVector];
    float p[kVector];
    float new_m[kVector];
    float new_v[kVector];
    gradient.Load(first, span, g);
    parameter.Load(first, span, p);
    m.Load(first, span, new_m);
    v.Load(first, span, new_v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      g[j] *= clip;
      new_m[j] = keep1 * new_m[j] + take1 * g[j];
      new_v[j] = keep2 * new_v[j] + take2 * g[j] * g[j];
      p[j] =
          p[j] * decay - rate * new_m[j] / (sqrtf(new_v[j]) / root + epsilon);
    }
    parameter.Store(first, span, p);
    m.Store(first, span, new_m);
    v.Store(first, span, new_v);
  });
}

// gradient, clip coefficient -> parameter, m (in place).
template <typename T>
__global__ void Momentum(Elements<T> gradient, Elements<Any> coefficient,
                         Elements<T> parameter, Elements<T> m, int64_t n,
                         float lr, float keep) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  ForEachVector(n, [&](int64_t first, Span span) {
    float g[kVector];
    float p[kVector];
    float new_m[kVector];
    gradient.Load(first, span, g);
    parameter.Load(first, span, p);
    m.Load(first, span, new_m);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      new_m[j] = keep * new_m[j] + clip * g[j];
      p[j] -= lr * new_m[j];
    }
    parameter.Store(first, span, p);
    m.Store(first, span, new_m);
  });
}

// gradient, clip coefficient -> parameter (in place).
template <typename T>
__global__ void Sgd(Elements<T> gradient, Elements<Any> coefficient,
                    Elements<T> parameter, int64_t n, float lr) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  ForEachVector(n, [&](int64_t first, Span span) {
    float g[kVector];
    float p[kVector];
    gradient.Load(first, span, g);
    parameter.Load(first, span, p);
#pragma unroll
    for (int j = 0; j < kVector; ++j) p[j] -= lr * clip * g[j];
    parameter.Store(first, span, p);
  });
}

// distance -> running average (in place).
template <typename T>
__global__ void RunningAverage(Elements<T> distance, Elements<T> average,
                               int64_t n, float rate) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float d[kVector];
    float a[kVector];
    distance.Load(first, span, d);
    average.Load(first, span, a);
#pragma unroll
    for (int j = 0; j < kVector; ++j) a[j] -= rate * d[j];
    average.Store(first, span, a);
  });
}

template <typename From, typename To>
__global__ void Cast(Elements<From> from, Elements<To> to, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float x[kVector];
    from.Load(first, span, x);
    to.Store(first, span, x);
  });
}

// ---- Clipping ---------------------------------------------------------------

// Elements of which a block makes one partial sum.
constexpr int64_t kSumElements = 32 * kSumThreads * kVector;

template <typename T>
__global__ void SumSquares(Elements<T> x, int64_t n, double* partial) {
  const int64_t begin = blockIdx.x * kSumElements;
  const int64_t end = begin + kSumElements < n ? begin + kSumElements : n;
  double sum = 0;
  for (int64_t first = begin + threadIdx.x * kVector; first < end;
       first += kSumThreads * kVector) {
    const Span span = FirstOf(end - first);
    float v[kVector];
    x.Load(first, span, v);
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += v[j] * v[j];
    sum += squares;
  }
  sum = Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// square of the norm [, loss scale] -> coefficient [, loss scale in place].
__global__ void ClipCoefficient(Elements<Any> square_sum, LossScale* loss,
                                Elements<Any> result, float clip) {
  const float square = square_sum.Get(0);
  const float scale = loss != nullptr ? loss->scale : 1;
  float coefficient = clip / (sqrtf(square) / scale + 1e-6F);
  if (clip <= 0 || coefficient >= 1) coefficient = 1;
  if (loss != nullptr) {
    if (!(square < INFINITY)) {
      loss->scale = loss->scale / 2 < 1 ? 1 : loss->scale / 2;
      loss->good_steps = 0;
      loss->skipped_steps += 1;
      coefficient = -1;
    } else {
      coefficient /= loss->scale;
      loss->good_steps += 1;
      if (loss->good_steps == LossScale::kGrowthInterval) {
        loss->scale *= 2;
        loss->good_steps = 0;
      }
    }
  }
  result.Set(0, coefficient);
}

// ---- Calls ------------------------------------------------------------------

template <typename G, typename P>
void LaunchAdamW(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t n = in[0].elements();
  const AdamWOptions options = {
      call.attribute("lr"),           call.attribute("beta1"),
      call.attribute("beta2"),        call.attribute("epsilon"),
      call.attribute("weight_decay"), static_cast<double>(call.step)};
  const float* const skipped =
      in.size() > 2 ? &in[2].as<LossScale>()->skipped_steps : nullptr;
  Launch(AdamW<G, P>, BlocksForVectors(*call.queue, n), kThreads, 0,
         *call.queue, Elements<G>(in[0]), Elements<Any>(in[1]), skipped,
         Elements<P>(call.results[0]), Elements<P>(call.results[1]),
         Elements<P>(call.results[2]), n, options);
}

void CallAdamW(const KernelCall& call) {
  ByType(call.results, [&]<typename P>() {
    if constexpr (std::is_same_v<P, float>) {
      ByType(call.operands.first(1),
             [&]<typename G>() { LaunchAdamW<G, float>(call); });
    } else {
      LaunchAdamW<Any, Any>(call);
    }
  });
}

void CallMomentum(const KernelCall& call) {
  const LocalTensor& gradient = call.operands[0];
  const LocalTensor& parameter = call.results[0];
  const LocalTensor& m = call.results[1];
  const int64_t n = gradient.elements();
  ByType({gradient, parameter, m}, [&]<typename T>() {
    Launch(Momentum<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(gradient), Elements<Any>(call.operands[1]),
           Elements<T>(parameter), Elements<T>(m), n,
           static_cast<float>(call.attribute("lr")),
           static_cast<float>(call.attribute("beta1")));
  });
}

void CallSgd(const KernelCall& call) {
  const LocalTensor& gradient = call.operands[0];
  const LocalTensor& parameter = call.results[0];
  const int64_t n = gradient.elements();
  ByType({gradient, parameter}, [&]<typename T>() {
    Launch(Sgd<T>, BlocksForVectors(*call.queue, n), kThreads, 0, *call.queue,
           Elements<T>(gradient), Elements<Any>(call.operands[1]),
           Elements<T>(parameter), n, static_cast<float>(call.attribute("lr")));
  });
}

void CallRunningAverage(const KernelCall& call) {
  const LocalTensor& distance = call.operands[0];
  const LocalTensor& average = call.results[0];
  const int64_t n = distance.elements();
  ByType({distance, average}, [&]<typename T>() {
    Launch(RunningAverage<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(distance), Elements<T>(average), n,
           static_cast<float>(call.attribute("rate")));
  });
}

void CallCast(const KernelCall& call) {
  const LocalTensor& from = call.operands[0];
  const LocalTensor& to = call.results[0];
  const int64_t n = from.elements();
  ByType({from}, [&]<typename From>() {
    ByType({to}, [&]<typename To>() {
      Launch(Cast<From, To>, BlocksForVectors(*call.queue, n), kThreads, 0,
             *call.queue, Elements<From>(from), Elements<To>(to), n);
    });
  });
}

void CallSquareSum(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const int64_t n = x.elements();
  const int64_t blocks = (n + kSumElements - 1) / kSumElements;
  auto* const partial = reinterpret_cast<double*>(
      call.queue->Workspace(blocks * int64_t{sizeof(double)}, "a sum"));
  if (partial == nullptr) return;
  ByType({x}, [&]<typename T>() {
    Launch(SumSquares<T>, static_cast<unsigned>(blocks), kSumThreads, 0,
           *call.queue, Elements<T>(x), n, partial);
  });
  CallSumPartials(call, blocks);
}

void CallClipCoefficient(const KernelCall& call) {
  LossScale* const loss =
      call.operands.size() > 1 ? call.results[1].as<LossScale>() : nullptr;
  Launch(ClipCoefficient, 1, 1, 0, *call.queue, Elements<Any>(call.operands[0]),
         loss, Elements<Any>(call.results[0]),
         static_cast<float>(call.attribute("clip")));
}

}  // namespace

std::vector<Kernel> CudaOptimizerKernels() {
  return {
      {"adamw", CallAdamW},
      {"adam", CallAdamW},
      {"momentum", CallMomentum},
      {"sgd", CallSgd},
      {"running_average", CallRunningAverage},
      {"cast", CallCast},
      {"square_sum", CallSquareSum, true},
      {"clip_coefficient", CallClipCoefficient},
  };
}

}  // namespace tessera
