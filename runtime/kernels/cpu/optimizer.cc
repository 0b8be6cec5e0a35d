// Optimizer steps on flat shards.

#include <cmath>

#include "planner/base/divide.h"
#include "runtime/kernels/counter.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/loss_scale.h"

namespace tessera {
namespace {

double LearningRate(const KernelCall& call) {
  return call.step_argument().Get().learning_rate;
}

// Earlier steps that were not skipped.
double StepsBefore(const KernelCall& call) {
  const auto step = static_cast<double>(call.step_argument().Get().step);
  return call.operands.size() > 2 ? step - Get(call.operands[2], 2) : step;
}

// gradient, clip coefficient [, loss scale] -> parameter, m, v (in place), in
// the order of PyTorch's AdamW: the decay before the step, epsilon outside the
// root. A negative coefficient skips the step.
template <typename T>
void AdamW(const KernelCall& call) {
  const double lr = LearningRate(call);
  const double beta1 = call.attribute("beta1");
  const double beta2 = call.attribute("beta2");
  const double t = StepsBefore(call) + 1;
  const T decay = static_cast<T>(1 - lr * call.attribute("weight_decay"));
  const T rate = static_cast<T>(lr / (1 - std::pow(beta1, t)));
  const T root = static_cast<T>(std::sqrt(1 - std::pow(beta2, t)));
  const T epsilon = static_cast<T>(call.attribute("epsilon"));
  const T keep1 = static_cast<T>(beta1);
  const T take1 = static_cast<T>(1 - beta1);
  const T keep2 = static_cast<T>(beta2);
  const T take2 = static_cast<T>(1 - beta2);
  const T clip = static_cast<T>(Get(call.operands[1], 0));
  if (clip < 0) return;
  const T* const gradient = call.operands[0].as<const T>();
  T* const parameter = call.results[0].as<T>();
  T* const m = call.results[1].as<T>();
  T* const v = call.results[2].as<T>();
  ForEachBlock(
      call, call.operands[0].elements(), [&](int64_t i, int64_t count) {
        const Block<T> g = clip * Load(gradient + i, count);
        const Block<T> new_m = keep1 * Load(m + i, count) + take1 * g;
        const Block<T> new_v = keep2 * Load(v + i, count) + take2 * g * g;
        const Block<T> step = rate * new_m / (new_v.sqrt() / root + epsilon);
        Store<T>(Load(parameter + i, count) * decay - step, count,
                 parameter + i);
        Store<T>(new_m, count, m + i);
        Store<T>(new_v, count, v + i);
      });
}

// gradient, clip coefficient [, loss scale] -> parameter, m (in place).
template <typename T>
void Momentum(const KernelCall& call) {
  const T clip = static_cast<T>(Get(call.operands[1], 0));
  if (clip < 0) return;
  const T rate = static_cast<T>(LearningRate(call));
  const T keep = static_cast<T>(call.attribute("beta1"));
  const T decay = static_cast<T>(call.attribute("weight_decay"));
  const T* const gradient = call.operands[0].as<const T>();
  T* const parameter = call.results[0].as<T>();
  T* const m = call.results[1].as<T>();
  ForEachBlock(
      call, call.operands[0].elements(), [&](int64_t i, int64_t count) {
        const Block<T> p = Load(parameter + i, count);
        const Block<T> new_m = keep * Load(m + i, count) +
                               clip * Load(gradient + i, count) + decay * p;
        Store<T>(p - rate * new_m, count, parameter + i);
        Store<T>(new_m, count, m + i);
      });
}

// gradient, clip coefficient [, loss scale] -> parameter (in place).
template <typename T>
void Sgd(const KernelCall& call) {
  const T clip = static_cast<T>(Get(call.operands[1], 0));
  if (clip < 0) return;
  const T rate = static_cast<T>(LearningRate(call));
  const T decay = static_cast<T>(call.attribute("weight_decay"));
  const T* const gradient = call.operands[0].as<const T>();
  T* const parameter = call.results[0].as<T>();
  ForEachBlock(
      call, call.operands[0].elements(), [&](int64_t i, int64_t count) {
        const Block<T> p = Load(parameter + i, count);
        const Block<T> g = clip * Load(gradient + i, count) + decay * p;
        Store<T>(p - rate * g, count, parameter + i);
      });
}

// distance -> running average (in place).
template <typename T>
void RunningAverage(const KernelCall& call) {
  const T rate = static_cast<T>(call.attribute("rate"));
  const T* const distance = call.operands[0].as<const T>();
  T* const average = call.results[0].as<T>();
  ForEachBlock(
      call, call.operands[0].elements(), [&](int64_t i, int64_t count) {
        const Block<T> a = Load(average + i, count);
        Store<T>(a - rate * Load(distance + i, count), count, average + i);
      });
}

// master -> parameter, each of its own type.
void Cast(const KernelCall& call) {
  const LocalTensor& from = call.operands[0];
  const LocalTensor& to = call.results[0];
  const auto cast = [&](int64_t begin, int64_t end) {
    if (from.dtype == DType::kFloat32 && Is16Bit(to.dtype)) {
      return Narrow(from.as<const float>() + begin, end - begin, to.dtype,
                    to.as<uint16_t>() + begin);
    }
    for (int64_t i = begin; i < end; ++i) Put(to, i, Get(from, i));
  };
  ForEachRange(call, from.elements(), RowGrain(1), cast);
}

// fp32 master -> bf16 parameter, rounded at random by the place in the whole
// tensor: the result's block, of which the elements `run` are here. Of other
// types as Cast.
void StochasticCast(const KernelCall& call) {
  const LocalTensor& to = call.results[0];
  if (!RoundsAtRandom(call)) return Cast(call);
  const auto index = BlockIndexOf(to);
  TESSERA_CHECK(index.has_value()) << "cut in too many dimensions";
  const uint64_t key =
      DropoutKey(call.seed, call.step_argument().Get().step,
                 static_cast<uint64_t>(call.attribute("salt")));
  const int64_t first = call.run ? call.run->begin : 0;
  const float* const x = call.operands[0].as<const float>();
  auto* const y = to.as<BFloat16>();
  ForEachRange(
      call, call.operands[0].elements(), RowGrain(1),
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const uint64_t random = CounterBits53(key, index->At(first + i));
          y[i] = ToBFloat16AtRandom(x[i], static_cast<uint32_t>(random));
        }
      });
}

// gradient -> sum of squares: of fixed blocks, and of their sums in order.
template <typename T>
void SquareSum(const KernelCall& call) {
  constexpr int64_t kSumBlock = 65536;
  const T* const g = call.operands[0].as<const T>();
  const int64_t n = call.operands[0].elements();
  std::vector<double> sums(DivideUp(n, kSumBlock));
  ForEachRange(call, std::ssize(sums), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const T* const first = g + block * kSumBlock;
      sums[block] =
          Sum(std::min(kSumBlock, n - block * kSumBlock), [first](int64_t i) {
            return static_cast<double>(first[i]) * first[i];
          });
    }
  });
  double sum = 0;
  for (double block : sums) sum += block;
  PutOrAdd(call, call.results[0], 0, sum);
}

// Divides a coefficient by the loss scale, or has the step skipped, and
// updates the state.
double Unscaled(double coefficient, bool overflow, const LocalTensor& state) {
  LossScale& loss = *state.as<LossScale>();
  if (overflow) {
    loss.scale = std::max(loss.scale / 2, 1.0F);
    loss.good_steps = 0;
    loss.skipped_steps += 1;
    return -1;
  }
  coefficient /= loss.scale;
  loss.good_steps += 1;
  if (loss.good_steps == LossScale::kGrowthInterval) {
    if (std::isfinite(loss.scale * 2)) loss.scale *= 2;
    loss.good_steps = 0;
  }
  return coefficient;
}

// square of the global norm [, loss scale] -> min(1, clip / (norm + 1e-6)), as
// torch.nn.utils.clip_grad_norm_ has it [, loss scale in place]; 1 where clip
// <= 0. A norm that is not a number stays visible. Of scaled gradients the norm
// is scaled, too; one that is not finite makes the coefficient negative.
void ClipCoefficient(const KernelCall& call) {
  const double clip = call.attribute("clip");
  const bool scaled = call.operands.size() > 1;
  const double square = Get(call.operands[0], 0);
  const double scale = scaled ? Get(call.operands[1], 0) : 1;
  double coefficient = clip / (std::sqrt(square) / scale + 1e-6);
  if (clip <= 0 || coefficient >= 1) coefficient = 1;
  if (scaled) {
    coefficient =
        Unscaled(coefficient, !std::isfinite(square), call.results[1]);
  }
  Put(call.results[0], 0, coefficient);
}

}  // namespace

std::vector<Kernel> CpuOptimizerKernels() {
  return {
      {"adamw", ByDType<AdamW<float>, AdamW<double>>},
      {"adam", ByDType<AdamW<float>, AdamW<double>>},
      {"momentum", ByDType<Momentum<float>, Momentum<double>>},
      {"sgd", ByDType<Sgd<float>, Sgd<double>>},
      {"running_average",
       ByDType<RunningAverage<float>, RunningAverage<double>>},
      {"cast", Cast},
      {"stochastic_cast", StochasticCast},
      {"square_sum", ByDType<SquareSum<float>, SquareSum<double>>, true},
      {"clip_coefficient", ClipCoefficient},
  };
}

}  // namespace tessera
