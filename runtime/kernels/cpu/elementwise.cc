// Elementwise operators: operands and results have one shape.

#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// y = f(x), block by block.
template <typename T, typename F>
void Unary(const KernelCall& call, F f) {
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachBlock(call, call.results[0].elements(), [&](int64_t i, int64_t count) {
    Store<T>(f(Load(x + i, count)), count, y + i);
  });
}

// y = f(a, b), block by block.
template <typename T, typename F>
void Binary(const KernelCall& call, F f) {
  const T* const a = call.operands[0].as<const T>();
  const T* const b = call.operands[1].as<const T>();
  T* const y = call.results[0].as<T>();
  TESSERA_CHECK(call.operands[0].elements() == call.operands[1].elements())
      << call.operands[0].elements() << " and " << call.operands[1].elements();
  ForEachBlock(call, call.results[0].elements(), [&](int64_t i, int64_t count) {
    Store<T>(f(Load(a + i, count), Load(b + i, count)), count, y + i);
  });
}

// 0.5 (1 + tanh u) = sigmoid(2u), so GELU is x sigmoid(z) with
// z = 2 sqrt(2/pi) (x + 0.044715 x^3).
constexpr double kTwoRootTwoOverPi = 1.5957691216057308;
constexpr double kCubic = 0.044715;

template <typename T>
Block<T> GeluArgument(const Block<T>& x) {
  return T(kTwoRootTwoOverPi) * (x + T(kCubic) * x * x * x);
}

template <typename T>
void Gelu(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> {
    return x * Sigmoid<T>(GeluArgument<T>(x));
  });
}

// dy, x -> dx: the derivative is p + x p (1 - p) z', p = sigmoid(z).
template <typename T>
void GeluDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    const Block<T> p = Sigmoid<T>(GeluArgument<T>(x));
    const Block<T> dz = T(kTwoRootTwoOverPi) * (T{1} + T(3 * kCubic) * x * x);
    return dy * (p + x * p * (T{1} - p) * dz);
  });
}

constexpr double kRootHalf = 0.7071067811865476;          // 1 / sqrt(2)
constexpr double kRootOneOverTwoPi = 0.3989422804014327;  // 1 / sqrt(2 pi)

// The standard normal distribution.
template <typename T>
Block<T> NormalCdf(const Block<T>& x) {
  return x.unaryExpr(
      [](T v) { return T(0.5) * (T{1} + std::erf(v * T(kRootHalf))); });
}

template <typename T>
void GeluErf(const KernelCall& call) {
  Unary<T>(call,
           [](const Block<T>& x) -> Block<T> { return x * NormalCdf<T>(x); });
}

// dy, x -> dx: the derivative is cdf(x) + x density(x).
template <typename T>
void GeluErfDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    const Block<T> density = T(kRootOneOverTwoPi) * (T(-0.5) * x * x).exp();
    return dy * (NormalCdf<T>(x) + x * density);
  });
}

template <typename T>
void Silu(const KernelCall& call) {
  Unary<T>(call,
           [](const Block<T>& x) -> Block<T> { return x * Sigmoid<T>(x); });
}

// dy, x -> dx.
template <typename T>
void SiluDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    const Block<T> p = Sigmoid<T>(x);
    return dy * p * (T{1} + x * (T{1} - p));
  });
}

// Eigen's max() and min() give x where x is not a number.
template <typename T>
void Relu(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.max(T{0}); });
}

// dy, x -> dx: as PyTorch's, dy where x is not a number.
template <typename T>
void ReluDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x <= T{0}).select(Block<T>::Zero(), dy);
  });
}

template <typename T>
void SigmoidOfX(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return Sigmoid<T>(x); });
}

// dy, y -> dx.
template <typename T>
void SigmoidDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& y) -> Block<T> {
    return dy * y * (T{1} - y);
  });
}

template <typename T>
void Tanh(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.tanh(); });
}

// dy, y -> dx.
template <typename T>
void TanhDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& y) -> Block<T> {
    return dy * (T{1} - y * y);
  });
}

template <typename T>
void Scale(const KernelCall& call) {
  const T factor = static_cast<T>(call.attribute("factor"));
  if (call.accumulate) {
    const T* const x = call.operands[0].as<const T>();
    T* const y = call.results[0].as<T>();
    ForEachBlock(call, call.results[0].elements(),
                 [&](int64_t i, int64_t count) {
                   Store<T>(Load<T>(y + i, count) + factor * Load(x + i, count),
                            count, y + i);
                 });
    return;
  }
  Unary<T>(call,
           [factor](const Block<T>& x) -> Block<T> { return factor * x; });
}

template <typename T>
void Offset(const KernelCall& call) {
  const T amount = static_cast<T>(call.attribute("amount"));
  Unary<T>(call,
           [amount](const Block<T>& x) -> Block<T> { return x + amount; });
}

template <typename T>
void Exp(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.exp(); });
}

// dy, y -> dx.
template <typename T>
void ExpDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& y) -> Block<T> {
    return dy * y;
  });
}

template <typename T>
void Log(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.log(); });
}

// dy, x -> dx.
template <typename T>
void LogDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return dy / x;
  });
}

template <typename T>
void Sqrt(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.sqrt(); });
}

// dy, y -> dx.
template <typename T>
void SqrtDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& y) -> Block<T> {
    return T(0.5) * dy / y;
  });
}

template <typename T>
void Reciprocal(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.inverse(); });
}

// dy, y -> dx.
template <typename T>
void ReciprocalDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& y) -> Block<T> {
    return -dy * y * y;
  });
}

template <typename T>
void Abs(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.abs(); });
}

// dy, x -> dx.
template <typename T>
void AbsDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x > T{0}).select(dy, (x < T{0}).select(-dy, Block<T>::Zero()));
  });
}

template <typename T>
void Erf(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> {
    return x.unaryExpr([](T v) { return std::erf(v); });
  });
}

constexpr double kTwoOverRootPi = 1.1283791670955126;

// dy, x -> dx.
template <typename T>
void ErfDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return dy * T(kTwoOverRootPi) * (-x * x).exp();
  });
}

template <typename T>
void Sin(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.sin(); });
}

// dy, x -> dx.
template <typename T>
void SinDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return dy * x.cos();
  });
}

template <typename T>
void Cos(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> { return x.cos(); });
}

// dy, x -> dx.
template <typename T>
void CosDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return -dy * x.sin();
  });
}

// Without overflow: max(x, 0) + log(1 + exp(-|x|)).
template <typename T>
void Softplus(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> {
    return x.max(T{0}) +
           (-x.abs()).exp().unaryExpr([](T v) { return std::log1p(v); });
  });
}

// dy, x -> dx.
template <typename T>
void SoftplusDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return dy * Sigmoid<T>(x);
  });
}

template <typename T>
Block<T> HardSigmoidOf(const Block<T>& x) {
  return (x / T{6} + T(0.5)).max(T{0}).min(T{1});
}

template <typename T>
void HardSigmoid(const KernelCall& call) {
  Unary<T>(call,
           [](const Block<T>& x) -> Block<T> { return HardSigmoidOf<T>(x); });
}

// dy, x -> dx: as PyTorch's, 0 where it bends.
template <typename T>
void HardSigmoidDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x.abs() < T{3}).select(dy / T{6}, Block<T>::Zero());
  });
}

template <typename T>
void HardSwish(const KernelCall& call) {
  Unary<T>(call, [](const Block<T>& x) -> Block<T> {
    return x * HardSigmoidOf<T>(x);
  });
}

// dy, x -> dx: x / 3 + 1/2 between -3 and 3, below 0 and above 1.
template <typename T>
void HardSwishDx(const KernelCall& call) {
  Binary<T>(call, [](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x.abs() < T{3})
        .select(dy * (x / T{3} + T(0.5)),
                (x < T{0}).select(Block<T>::Zero(), dy));
  });
}

template <typename T>
void Power(const KernelCall& call) {
  const T exponent = static_cast<T>(call.attribute("exponent"));
  Unary<T>(call, [exponent](const Block<T>& x) -> Block<T> {
    return x.unaryExpr([exponent](T v) { return std::pow(v, exponent); });
  });
}

// dy, x -> dx.
template <typename T>
void PowerDx(const KernelCall& call) {
  const T exponent = static_cast<T>(call.attribute("exponent"));
  Binary<T>(call,
            [exponent](const Block<T>& dy, const Block<T>& x) -> Block<T> {
              return dy * exponent * x.unaryExpr([exponent](T v) {
                return std::pow(v, exponent - 1);
              });
            });
}

template <typename T>
void Clip(const KernelCall& call) {
  const T least = static_cast<T>(call.attribute("least"));
  const T most = static_cast<T>(call.attribute("most"));
  Unary<T>(call, [least, most](const Block<T>& x) -> Block<T> {
    return x.max(least).min(most);
  });
}

// dy, x -> dx: as within, so at the bounds.
template <typename T>
void ClipDx(const KernelCall& call) {
  const T least = static_cast<T>(call.attribute("least"));
  const T most = static_cast<T>(call.attribute("most"));
  Binary<T>(call,
            [least, most](const Block<T>& dy, const Block<T>& x) -> Block<T> {
              return (x >= least && x <= most).select(dy, Block<T>::Zero());
            });
}

template <typename T>
void LeakyRelu(const KernelCall& call) {
  const T slope = static_cast<T>(call.attribute("slope"));
  Unary<T>(call, [slope](const Block<T>& x) -> Block<T> {
    return (x > T{0}).select(x, slope * x);
  });
}

// dy, x -> dx.
template <typename T>
void LeakyReluDx(const KernelCall& call) {
  const T slope = static_cast<T>(call.attribute("slope"));
  Binary<T>(call, [slope](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x > T{0}).select(dy, slope * dy);
  });
}

template <typename T>
void Elu(const KernelCall& call) {
  const T alpha = static_cast<T>(call.attribute("alpha"));
  Unary<T>(call, [alpha](const Block<T>& x) -> Block<T> {
    return (x > T{0}).select(
        x, alpha * x.unaryExpr([](T v) { return std::expm1(v); }));
  });
}

// dy, x -> dx.
template <typename T>
void EluDx(const KernelCall& call) {
  const T alpha = static_cast<T>(call.attribute("alpha"));
  Binary<T>(call, [alpha](const Block<T>& dy, const Block<T>& x) -> Block<T> {
    return (x > T{0}).select(dy, alpha * dy * x.exp());
  });
}

// Adds any number of operands, in order; those masked to zero are left out.
template <typename T>
void AddAll(const KernelCall& call) {
  T* const y = call.results[0].as<T>();
  ForEachBlock(call, call.results[0].elements(), [&](int64_t i, int64_t count) {
    Block<T> sum = Block<T>::Zero();
    if (call.accumulate) sum = Load<T>(y + i, count);
    for (const LocalTensor& operand : call.operands) {
      if (operand.data == nullptr) continue;
      sum += Load(operand.as<const T>() + i, count);
    }
    Store<T>(sum, count, y + i);
  });
}

}  // namespace

std::vector<Kernel> CpuElementwiseKernels() {
  return {
      {"gelu", ByDType<Gelu<float>, Gelu<double>>},
      {"gelu_dx", ByDType<GeluDx<float>, GeluDx<double>>},
      {"gelu_erf", ByDType<GeluErf<float>, GeluErf<double>>},
      {"gelu_erf_dx", ByDType<GeluErfDx<float>, GeluErfDx<double>>},
      {"silu", ByDType<Silu<float>, Silu<double>>},
      {"silu_dx", ByDType<SiluDx<float>, SiluDx<double>>},
      {"relu", ByDType<Relu<float>, Relu<double>>},
      {"relu_dx", ByDType<ReluDx<float>, ReluDx<double>>},
      {"sigmoid", ByDType<SigmoidOfX<float>, SigmoidOfX<double>>},
      {"sigmoid_dx", ByDType<SigmoidDx<float>, SigmoidDx<double>>},
      {"tanh", ByDType<Tanh<float>, Tanh<double>>},
      {"tanh_dx", ByDType<TanhDx<float>, TanhDx<double>>},
      {"scale", ByDType<Scale<float>, Scale<double>>, true},
      {"offset", ByDType<Offset<float>, Offset<double>>},
      {"exp", ByDType<Exp<float>, Exp<double>>},
      {"exp_dx", ByDType<ExpDx<float>, ExpDx<double>>},
      {"log", ByDType<Log<float>, Log<double>>},
      {"log_dx", ByDType<LogDx<float>, LogDx<double>>},
      {"sqrt", ByDType<Sqrt<float>, Sqrt<double>>},
      {"sqrt_dx", ByDType<SqrtDx<float>, SqrtDx<double>>},
      {"reciprocal", ByDType<Reciprocal<float>, Reciprocal<double>>},
      {"reciprocal_dx", ByDType<ReciprocalDx<float>, ReciprocalDx<double>>},
      {"abs", ByDType<Abs<float>, Abs<double>>},
      {"abs_dx", ByDType<AbsDx<float>, AbsDx<double>>},
      {"erf", ByDType<Erf<float>, Erf<double>>},
      {"erf_dx", ByDType<ErfDx<float>, ErfDx<double>>},
      {"sin", ByDType<Sin<float>, Sin<double>>},
      {"sin_dx", ByDType<SinDx<float>, SinDx<double>>},
      {"cos", ByDType<Cos<float>, Cos<double>>},
      {"cos_dx", ByDType<CosDx<float>, CosDx<double>>},
      {"softplus", ByDType<Softplus<float>, Softplus<double>>},
      {"softplus_dx", ByDType<SoftplusDx<float>, SoftplusDx<double>>},
      {"hard_sigmoid", ByDType<HardSigmoid<float>, HardSigmoid<double>>},
      {"hard_sigmoid_dx", ByDType<HardSigmoidDx<float>, HardSigmoidDx<double>>},
      {"hard_swish", ByDType<HardSwish<float>, HardSwish<double>>},
      {"hard_swish_dx", ByDType<HardSwishDx<float>, HardSwishDx<double>>},
      {"power", ByDType<Power<float>, Power<double>>},
      {"power_dx", ByDType<PowerDx<float>, PowerDx<double>>},
      {"clip", ByDType<Clip<float>, Clip<double>>},
      {"clip_dx", ByDType<ClipDx<float>, ClipDx<double>>},
      {"leaky_relu", ByDType<LeakyRelu<float>, LeakyRelu<double>>},
      {"leaky_relu_dx", ByDType<LeakyReluDx<float>, LeakyReluDx<double>>},
      {"elu", ByDType<Elu<float>, Elu<double>>},
      {"elu_dx", ByDType<EluDx<float>, EluDx<double>>},
      {"add", ByDType<AddAll<float>, AddAll<double>>, true},
      {"sum", ByDType<AddAll<float>, AddAll<double>>, true},
  };
}

}  // namespace tessera
