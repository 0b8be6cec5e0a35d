// Elementwise operators: operands and results have one shape. Formulas:
// runtime/kernels/cpu/elementwise.cc.

#include <array>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

// ---- Functions --------------------------------------------------------------

constexpr float kTwoRootTwoOverPi = 1.5957691216057308F;
constexpr float kCubic = 0.044715F;

__device__ float GeluArgument(float x) {
  return kTwoRootTwoOverPi * (x + kCubic * x * x * x);
}

struct Gelu {
  __device__ float operator()(float x) const {
    return x * Sigmoid(GeluArgument(x));
  }
};

struct GeluDx {
  __device__ float operator()(float dy, float x) const {
    const float p = Sigmoid(GeluArgument(x));
    const float dz = kTwoRootTwoOverPi * (1 + 3 * kCubic * x * x);
    return dy * (p + x * p * (1 - p) * dz);
  }
};

constexpr float kRootHalf = 0.7071067811865476F;
constexpr float kRootOneOverTwoPi = 0.3989422804014327F;

__device__ float NormalCdf(float x) {
  return 0.5F * (1 + erff(x * kRootHalf));
}

struct GeluErf {
  __device__ float operator()(float x) const { return x * NormalCdf(x); }
};

struct GeluErfDx {
  __device__ float operator()(float dy, float x) const {
    const float density = kRootOneOverTwoPi * expf(-0.5F * x * x);
    return dy * (NormalCdf(x) + x * density);
  }
};

struct Silu {
  __device__ float operator()(float x) const { return x * Sigmoid(x); }
};

struct SiluDx {
  __device__ float operator()(float dy, float x) const {
    const float p = Sigmoid(x);
    return dy * p * (1 + x * (1 - p));
  }
};

// Keeps what is not a number, as Clip does.
struct Relu {
  __device__ float operator()(float x) const { return x < 0 ? 0 : x; }
};

struct ReluDx {
  __device__ float operator()(float dy, float x) const {
    return x <= 0 ? 0 : dy;
  }
};

struct SigmoidOfX {
  __device__ float operator()(float x) const { return Sigmoid(x); }
};

struct SigmoidDx {
  __device__ float operator()(float dy, float y) const {
    return dy * y * (1 - y);
  }
};

struct Tanh {
  __device__ float operator()(float x) const { return tanhf(x); }
};

struct TanhDx {
  __device__ float operator()(float dy, float y) const {
    return dy * (1 - y * y);
  }
};

struct Offset {
  float amount;
  __device__ float operator()(float x) const { return x + amount; }
};

struct Exp {
  __device__ float operator()(float x) const { return expf(x); }
};
struct ExpDx {
  __device__ float operator()(float dy, float y) const { return dy * y; }
};

struct Log {
  __device__ float operator()(float x) const { return logf(x); }
};
struct LogDx {
  __device__ float operator()(float dy, float x) const { return dy / x; }
};

struct Sqrt {
  __device__ float operator()(float x) const { return sqrtf(x); }
};
struct SqrtDx {
  __device__ float operator()(float dy, float y) const { return 0.5F * dy / y; }
};

struct Reciprocal {
  __device__ float operator()(float x) const { return 1 / x; }
};
struct ReciprocalDx {
  __device__ float operator()(float dy, float y) const { return -dy * y * y; }
};

struct Abs {
  __device__ float operator()(float x) const { return fabsf(x); }
};
struct AbsDx {
  __device__ float operator()(float dy, float x) const {
    return x > 0 ? dy : x < 0 ? -dy : 0;
  }
};

struct Erf {
  __device__ float operator()(float x) const { return erff(x); }
};
struct ErfDx {
  __device__ float operator()(float dy, float x) const {
    return dy * 1.1283791670955126F * expf(-x * x);
  }
};

struct Sin {
  __device__ float operator()(float x) const { return sinf(x); }
};
struct SinDx {
  __device__ float operator()(float dy, float x) const { return dy * cosf(x); }
};

struct Cos {
  __device__ float operator()(float x) const { return cosf(x); }
};
struct CosDx {
  __device__ float operator()(float dy, float x) const { return -dy * sinf(x); }
};

struct Softplus {
  __device__ float operator()(float x) const {
    return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
  }
};
struct SoftplusDx {
  __device__ float operator()(float dy, float x) const {
    return dy * Sigmoid(x);
  }
};

__device__ float HardSigmoidOf(float x) {
  const float y = x / 6 + 0.5F;
  return y < 0 ? 0 : y > 1 ? 1 : y;
}
struct HardSigmoid {
  __device__ float operator()(float x) const { return HardSigmoidOf(x); }
};
struct HardSigmoidDx {
  __device__ float operator()(float dy, float x) const {
    return fabsf(x) < 3 ? dy / 6 : 0;
  }
};

struct HardSwish {
  __device__ float operator()(float x) const { return x * HardSigmoidOf(x); }
};
struct HardSwishDx {
  __device__ float operator()(float dy, float x) const {
    if (fabsf(x) < 3) return dy * (x / 3 + 0.5F);
    return x < 0 ? 0 : dy;
  }
};

struct Power {
  float exponent;
  __device__ float operator()(float x) const { return powf(x, exponent); }
};
struct PowerDx {
  float exponent;
  __device__ float operator()(float dy, float x) const {
    return dy * exponent * powf(x, exponent - 1);
  }
};

struct Clip {
  float least;
  float most;
  __device__ float operator()(float x) const {
    const float above = x < least ? least : x;
    return above > most ? most : above;
  }
};
struct ClipDx {
  float least;
  float most;
  __device__ float operator()(float dy, float x) const {
    return x >= least && x <= most ? dy : 0;
  }
};

struct LeakyRelu {
  float slope;
  __device__ float operator()(float x) const { return x > 0 ? x : slope * x; }
};
struct LeakyReluDx {
  float slope;
  __device__ float operator()(float dy, float x) const {
    return x > 0 ? dy : slope * dy;
  }
};

struct Elu {
  float alpha;
  __device__ float operator()(float x) const {
    return x > 0 ? x : alpha * expm1f(x);
  }
};
struct EluDx {
  float alpha;
  __device__ float operator()(float dy, float x) const {
    return x > 0 ? dy : alpha * dy * expf(x);
  }
};

struct Times {
  __device__ float operator()(float a, float b) const { return a * b; }
};

// ---- Kernels ----------------------------------------------------------------

template <typename T, typename F>
__global__ void ApplyUnary(Elements<T> x, Elements<T> y, int64_t n, F f) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    x.Load(first, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_x[j] = f(of_x[j]);
    y.Store(first, span, of_x);
  });
}

template <typename T, typename F>
__global__ void ApplyBinary(Elements<T> a, Elements<T> b, Elements<T> y,
                            int64_t n, F f) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_a[kVector];
    float of_b[kVector];
    a.Load(first, span, of_a);
    b.Load(first, span, of_b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_a[j] = f(of_a[j], of_b[j]);
    y.Store(first, span, of_a);
  });
}

// y = SiLU(x), product = y other.
template <typename T>
__global__ void ApplySiluGate(Elements<T> x, Elements<T> other, Elements<T> y,
                              Elements<T> product, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    float of_other[kVector];
    x.Load(first, span, of_x);
    other.Load(first, span, of_other);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      of_x[j] = Fp32(Rounded<T>(Silu()(of_x[j])));
      of_other[j] *= of_x[j];
    }
    y.Store(first, span, of_x);
    product.Store(first, span, of_other);
  });
}

// Where vectors lie in a tensor whose rows may lie apart.
struct RowPlaces {
  uint32_t vectors = 0;  // of a row; 0: there are no gaps
  int64_t stride = 0;

  explicit RowPlaces(const LocalTensor& tensor)
      : vectors(static_cast<uint32_t>(tensor.row / kVector)),
        stride(tensor.row_stride) {}
  __device__ int64_t Of(int64_t first) const {
    if (vectors == 0) return first;
    const auto vector = static_cast<uint32_t>(first / kVector);
    const uint32_t row = vector / vectors;
    return row * stride + int64_t{vector - row * vectors} * kVector;
  }
};

// dx = dy other SiLU'(x), and with kBoth dother = dy y.
template <typename T, bool kBoth>
__global__ void ApplySiluGateDx(Elements<T> dy, Elements<T> other,
                                Elements<T> x, Elements<T> y, Elements<T> dx,
                                Elements<T> dother, RowPlaces dx_places,
                                RowPlaces dother_places, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_dy[kVector];
    float of_other[kVector];
    float of_x[kVector];
    float of_y[kVector] = {};
    dy.Load(first, span, of_dy);
    other.Load(first, span, of_other);
    x.Load(first, span, of_x);
    if (kBoth) y.Load(first, span, of_y);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float d = Fp32(Rounded<T>(of_dy[j] * of_other[j]));
      of_x[j] = SiluDx()(d, of_x[j]);
      of_y[j] *= of_dy[j];
    }
    dx.Store(dx_places.Of(first), span, of_x);
    if (kBoth) dother.Store(dother_places.Of(first), span, of_y);
  });
}

template <typename T>
__global__ void MultiplyBy(Elements<T> x, float factor, bool accumulate,
                           Elements<T> y, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    float before[kVector] = {};
    x.Load(first, span, of_x);
    if (accumulate) y.Load(first, span, before);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_x[j] = before[j] + factor * of_x[j];
    y.Store(first, span, of_x);
  });
}

constexpr int kMostTerms = 64;
template <typename T>
struct Terms {
  Elements<T> of[kMostTerms];
  int count = 0;
};

template <typename T>
__global__ void AddTerms(Terms<T> terms, Elements<T> y, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float sum[kVector] = {};
    for (int i = 0; i < terms.count; ++i) {
      float term[kVector];
      terms.of[i].Load(first, span, term);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += term[j];
    }
    y.Store(first, span, sum);
  });
}

// ---- Calls ------------------------------------------------------------------

template <typename F>
void UnaryBy(const KernelCall& call, F f) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({x, y}, [&]<typename T>() {
    Launch(ApplyUnary<T, F>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), n, f);
  });
}

template <typename F>
void BinaryBy(const KernelCall& call, F f) {
  const LocalTensor& a = call.operands[0];
  const LocalTensor& b = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  TESSERA_CHECK(a.elements() == n && b.elements() == n)
      << a.elements() << " and " << b.elements();
  ByType({a, b, y}, [&]<typename T>() {
    Launch(ApplyBinary<T, F>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(a), Elements<T>(b), Elements<T>(y), n, f);
  });
}

template <typename F>
void Unary(const KernelCall& call) {
  UnaryBy(call, F());
}
template <typename F>
void Binary(const KernelCall& call) {
  BinaryBy(call, F());
}

float Number(const KernelCall& call, std::string_view name) {
  return static_cast<float>(call.attribute(name));
}

void OffsetBy(const KernelCall& call) {
  UnaryBy(call, Offset{Number(call, "amount")});
}
void PowerOf(const KernelCall& call) {
  UnaryBy(call, Power{Number(call, "exponent")});
}
void PowerOfDx(const KernelCall& call) {
  BinaryBy(call, PowerDx{Number(call, "exponent")});
}
void ClipTo(const KernelCall& call) {
  UnaryBy(call, Clip{Number(call, "least"), Number(call, "most")});
}
void ClipToDx(const KernelCall& call) {
  BinaryBy(call, ClipDx{Number(call, "least"), Number(call, "most")});
}
void LeakyReluBy(const KernelCall& call) {
  UnaryBy(call, LeakyRelu{Number(call, "slope")});
}
void LeakyReluByDx(const KernelCall& call) {
  BinaryBy(call, LeakyReluDx{Number(call, "slope")});
}
void EluBy(const KernelCall& call) {
  UnaryBy(call, Elu{Number(call, "alpha")});
}
void EluByDx(const KernelCall& call) {
  BinaryBy(call, EluDx{Number(call, "alpha")});
}

void Scale(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({x, y}, [&]<typename T>() {
    Launch(MultiplyBy<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x), Number(call, "factor"), call.accumulate,
           Elements<T>(y), n);
  });
}

// x, other -> SiLU(x), SiLU(x) other.
void SiluGate(const KernelCall& call) {
  const std::array<LocalTensor, 4> all = {call.operands[0], call.operands[1],
                                          call.results[0], call.results[1]};
  const int64_t n = all[2].elements();
  ByType(all, [&]<typename T>() {
    if constexpr (std::is_same_v<T, Any>) {
      Unary<Silu>(PartOf(call, call.operands.first(1), call.results.first(1)));
      const std::array<LocalTensor, 2> pair = {all[2], all[1]};
      Binary<Times>(PartOf(call, pair, call.results.subspan(1)));
    } else {
      Launch(ApplySiluGate<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
             *call.queue, Elements<T>(all[0]), Elements<T>(all[1]),
             Elements<T>(all[2]), Elements<T>(all[3]), n);
    }
  });
}

// dy, other, x [, SiLU(x)] -> dx [, dother].
template <bool kBoth>
void SiluGateDx(const KernelCall& call) {
  const auto& in = call.operands;
  const LocalTensor& dx = call.results[0];
  const int64_t n = dx.elements();
  std::vector<LocalTensor> all(in.begin(), in.end());
  all.insert(all.end(), call.results.begin(), call.results.end());
  const LocalTensor& last = call.results.back();
  ByType(all, [&]<typename T>() {
    if constexpr (std::is_same_v<T, Any>) {
      TESSERA_CHECK(dx.row_stride == 0 && last.row_stride == 0)
          << "rows of several types that lie apart";
      if (kBoth) {
        const std::array<LocalTensor, 2> pair = {in[0], in[3]};
        Binary<Times>(PartOf(call, pair, call.results.subspan(1)));
      }
      Binary<Times>(PartOf(call, in.first(2), call.results.first(1)));
      const std::array<LocalTensor, 2> pair = {dx, in[2]};
      Binary<SiluDx>(PartOf(call, pair, call.results.first(1)));
    } else {
      Launch(ApplySiluGateDx<T, kBoth>, BlocksForVectors(*call.queue, n),
             kThreads, 0, *call.queue, Elements<T>(in[0]), Elements<T>(in[1]),
             Elements<T>(in[2]), kBoth ? Elements<T>(in[3]) : Elements<T>(),
             Elements<T>(dx), kBoth ? Elements<T>(last) : Elements<T>(),
             RowPlaces(dx), RowPlaces(last), n);
    }
  });
}

// Adds any number of operands, in order; those masked to zero are left out. One
// launch adds kMostTerms of them, of which what is there already is the first
// from the second launch on. So a sum in 16 bits is rounded once for each
// launch, and no later term may lie where the sum does.
void AddAll(const KernelCall& call) {
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  std::vector<LocalTensor> tensors = {y};  // and the terms
  if (call.accumulate) tensors.push_back(y);
  for (const LocalTensor& operand : call.operands) {
    if (operand.data != nullptr) tensors.push_back(operand);
  }
  ByType(tensors, [&]<typename T>() {
    size_t next = 1;
    do {
      Terms<T> terms;
      if (next > 1) terms.of[terms.count++] = Elements<T>(y);
      while (terms.count < kMostTerms && next < tensors.size()) {
        terms.of[terms.count++] = Elements<T>(tensors[next++]);
      }
      Launch(AddTerms<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
             *call.queue, terms, Elements<T>(y), n);
    } while (next < tensors.size());
  });
}

}  // namespace

std::vector<Kernel> CudaElementwiseKernels() {
  return {
      {"gelu", Unary<Gelu>},
      {"gelu_dx", Binary<GeluDx>},
      {"gelu_erf", Unary<GeluErf>},
      {"gelu_erf_dx", Binary<GeluErfDx>},
      {"silu", Unary<Silu>},
      {"silu_dx", Binary<SiluDx>},
      {"relu", Unary<Relu>},
      {"relu_dx", Binary<ReluDx>},
      {"sigmoid", Unary<SigmoidOfX>},
      {"sigmoid_dx", Binary<SigmoidDx>},
      {"tanh", Unary<Tanh>},
      {"tanh_dx", Binary<TanhDx>},
      {"scale", Scale, true},
      {"offset", OffsetBy},
      {"exp", Unary<Exp>},
      {"exp_dx", Binary<ExpDx>},
      {"log", Unary<Log>},
      {"log_dx", Binary<LogDx>},
      {"sqrt", Unary<Sqrt>},
      {"sqrt_dx", Binary<SqrtDx>},
      {"reciprocal", Unary<Reciprocal>},
      {"reciprocal_dx", Binary<ReciprocalDx>},
      {"abs", Unary<Abs>},
      {"abs_dx", Binary<AbsDx>},
      {"erf", Unary<Erf>},
      {"erf_dx", Binary<ErfDx>},
      {"sin", Unary<Sin>},
      {"sin_dx", Binary<SinDx>},
      {"cos", Unary<Cos>},
      {"cos_dx", Binary<CosDx>},
      {"softplus", Unary<Softplus>},
      {"softplus_dx", Binary<SoftplusDx>},
      {"hard_sigmoid", Unary<HardSigmoid>},
      {"hard_sigmoid_dx", Binary<HardSigmoidDx>},
      {"hard_swish", Unary<HardSwish>},
      {"hard_swish_dx", Binary<HardSwishDx>},
      {"power", PowerOf},
      {"power_dx", PowerOfDx},
      {"clip", ClipTo},
      {"clip_dx", ClipToDx},
      {"leaky_relu", LeakyReluBy},
      {"leaky_relu_dx", LeakyReluByDx},
      {"elu", EluBy},
      {"elu_dx", EluByDx},
      {"add", AddAll, true},
      {"sum", AddAll, true},
  };
}

std::vector<Kernel> CudaFusedElementwiseKernels() {
  return {
      {"silu+multiply", SiluGate},
      {"multiply+silu_dx", SiluGateDx<false>, false, nullptr,
       RowsApart::kResults},
      {"multiply+silu_dx+multiply", SiluGateDx<true>, false, nullptr,
       RowsApart::kResults},
  };
}

}  // namespace tessera
