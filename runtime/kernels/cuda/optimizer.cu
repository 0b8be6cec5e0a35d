// Optimizer steps on flat shards, one launch for all of a task. Formulas:
// runtime/kernels/cpu/optimizer.cc.
// Nothing waits for the host: the coefficient of clipping and the state of the
// loss scale are read where they lie.

#include <type_traits>
#include <variant>

#include "runtime/kernels/counter.h"
#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/cuda/tensor_list.h"
#include "runtime/loss_scale.h"

namespace tessera {
namespace {

// ---- Steps ------------------------------------------------------------------

struct AdamWOptions {
  StepArgument now;  // the step: skipped ones included
  double beta1, beta2, epsilon;
};

// P: of the parameter and its moments; C: of the copy of the parameter that is
// made besides, or void.
template <typename G, typename P, typename C>
struct AdamWTensors {
  Elements<G> gradient;
  Elements<P> parameter, m, v;
  std::conditional_t<std::is_void_v<C>, std::monostate, Elements<C>> copy;
  int64_t n = 0;
  double weight_decay = 0;
};

// gradient, clip coefficient [, loss scale] -> parameter, m, v (in place)
// [, copy]. `skipped` is null, or the number of skipped steps.
template <typename G, typename P, typename C>
__global__ void AdamW(
    const __grid_constant__ TensorList<AdamWTensors<G, P, C>> list,
    Elements<Any> coefficient, const float* skipped, AdamWOptions options) {
  TESSERA_SHARED(corrections, float[2]);
  const float clip = coefficient.Get(0);
  if (clip < 0) {  // the step is skipped
    if constexpr (!std::is_void_v<C>) {
      ForEachListedVector(
          list, [](const AdamWTensors<G, P, C>& of, int64_t first, Span span) {
            float p[kVector];
            of.parameter.Load(first, span, p);
            of.copy.Store(first, span, p);
          });
    }
    return;
  }
  const StepNumbers now = options.now.Get();
  const double lr = now.learning_rate;
  if (threadIdx.x == 0) {
    const double t = static_cast<double>(now.step) + 1 -
                     (skipped == nullptr ? 0.0 : double{*skipped});
    corrections[0] = static_cast<float>(lr / (1 - pow(options.beta1, t)));
    corrections[1] = static_cast<float>(1 / sqrt(1 - pow(options.beta2, t)));
  }
  __syncthreads();
  const float rate = corrections[0];
  const float over_root = corrections[1];
  const auto epsilon = static_cast<float>(options.epsilon);
  const auto keep1 = static_cast<float>(options.beta1);
  const auto take1 = static_cast<float>(1 - options.beta1);
  const auto keep2 = static_cast<float>(options.beta2);
  const auto take2 = static_cast<float>(1 - options.beta2);
  ForEachListedVector(list, [&](const AdamWTensors<G, P, C>& of, int64_t first,
                                Span span) {
    const auto decay = static_cast<float>(1 - lr * of.weight_decay);
    float g[kVector];
    float p[kVector];
    float new_m[kVector];
    float new_v[kVector];
    of.gradient.Load(first, span, g);
    of.parameter.Load(first, span, p);
    of.m.Load(first, span, new_m);
    of.v.Load(first, span, new_v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      g[j] *= clip;
      new_m[j] = keep1 * new_m[j] + take1 * g[j];
      new_v[j] = keep2 * new_v[j] + take2 * g[j] * g[j];
      p[j] = p[j] * decay -
             __fdividef(rate * new_m[j], sqrtf(new_v[j]) * over_root + epsilon);
    }
    of.parameter.Store(first, span, p);
    of.m.Store(first, span, new_m);
    of.v.Store(first, span, new_v);
    if constexpr (!std::is_void_v<C>) of.copy.Store(first, span, p);
  });
}

template <typename T>
struct MomentumTensors {
  Elements<T> gradient, parameter, m;
  int64_t n = 0;
  float weight_decay = 0;
};

// gradient, clip coefficient -> parameter, m (in place).
template <typename T>
__global__ void Momentum(
    const __grid_constant__ TensorList<MomentumTensors<T>> list,
    Elements<Any> coefficient, StepArgument now, float keep) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  const auto lr = static_cast<float>(now.Get().learning_rate);
  ForEachListedVector(
      list, [&](const MomentumTensors<T>& of, int64_t first, Span span) {
        float g[kVector];
        float p[kVector];
        float new_m[kVector];
        of.gradient.Load(first, span, g);
        of.parameter.Load(first, span, p);
        of.m.Load(first, span, new_m);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          new_m[j] = keep * new_m[j] + clip * g[j] + of.weight_decay * p[j];
          p[j] -= lr * new_m[j];
        }
        of.parameter.Store(first, span, p);
        of.m.Store(first, span, new_m);
      });
}

template <typename T>
struct SgdTensors {
  Elements<T> gradient, parameter;
  int64_t n = 0;
  float weight_decay = 0;
};

// gradient, clip coefficient -> parameter (in place).
template <typename T>
__global__ void Sgd(const __grid_constant__ TensorList<SgdTensors<T>> list,
                    Elements<Any> coefficient, StepArgument now) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  const auto lr = static_cast<float>(now.Get().learning_rate);
  ForEachListedVector(list,
                      [&](const SgdTensors<T>& of, int64_t first, Span span) {
                        float g[kVector];
                        float p[kVector];
                        of.gradient.Load(first, span, g);
                        of.parameter.Load(first, span, p);
#pragma unroll
                        for (int j = 0; j < kVector; ++j)
                          p[j] -= lr * (clip * g[j] + of.weight_decay * p[j]);
                        of.parameter.Store(first, span, p);
                      });
}

template <typename T>
struct RunningAverageTensors {
  Elements<T> distance, average;
  int64_t n = 0;
  float rate = 0;
};

// distance -> running average (in place).
template <typename T>
__global__ void RunningAverage(
    const __grid_constant__ TensorList<RunningAverageTensors<T>> list) {
  ForEachListedVector(
      list, [](const RunningAverageTensors<T>& of, int64_t first, Span span) {
        float d[kVector];
        float a[kVector];
        of.distance.Load(first, span, d);
        of.average.Load(first, span, a);
#pragma unroll
        for (int j = 0; j < kVector; ++j) a[j] -= of.rate * d[j];
        of.average.Store(first, span, a);
      });
}

template <typename From, typename To>
struct CastTensors {
  Elements<From> from;
  Elements<To> to;
  int64_t n = 0;
};

template <typename From, typename To>
__global__ void Cast(
    const __grid_constant__ TensorList<CastTensors<From, To>> list) {
  ForEachListedVector(
      list, [](const CastTensors<From, To>& of, int64_t first, Span span) {
        float x[kVector];
        of.from.Load(first, span, x);
        of.to.Store(first, span, x);
      });
}

struct StochasticCastTensors {
  Elements<float> from;
  Elements<BFloat16> to;
  int64_t n = 0;
  int64_t first = 0;  // of these in the block
  uint64_t salt = 0;
  BlockIndex index;
};

__global__ void StochasticCast(
    const __grid_constant__ TensorList<StochasticCastTensors> list,
    uint64_t seed, StepArgument now) {
  const int64_t step = now.Get().step;
  ForEachListedVector(
      list, [&](const StochasticCastTensors& of, int64_t first, Span span) {
        const uint64_t key = DropoutKey(seed, step, of.salt);
        float x[kVector];
        of.from.Load(first, span, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const uint32_t bits = __float_as_uint(x[j]);
          if ((bits & 0x7f800000U) == 0x7f800000U) continue;
          const uint64_t random =
              CounterBits53(key, of.index.At(of.first + first + j));
          // Of the type that it is stored in.
          x[j] = __uint_as_float(
              (bits + static_cast<uint32_t>(random & 0xffffU)) & 0xffff0000U);
        }
        of.to.Store(first, span, x);
      });
}

// ---- Clipping ---------------------------------------------------------------

// Elements of which a block makes one partial sum.
constexpr int64_t kSumElements = 32 * kSumThreads * kVector;

template <typename T>
struct SquaredTensor {
  Elements<T> x;
  int64_t n = 0;
};

template <typename T>
__global__ void SumSquares(
    const __grid_constant__ TensorList<SquaredTensor<T>> list,
    double* partial) {
  double sum = 0;
  ForEachListedVector(
      list, [&](const SquaredTensor<T>& of, int64_t first, Span span) {
        float v[kVector];
        of.x.Load(first, span, v);
        float squares = 0;
#pragma unroll
        for (int j = 0; j < kVector; ++j) squares += v[j] * v[j];
        sum += squares;
      });
  sum = Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The partial sums of a tensor, and where they go.
struct SquareSumResult {
  Elements<Any> total;
  bool accumulate = false;
  int64_t n = 0;  // partial sums
};

// SumPartials of one tensor after the other, whose partial sums follow one
// another.
__global__ void SumListedPartials(
    const __grid_constant__ TensorList<SquareSumResult> list,
    const double* partial) {
  for (int k = 0; k < list.count; ++k) {
    const SquareSumResult& of = list.items[k];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < of.n; i += blockDim.x) sum += partial[i];
    sum = Sum(sum);
    partial += of.n;
    if (threadIdx.x > 0) continue;
    if (of.accumulate) sum += of.total.Get(0);
    of.total.Set(0, static_cast<float>(sum));
  }
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
        if (loss->scale * 2 < INFINITY) loss->scale *= 2;
        loss->good_steps = 0;
      }
    }
  }
  result.Set(0, coefficient);
}

// ---- Calls ------------------------------------------------------------------

template <typename G, typename P, typename C>
void LaunchAdamW(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  const AdamWOptions options = {one.step_argument(), one.attribute("beta1"),
                                one.attribute("beta2"),
                                one.attribute("epsilon")};
  const float* const skipped =
      one.operands.size() > 2 ? &one.operands[2].as<LossScale>()->skipped_steps
                              : nullptr;
  using Tensors = AdamWTensors<G, P, C>;
  InLists<Tensors>(
      calls, 0,
      [](const KernelCall& call) {
        Tensors tensors;
        tensors.gradient = Elements<G>(call.operands[0]);
        tensors.parameter = Elements<P>(call.results[0]);
        tensors.m = Elements<P>(call.results[1]);
        tensors.v = Elements<P>(call.results[2]);
        if constexpr (!std::is_void_v<C>) {
          tensors.copy = Elements<C>(call.results[3]);
        }
        tensors.n = call.operands[0].elements();
        tensors.weight_decay = call.attribute("weight_decay");
        return tensors;
      },
      [&](const TensorList<Tensors>& list, auto, unsigned blocks) {
        Launch(AdamW<G, P, C>, blocks, kThreads, 0, *one.queue, list,
               Elements<Any>(one.operands[1]), skipped, options);
      });
}

// Of the types that training has; others by Any.
template <typename C>
void AdamWByTypes(std::span<const KernelCall> calls) {
  using AnyCopy = std::conditional_t<std::is_void_v<C>, void, Any>;
  ByType(calls[0].results.first(3), [&]<typename P>() {
    if constexpr (std::is_same_v<P, float>) {
      ByType(calls[0].operands.first(1),
             [&]<typename G>() { LaunchAdamW<G, float, C>(calls); });
    } else {
      LaunchAdamW<Any, Any, AnyCopy>(calls);
    }
  });
}

void CallAdamW(std::span<const KernelCall> calls) {
  AdamWByTypes<void>(calls);
}

// The same, and a copy of the parameter in the type that is computed in.
void CallAdamWCast(std::span<const KernelCall> calls) {
  ByType({calls[0].results[3]}, [&]<typename C>() { AdamWByTypes<C>(calls); });
}

void CallMomentum(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  ByType({one.operands[0], one.results[0], one.results[1]}, [&]<typename T>() {
    using Tensors = MomentumTensors<T>;
    InLists<Tensors>(
        calls, 0,
        [](const KernelCall& call) {
          return Tensors{
              Elements<T>(call.operands[0]), Elements<T>(call.results[0]),
              Elements<T>(call.results[1]), call.operands[0].elements(),
              static_cast<float>(call.attribute("weight_decay"))};
        },
        [&](const TensorList<Tensors>& list, auto, unsigned blocks) {
          Launch(Momentum<T>, blocks, kThreads, 0, *one.queue, list,
                 Elements<Any>(one.operands[1]), one.step_argument(),
                 static_cast<float>(one.attribute("beta1")));
        });
  });
}

void CallSgd(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  ByType({one.operands[0], one.results[0]}, [&]<typename T>() {
    using Tensors = SgdTensors<T>;
    InLists<Tensors>(
        calls, 0,
        [](const KernelCall& call) {
          return Tensors{Elements<T>(call.operands[0]),
                         Elements<T>(call.results[0]),
                         call.operands[0].elements(),
                         static_cast<float>(call.attribute("weight_decay"))};
        },
        [&](const TensorList<Tensors>& list, auto, unsigned blocks) {
          Launch(Sgd<T>, blocks, kThreads, 0, *one.queue, list,
                 Elements<Any>(one.operands[1]), one.step_argument());
        });
  });
}

void CallRunningAverage(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  ByType({one.operands[0], one.results[0]}, [&]<typename T>() {
    using Tensors = RunningAverageTensors<T>;
    InLists<Tensors>(
        calls, 0,
        [](const KernelCall& call) {
          return Tensors{Elements<T>(call.operands[0]),
                         Elements<T>(call.results[0]),
                         call.operands[0].elements(),
                         static_cast<float>(call.attribute("rate"))};
        },
        [&](const TensorList<Tensors>& list, auto, unsigned blocks) {
          Launch(RunningAverage<T>, blocks, kThreads, 0, *one.queue, list);
        });
  });
}

void CallCast(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  ByType({one.operands[0]}, [&]<typename From>() {
    ByType({one.results[0]}, [&]<typename To>() {
      using Tensors = CastTensors<From, To>;
      InLists<Tensors>(
          calls, 0,
          [](const KernelCall& call) {
            return Tensors{Elements<From>(call.operands[0]),
                           Elements<To>(call.results[0]),
                           call.operands[0].elements()};
          },
          [&](const TensorList<Tensors>& list, auto, unsigned blocks) {
            Launch(Cast<From, To>, blocks, kThreads, 0, *one.queue, list);
          });
    });
  });
}

void CallStochasticCast(std::span<const KernelCall> calls) {
  const KernelCall& one = calls[0];
  if (!RoundsAtRandom(one)) return CallCast(calls);
  InLists<StochasticCastTensors>(
      calls, 0,
      [](const KernelCall& call) {
        const LocalTensor& to = call.results[0];
        const auto index = BlockIndexOf(to);
        TESSERA_CHECK(index.has_value()) << "cut in too many dimensions";
        return StochasticCastTensors{
            Elements<float>(call.operands[0]),
            Elements<BFloat16>(to),
            call.operands[0].elements(),
            call.run ? call.run->begin : 0,
            static_cast<uint64_t>(call.attribute("salt")),
            *index};
      },
      [&](const TensorList<StochasticCastTensors>& list, auto,
          unsigned blocks) {
        Launch(StochasticCast, blocks, kThreads, 0, *one.queue, list, one.seed,
               one.step_argument());
      });
}

void CallSquareSum(std::span<const KernelCall> calls) {
  CudaQueue& queue = *calls[0].queue;
  ByType({calls[0].operands[0]}, [&]<typename T>() {
    using Tensors = SquaredTensor<T>;
    InLists<Tensors>(
        calls, kSumElements,
        [](const KernelCall& call) {
          return Tensors{Elements<T>(call.operands[0]),
                         call.operands[0].elements()};
        },
        [&](const TensorList<Tensors>& list, std::span<const KernelCall> listed,
            unsigned blocks) {
          auto* const partial = reinterpret_cast<double*>(queue.Workspace(
              int64_t{blocks} * int64_t{sizeof(double)}, "a sum"));
          if (partial == nullptr) return;
          Launch(SumSquares<T>, blocks, kSumThreads, 0, queue, list, partial);
          TensorList<SquareSumResult> results;
          for (const KernelCall& call : listed) {
            const int k = results.count++;
            results.items[k] = {Elements<Any>(call.results[0]), call.accumulate,
                                list.first_block[k + 1] - list.first_block[k]};
          }
          Launch(SumListedPartials, 1, kSumThreads, 0, queue, results,
                 static_cast<const double*>(partial));
        });
  });
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
      {"adamw", RunAlone<CallAdamW>, false, CallAdamW},
      {"adam", RunAlone<CallAdamW>, false, CallAdamW},
      {"momentum", RunAlone<CallMomentum>, false, CallMomentum},
      {"sgd", RunAlone<CallSgd>, false, CallSgd},
      {"running_average", RunAlone<CallRunningAverage>, false,
       CallRunningAverage},
      {"cast", RunAlone<CallCast>, false, CallCast},
      {"stochastic_cast", RunAlone<CallStochasticCast>, false,
       CallStochasticCast},
      {"square_sum", RunAlone<CallSquareSum>, true, CallSquareSum},
      {"clip_coefficient", CallClipCoefficient},
  };
}

std::vector<Kernel> CudaFusedOptimizerKernels() {
  return {
      {"adamw+cast", RunAlone<CallAdamWCast>, false, CallAdamWCast},
      {"adam+cast", RunAlone<CallAdamWCast>, false, CallAdamWCast},
  };
}

}  // namespace tessera
