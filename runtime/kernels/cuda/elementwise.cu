// Elementwise operators: operands and results have one shape. Formulas:
// runtime/kernels/cpu/elementwise.cc.

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

__device__ float Sigmoid(float x) {
  return __fdividef(1.0F, 1.0F + expf(-x));
}

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

struct Relu {
  __device__ float operator()(float x) const { return x > 0 ? x : 0; }
};

struct ReluDx {
  __device__ float operator()(float dy, float x) const {
    return x > 0 ? dy : 0;
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

struct Product {
  __device__ float operator()(float a, float b) const { return a * b; }
};

// ---- Kernels ----------------------------------------------------------------

template <typename T, typename F>
__global__ void ApplyUnary(Elements<T> x, Elements<T> y, int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    x.Load(first, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_x[j] = F()(of_x[j]);
    y.Store(first, span, of_x);
  });
}

template <typename T, typename F>
__global__ void ApplyBinary(Elements<T> a, Elements<T> b, Elements<T> y,
                            int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_a[kVector];
    float of_b[kVector];
    a.Load(first, span, of_a);
    b.Load(first, span, of_b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_a[j] = F()(of_a[j], of_b[j]);
    y.Store(first, span, of_a);
  });
}

template <typename T>
__global__ void MultiplyBy(Elements<T> x, float factor, Elements<T> y,
                           int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_x[kVector];
    x.Load(first, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_x[j] *= factor;
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
void Unary(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({x, y}, [&]<typename T>() {
    Launch(ApplyUnary<T, F>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), n);
  });
}

template <typename F>
void Binary(const KernelCall& call) {
  const LocalTensor& a = call.operands[0];
  const LocalTensor& b = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  TESSERA_CHECK(a.elements() == n && b.elements() == n)
      << a.elements() << " and " << b.elements();
  ByType({a, b, y}, [&]<typename T>() {
    Launch(ApplyBinary<T, F>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(a), Elements<T>(b), Elements<T>(y), n);
  });
}

void Scale(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({x, y}, [&]<typename T>() {
    Launch(MultiplyBy<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x),
           static_cast<float>(call.attribute("factor")), Elements<T>(y), n);
  });
}

// Adds any number of operands, in order; those masked to zero are left out.
void AddAll(const KernelCall& call) {
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  std::vector<LocalTensor> tensors = {y};  // and the terms
  if (call.accumulate) tensors.push_back(y);
  for (const LocalTensor& operand : call.operands) {
    if (operand.data != nullptr) tensors.push_back(operand);
  }
  TESSERA_CHECK(tensors.size() <= kMostTerms + 1) << tensors.size() - 1;
  ByType(tensors, [&]<typename T>() {
    Terms<T> terms;
    for (size_t i = 1; i < tensors.size(); ++i) {
      terms.of[terms.count++] = Elements<T>(tensors[i]);
    }
    Launch(AddTerms<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, terms, Elements<T>(y), n);
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
      {"scale", Scale},
      {"multiply", Binary<Product>},
      {"add", AddAll, true},
      {"sum", AddAll, true},
  };
}

}  // namespace tessera
