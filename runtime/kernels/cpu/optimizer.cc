// Optimizer steps on flat shards.

#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// gradient, clip coefficient -> parameter, m, v (in place), in the order of
// PyTorch's AdamW: the decay before the step, epsilon outside the root.
template <typename T>
void AdamW(const KernelCall& call) {
  const double lr = call.attribute("lr");
  const double beta1 = call.attribute("beta1");
  const double beta2 = call.attribute("beta2");
  const double t = static_cast<double>(call.step + 1);
  const T decay = static_cast<T>(1 - lr * call.attribute("weight_decay"));
  const T rate = static_cast<T>(lr / (1 - std::pow(beta1, t)));
  const T root = static_cast<T>(std::sqrt(1 - std::pow(beta2, t)));
  const T epsilon = static_cast<T>(call.attribute("epsilon"));
  const T keep1 = static_cast<T>(beta1);
  const T take1 = static_cast<T>(1 - beta1);
  const T keep2 = static_cast<T>(beta2);
  const T take2 = static_cast<T>(1 - beta2);
  const T clip = static_cast<T>(Get(call.operands[1], 0));
  const T* const gradient = call.operands[0].as<const T>();
  T* const parameter = call.results[0].as<T>();
  T* const m = call.results[1].as<T>();
  T* const v = call.results[2].as<T>();
  ForEachBlock(call.operands[0].elements(), [&](int64_t i, int64_t count) {
    const Block<T> g = clip * Load(gradient + i, count);
    const Block<T> new_m = keep1 * Load(m + i, count) + take1 * g;
    const Block<T> new_v = keep2 * Load(v + i, count) + take2 * g * g;
    const Block<T> step = rate * new_m / (new_v.sqrt() / root + epsilon);
    Store<T>(Load(parameter + i, count) * decay - step, count, parameter + i);
    Store<T>(new_m, count, m + i);
    Store<T>(new_v, count, v + i);
  });
}

// gradient, clip coefficient -> parameter (in place).
template <typename T>
void Sgd(const KernelCall& call) {
  const T rate =
      static_cast<T>(call.attribute("lr") * Get(call.operands[1], 0));
  const T* const gradient = call.operands[0].as<const T>();
  T* const parameter = call.results[0].as<T>();
  ForEachBlock(call.operands[0].elements(), [&](int64_t i, int64_t count) {
    const Block<T> p = Load(parameter + i, count);
    Store<T>(p - rate * Load(gradient + i, count), count, parameter + i);
  });
}

// master -> parameter, each of its own type.
void Cast(const KernelCall& call) {
  const int64_t n = call.operands[0].elements();
  for (int64_t i = 0; i < n; ++i) {
    Put(call.results[0], i, Get(call.operands[0], i));
  }
}

// gradient -> sum of squares.
template <typename T>
void SquareSum(const KernelCall& call) {
  const T* const g = call.operands[0].as<const T>();
  const double sum = Sum(call.operands[0].elements(), [g](int64_t i) {
    return static_cast<double>(g[i]) * g[i];
  });
  PutOrAdd(call, call.results[0], 0, sum);
}

// square of the global norm -> min(1, clip / (norm + 1e-6)), as
// torch.nn.utils.clip_grad_norm_ has it; 1 where clip <= 0. A norm that is not
// a number stays visible.
void ClipCoefficient(const KernelCall& call) {
  const double clip = call.attribute("clip");
  const double norm = std::sqrt(Get(call.operands[0], 0));
  const double coefficient = clip / (norm + 1e-6);
  Put(call.results[0], 0, clip <= 0 || coefficient >= 1 ? 1 : coefficient);
}

}  // namespace

std::vector<Kernel> CpuOptimizerKernels() {
  return {
      {"adamw", ByDType<AdamW<float>, AdamW<double>>},
      {"sgd", ByDType<Sgd<float>, Sgd<double>>},
      {"cast", Cast},
      {"square_sum", ByDType<SquareSum<float>, SquareSum<double>>, true},
      {"clip_coefficient", ClipCoefficient},
  };
}

}  // namespace tessera
