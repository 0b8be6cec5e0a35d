// Arithmetic of two operands that are broadcast to the result
// (planner/ops/broadcast.cc).

#include <cmath>

#include "runtime/kernels/cuda/sum_over.h"

namespace tessera {
namespace {

struct Product {
  __device__ float operator()(const float (&v)[2]) const { return v[0] * v[1]; }
};
struct Total {
  __device__ float operator()(const float (&v)[2]) const { return v[0] + v[1]; }
};
struct Difference {
  __device__ float operator()(const float (&v)[2]) const { return v[0] - v[1]; }
};
struct Same {
  __device__ float operator()(const float (&v)[1]) const { return v[0]; }
};
// Of y = a / b; of its adjoint, too: dy, b -> da.
struct Quotient {
  __device__ float operator()(const float (&v)[2]) const { return v[0] / v[1]; }
};
// dy, a, b -> db.
struct QuotientDy {
  __device__ float operator()(const float (&v)[3]) const {
    return -v[0] * v[1] / (v[2] * v[2]);
  }
};
struct Larger {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] > v[1] || std::isnan(v[0]) ? v[0] : v[1];
  }
};
// dy, own, other -> gradient of `own`: all of dy where one is not a number.
struct LargerDx {
  __device__ float operator()(const float (&v)[3]) const {
    return v[1] == v[2] ? v[0] / 2 : v[1] < v[2] ? 0.0f : v[0];
  }
};
struct Smaller {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] < v[1] || std::isnan(v[0]) ? v[0] : v[1];
  }
};
struct SmallerDx {
  __device__ float operator()(const float (&v)[3]) const {
    return v[1] == v[2] ? v[0] / 2 : v[1] > v[2] ? 0.0f : v[0];
  }
};

struct Equal {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] == v[1] ? 1.0f : 0.0f;
  }
};
struct NotEqual {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] != v[1] ? 1.0f : 0.0f;
  }
};
struct Less {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] < v[1] ? 1.0f : 0.0f;
  }
};
struct LessEqual {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] <= v[1] ? 1.0f : 0.0f;
  }
};
struct Greater {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] > v[1] ? 1.0f : 0.0f;
  }
};
struct GreaterEqual {
  __device__ float operator()(const float (&v)[2]) const {
    return v[0] >= v[1] ? 1.0f : 0.0f;
  }
};
// condition, a, b -> y.
struct Chosen {
  __device__ float operator()(const float (&v)[3]) const {
    return v[0] != 0 ? v[1] : v[2];
  }
};
// dy, condition -> da, and db.
struct ChosenDx {
  __device__ float operator()(const float (&v)[2]) const {
    return v[1] != 0 ? v[0] : 0.0f;
  }
};
struct ChosenDy {
  __device__ float operator()(const float (&v)[2]) const {
    return v[1] != 0 ? 0.0f : v[0];
  }
};

template <typename T, typename F>
__global__ void ApplyToBoth(Elements<T> a, Elements<T> b, Elements<T> y,
                            int64_t n) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float of_a[kVector];
    float of_b[kVector];
    a.Load(first, span, of_a);
    b.Load(first, span, of_b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float both[2] = {of_a[j], of_b[j]};
      of_a[j] = F()(both);
    }
    y.Store(first, span, of_a);
  });
}

// F of both operands, in vectors where they are alike.
template <typename F>
void OfBoth(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  if (call.accumulate || rule.operands[0] != rule.results[0] ||
      rule.operands[1] != rule.results[0]) {
    return SumOver<2>(call, F());
  }
  const LocalTensor& a = call.operands[0];
  const LocalTensor& b = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({a, b, y}, [&]<typename T>() {
    Launch(ApplyToBoth<T, F>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(a), Elements<T>(b), Elements<T>(y), n);
  });
}

template <typename F>
void OfThree(const KernelCall& call) {
  SumOver<3>(call, F());
}

void ReduceNegative(const KernelCall& call) {
  SumOver<1>(call, Same(), -1);
}

}  // namespace

std::vector<Kernel> CudaBroadcastKernels() {
  return {
      {"multiply", OfBoth<Product>, true},
      {"broadcast_add", OfBoth<Total>, true},
      {"subtract", OfBoth<Difference>, true},
      {"reduce_negative", ReduceNegative, true},
      {"divide", OfBoth<Quotient>, true},
      {"divide_dx", OfBoth<Quotient>, true},
      {"divide_dy", OfThree<QuotientDy>, true},
      {"maximum", OfBoth<Larger>, true},
      {"maximum_dx", OfThree<LargerDx>, true},
      {"minimum", OfBoth<Smaller>, true},
      {"minimum_dx", OfThree<SmallerDx>, true},
      {"equal", OfBoth<Equal>, true},
      {"not_equal", OfBoth<NotEqual>, true},
      {"less", OfBoth<Less>, true},
      {"less_equal", OfBoth<LessEqual>, true},
      {"greater", OfBoth<Greater>, true},
      {"greater_equal", OfBoth<GreaterEqual>, true},
      {"where", OfThree<Chosen>, true},
      {"where_dx", OfBoth<ChosenDx>, true},
      {"where_dy", OfBoth<ChosenDy>, true},
  };
}

}  // namespace tessera
