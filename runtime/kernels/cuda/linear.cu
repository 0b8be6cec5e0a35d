// Dense layers: x is (M, K), w is (N, K), y is (M, N), where M, N and K are
// runs of dimensions. Products are CudaMatMul's, with the bias in their
// epilogue. It takes no fp32 gradient of a router's logits by a 16-bit weight:
// by bf16 such a gradient is three terms of bf16. What is left is computed
// here, in fp32 without tensor cores.
//
// A bias gradient is a kernel of its own, not an epilogue of the weight's
// product, which makes that slower by more than the kernel takes (on an H200,
// 32,768 rows of bf16: 1600 x 1600 by 42 us, 6400 x 1600 by 335 us); nor one of
// the GELU's gradient (the same rows, 1600 to 6400: 2.9 ms in place of 0.95).

#include <algorithm>
#include <array>
#include <type_traits>

#include "planner/base/divide.h"
#include "runtime/kernels/cuda/launch.h"
#include "runtime/kernels/cuda/matmul.h"
#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/cuda/tiled_product.h"
#include "runtime/kernels/extent.h"

namespace tessera {
namespace {

// ---- Products of any dtypes -------------------------------------------------

struct AnyMatrix {
  Elements<Any> values;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  __device__ float Get(int64_t row, int64_t column) const {
    return values.Get(row * row_stride + column * column_stride);
  }
};

// As tiled_product.h has it.
struct AnyProduct {
  int64_t m, n, k;
  AnyMatrix a, b;
  Elements<Any> bias;  // or null
  Elements<Any> d;
  bool accumulate;

  __device__ __host__ int64_t groups() const { return 1; }
  __device__ __host__ int64_t rows() const { return m; }
  __device__ __host__ int64_t columns() const { return n; }
  __device__ __host__ int64_t depth() const { return k; }
  __device__ bool a_by_depth() const { return a.column_stride == 1; }
  __device__ bool b_by_depth() const { return b.row_stride == 1; }
  __device__ float A(int64_t, int64_t row, int64_t at) const {
    return a.Get(row, at);
  }
  __device__ float B(int64_t, int64_t at, int64_t column) const {
    return b.Get(at, column);
  }
  __device__ void Put(int64_t, int64_t row, int64_t column, float sum) const {
    const int64_t i = row * n + column;
    if (bias.data != nullptr) sum += bias.Get(column);
    if (accumulate) sum += d.Get(i);
    d.Set(i, sum);
  }
};

void RunAny(const MatMulProblem& problem, const MatMulData& data,
            Elements<Any> bias, CudaQueue& queue) {
  const auto any = [](const void* values, DType dtype) {
    LocalTensor tensor;
    tensor.data = const_cast<void*>(values);
    tensor.dtype = dtype;
    return Elements<Any>(tensor);
  };
  const auto matrix = [&](const void* values, DType dtype, int64_t stride,
                          bool transposed) -> AnyMatrix {
    if (transposed) return {any(values, dtype), 1, stride};
    return {any(values, dtype), stride, 1};
  };
  const AnyProduct product = {
      problem.m,
      problem.n,
      problem.k,
      matrix(data.a, problem.a, problem.stride_of_a(), problem.transpose_a),
      matrix(data.b, problem.b, problem.transpose_b ? problem.k : problem.n,
             problem.transpose_b),
      bias,
      any(data.d, problem.d),
      problem.accumulate};
  constexpr int64_t kLeastDepth = 256;
  RunTiledProduct(product, kLeastDepth, queue);
}

// ---- Products of fp32 by bf16 -----------------------------------------------

// An fp32 number has 24 bits: it is the sum of three of bf16, which have 8 and
// the same exponents.
constexpr int kTerms = 3;

// Of each row of `from` the first terms of all its columns, then the second
// ones, then the third.
__global__ void __launch_bounds__(kThreads)
    SplitInTerms(const float* from, int64_t stride, int64_t rows,
                 int64_t columns, BFloat16* to) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < rows * columns; i += step) {
    const int64_t row = i / columns;
    const int64_t column = i % columns;
    float rest = from[row * stride + column];
    for (int term = 0; term < kTerms; ++term) {
      const auto rounded = Rounded<BFloat16>(rest);
      to[(row * kTerms + term) * columns + column] = rounded;
      // Of what is infinite, too, no more is left.
      rest = Fp32(rounded) == rest ? 0.0f : rest - Fp32(rounded);
    }
  }
}

// `count` elements kTerms times, one behind the other.
__global__ void __launch_bounds__(kThreads)
    Repeat(const BFloat16* from, int64_t count, BFloat16* to) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < kTerms * count; i += step) {
    to[i] = from[i % count];
  }
}

// D = op(A) B with A in fp32 and B in bf16: by the matrix units, with the terms
// of A behind what the matmul takes of the workspace, in pieces where they have
// no room there. Where A is stored k x m its terms are added up in D, otherwise
// within a product by the same rows of B. False where it cannot.
bool RunInTerms(const MatMulProblem& whole, const MatMulData& data,
                CudaQueue& queue) {
  MatMulProblem p = whole;
  p.a = DType::kBFloat16;
  p.lda = 0;
  const bool adds_up = p.transpose_a;
  if (whole.a != DType::kFloat32 || p.b != DType::kBFloat16 || p.transpose_b ||
      !queue.matmul->Takes(p) || (adds_up && p.d != DType::kFloat32) ||
      p.m * p.n * p.k == 0) {
    return false;
  }
  const int64_t rows = adds_up ? p.k : p.m;  // of A as it is stored
  const int64_t columns = adds_up ? p.m : p.k;
  const int64_t copies_of_b = adds_up ? 0 : kTerms * p.k * p.n;
  const int64_t at_copies = RoundUp(queue.matmul_bytes, 256);
  const int64_t at_terms = at_copies + RoundUp(copies_of_b * SizeOf(p.b), 256);
  const int64_t room =
      (queue.workspace_bytes - at_terms) / (kTerms * columns * SizeOf(p.a));
  constexpr int64_t kLeastRows = 64;  // of a piece
  if (room < std::min(rows, kLeastRows)) return false;

  auto* const terms = reinterpret_cast<BFloat16*>(queue.workspace + at_terms);
  auto* const copies = reinterpret_cast<BFloat16*>(queue.workspace + at_copies);
  const auto* const b = static_cast<const BFloat16*>(data.b);
  auto* const d = static_cast<std::byte*>(data.d);
  if (!adds_up) {
    Launch(Repeat, BlocksFor(queue, copies_of_b), kThreads, 0, queue, b,
           p.k * p.n, copies);
  }
  const int64_t piece = DivideUp(rows, DivideUp(rows, room));
  for (int64_t row = 0; row < rows; row += piece) {
    const int64_t count = std::min(piece, rows - row);
    Launch(SplitInTerms, BlocksFor(queue, count * columns), kThreads, 0, queue,
           static_cast<const float*>(data.a) + row * whole.stride_of_a(),
           whole.stride_of_a(), count, columns, terms);
    if (!adds_up) {
      p.m = count;
      p.k = kTerms * columns;
      queue.matmul->Run(
          p, {.a = terms, .b = copies, .d = d + row * p.n * SizeOf(p.d)},
          queue);
      continue;
    }
    p.k = count;
    p.lda = kTerms * columns;
    for (int term = 0; term < kTerms; ++term) {
      p.accumulate = whole.accumulate || row > 0 || term > 0;
      queue.matmul->Run(
          p, {.a = terms + term * columns, .b = b + row * p.n, .d = d}, queue);
    }
  }
  return true;
}

// ---- Linear -----------------------------------------------------------------

// The extents of the product of the first two operands.
MatMulProblem ProductOf(const KernelCall& call) {
  MatMulProblem problem;
  problem.m = Extent(call, 0, 1, /*shared=*/false);
  problem.n = Extent(call, 1, 0, /*shared=*/false);
  problem.k = Extent(call, 0, 1, /*shared=*/true);
  return problem;
}

// D = op(A) op(B), + bias where there is one, into the call's result.
void Multiply(const KernelCall& call, MatMulProblem problem,
              const LocalTensor& a, const LocalTensor& b,
              const LocalTensor* bias = nullptr) {
  const LocalTensor& d = call.results[0];
  TESSERA_CHECK(d.elements() == problem.m * problem.n)
      << d.elements() << " elements for " << Describe(problem);
  problem.a = a.dtype;
  problem.b = b.dtype;
  problem.d = d.dtype;
  problem.accumulate = call.accumulate;
  MatMulData data = {.a = a.data, .b = b.data, .d = d.data};
  Elements<Any> any_bias;
  if (bias != nullptr && bias->data != nullptr) {
    any_bias = Elements<Any>(*bias);
    if (bias->dtype == d.dtype) {
      problem.epilogue = MatMulEpilogue::kBias;
      data.bias = bias->data;
    }
  }
  const bool all = any_bias.data == data.bias;
  if (all && call.queue->matmul->Takes(problem)) {
    call.queue->matmul->Run(problem, data, *call.queue);
  } else if (any_bias.data != nullptr ||
             !RunInTerms(problem, data, *call.queue)) {
    RunAny(problem, data, any_bias, *call.queue);
  }
}

// x, w [, bias] -> y = x w^T + bias.
void Linear(const KernelCall& call) {
  MatMulProblem problem = ProductOf(call);
  problem.transpose_b = true;
  Multiply(call, problem, call.operands[0], call.operands[1],
           call.operands.size() > 2 ? &call.operands[2] : nullptr);
}

// x, w [, bias] -> y = x w^T + bias, GELU(y).
void LinearGelu(const KernelCall& call) {
  const LocalTensor& y = call.results[0];
  const LocalTensor& activated = call.results[1];
  const LocalTensor* const bias =
      call.operands.size() > 2 && call.operands[2].data != nullptr
          ? &call.operands[2]
          : nullptr;
  MatMulProblem problem = ProductOf(call);
  problem.transpose_b = true;
  problem.a = call.operands[0].dtype;
  problem.b = call.operands[1].dtype;
  problem.d = activated.dtype;
  problem.epilogue =
      bias != nullptr ? MatMulEpilogue::kBiasGelu : MatMulEpilogue::kGelu;
  const bool alike =
      y.dtype == activated.dtype && (!bias || bias->dtype == y.dtype);
  if (alike && call.queue->matmul->Takes(problem)) {
    return call.queue->matmul->Run(problem,
                                   {.a = call.operands[0].data,
                                    .b = call.operands[1].data,
                                    .d = activated.data,
                                    .bias = bias ? bias->data : nullptr,
                                    .aux = y.data},
                                   *call.queue);
  }
  Linear(PartOf(call, call.operands, call.results.first(1)));
  FindCudaKernel("gelu").value()->run(
      PartOf(call, call.results.first(1), call.results.subspan(1)));
}

// dy, w -> dx = dy w.
void LinearDx(const KernelCall& call) {
  MatMulProblem problem = ProductOf(call);
  Multiply(call, problem, call.operands[0], call.operands[1]);
}

// dy, w, x -> dx = (dy w) GELU'(x).
void LinearDxGelu(const KernelCall& call) {
  const LocalTensor& x = call.operands[2];
  const LocalTensor& dx = call.results[0];
  MatMulProblem problem = ProductOf(call);
  problem.a = call.operands[0].dtype;
  problem.b = call.operands[1].dtype;
  problem.d = dx.dtype;
  problem.epilogue = MatMulEpilogue::kGeluGradient;
  if (x.dtype == dx.dtype && call.queue->matmul->Takes(problem)) {
    return call.queue->matmul->Run(problem,
                                   {.a = call.operands[0].data,
                                    .b = call.operands[1].data,
                                    .d = dx.data,
                                    .aux = x.data},
                                   *call.queue);
  }
  LinearDx(PartOf(call, call.operands.first(2), call.results));
  const std::array<LocalTensor, 2> pair = {dx, x};
  FindCudaKernel("gelu_dx").value()->run(PartOf(call, pair, call.results));
}

// dy, x -> dw = dy^T x.
void LinearDw(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  MatMulProblem problem = ProductOf(call);
  problem.transpose_a = true;
  problem.lda = dy.row_stride;
  TESSERA_CHECK(dy.row_stride == 0 || dy.row == problem.m)
      << "rows of " << dy.row << " for " << Describe(problem);
  Multiply(call, problem, call.operands[0], call.operands[1]);
}

// ---- Bias gradient ----------------------------------------------------------

template <typename T>
struct BiasTerm {
  Elements<T> dy;
  int64_t row_stride;

  template <typename S>
  __device__ void operator()(int64_t row, int64_t column, S span,
                             float (&sums)[1][kVector]) const {
    float values[kVector];
    dy.Load(row * row_stride + column, span, values);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[0][j] += values[j];
  }
};

// dy -> dbias: column sums.
void LinearDb(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const int64_t width = call.results[0].elements();
  const int64_t rows = width == 0 ? 0 : dy.elements() / width;
  ByType({dy}, [&]<typename T>() {
    const int64_t stride = dy.row_stride > 0 ? dy.row_stride : width;
    const BiasTerm<T> term = {Elements<T>(dy), stride};
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({dy}, width)) {
        return SumColumns<1, true>(call, term, rows, width);
      }
    }
    SumColumns<1>(call, term, rows, width);
  });
}

}  // namespace

std::vector<Kernel> CudaLinearKernels() {
  return {
      {"linear", Linear, true},
      {"linear_fp32", Linear, true},
      {"linear_dx", LinearDx, true},
      {"linear_dw", LinearDw, true, nullptr, RowsApart::kFirstOperand},
      {"linear_db", LinearDb, true, nullptr, RowsApart::kFirstOperand},
  };
}

std::vector<Kernel> CudaFusedLinearKernels() {
  return {
      {"linear+gelu", LinearGelu},
      {"linear_dx+gelu_dx", LinearDxGelu},
  };
}

}  // namespace tessera
