// Adafactor's kernels: formulas in planner/lower/factored_update.h. Nothing
// waits for the host: coefficients, sums and the state of the loss scale are
// read where they lie. A negative clip coefficient skips the step.

#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/cuda/pieces.h"
#include "runtime/kernels/cuda/reduce.h"
#include "runtime/loss_scale.h"

namespace tessera {
namespace {

// ---- The step's numbers -----------------------------------------------------

// t, from 1; `skipped` is null, or the number of skipped steps.
__device__ float StepNumber(const AdafactorOptions& options,
                            const float* skipped) {
  return static_cast<float>(options.now.Get().step) + 1 -
         (skipped == nullptr ? 0.0F : *skipped);
}

// 1 - beta2 of the step.
__device__ float Taken(const AdafactorOptions& options, const float* skipped) {
  return powf(StepNumber(options, skipped),
              static_cast<float>(options.beta2_decay));
}

// What U is multiplied by, from the sums of squares of parameter and update.
__device__ float Rate(const AdafactorOptions& options, float squares,
                      float update_squares, const float* skipped) {
  const auto elements = static_cast<float>(options.elements);
  const float rms = sqrtf(squares / elements);
  const float update_rms =
      sqrtf(update_squares / elements) / static_cast<float>(options.d);
  return fmaxf(static_cast<float>(options.epsilon2), rms) *
         fminf(static_cast<float>(options.now.Get().learning_rate),
               1 / sqrtf(StepNumber(options, skipped))) /
         fmaxf(1.0F, update_rms);
}

const float* SkippedSteps(const KernelCall& call, size_t scale) {
  return call.operands.size() > scale
             ? &call.operands[scale].as<LossScale>()->skipped_steps
             : nullptr;
}

// ---- Sums of squares --------------------------------------------------------

// Where the elements of a run, and the numbers of its rows and columns, lie.
struct MatrixPlace {
  int64_t rows, columns;  // of a matrix
  int64_t begin, end;     // the run
  int64_t row_width, first_row;
  int64_t column_width, first_column;

  MatrixPlace(const KernelCall& call, const LocalTensor& of_rows,
              const LocalTensor& of_columns) {
    const MatrixRun part(call);
    const VectorPlace row(call.operands[0], of_rows, 1);
    const VectorPlace column(call.operands[0], of_columns, 2);
    rows = part.rows;
    columns = part.columns;
    begin = part.run.begin;
    end = part.run.end;
    row_width = row.width;
    first_row = row.first;
    column_width = column.width;
    first_column = column.first;
  }

  // Of a row, counted through all matrices.
  __device__ int64_t RowAt(int64_t row) const {
    return first_row + row / rows * row_width + row % rows;
  }
  // Of the first column of that row's matrix.
  __device__ int64_t ColumnsAt(int64_t row) const {
    return first_column + row / rows * column_width;
  }
};

__global__ void Fill(Elements<Any> x, int64_t n, float value) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x.Set(i, value);
  }
}

// A block adds up a row, from `first_row` on, where it is in the run.
template <typename T>
__global__ void SumRows(Elements<T> gradient, Elements<Any> coefficient,
                        MatrixPlace place, int64_t first_row, double* sums) {
  const int64_t row = first_row + blockIdx.x;
  const int64_t row_begin = row * place.columns;
  const int64_t row_end = row_begin + place.columns;
  // In the buffer.
  const int64_t begin =
      (row_begin < place.begin ? place.begin : row_begin) - place.begin;
  const int64_t end = (row_end < place.end ? row_end : place.end) - place.begin;
  const float clip = coefficient.Get(0);
  double sum = 0;
  for (int64_t first =
           begin / kVector * kVector + int64_t{threadIdx.x} * kVector;
       first < end; first += int64_t{blockDim.x} * kVector) {
    const int64_t before = begin - first;
    const int64_t left = end - first;
    const Span span = {static_cast<int>(before > 0 ? before : 0),
                       static_cast<int>(left < kVector ? left : kVector)};
    float g[kVector];
    gradient.Load(first, span, g);
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += clip * g[j] * (clip * g[j]);
    sum += squares;
  }
  sum = Sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The same by a thread for each of `rows` rows, where they are short.
template <typename T>
__global__ void SumShortRows(Elements<T> gradient, Elements<Any> coefficient,
                             MatrixPlace place, int64_t first_row, int64_t rows,
                             double* sums) {
  const float clip = coefficient.Get(0);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t begin = (first_row + i) * place.columns;
    double sum = 0;
    for (int64_t k = begin; k < begin + place.columns; ++k) {
      if (k < place.begin || k >= place.end) continue;
      const float g = clip * gradient.Get(k - place.begin);
      sum += g * g;
    }
    sums[i] = sum;
  }
}

// A block adds the sums of a matrix' rows to their places, and that of all of
// them to the matrix' own; rows [first_row, end_row) have been summed.
__global__ void AddRows(const double* sums, int64_t first_row, int64_t end_row,
                        MatrixPlace place, Elements<Any> rows,
                        Elements<Any> totals, int64_t first_total) {
  const int64_t matrix = first_row / place.rows + blockIdx.x;
  const int64_t matrix_begin = matrix * place.rows;
  const int64_t matrix_end = matrix_begin + place.rows;
  const int64_t begin = matrix_begin < first_row ? first_row : matrix_begin;
  const int64_t end = matrix_end < end_row ? matrix_end : end_row;
  double total = 0;
  for (int64_t row = begin + threadIdx.x; row < end; row += blockDim.x) {
    const double sum = sums[row - first_row];
    const int64_t at = place.RowAt(row);
    rows.Set(at, rows.Get(at) + static_cast<float>(sum));
    total += sum;
  }
  total = Sum(total);
  if (threadIdx.x > 0) return;
  const int64_t at = first_total + matrix;
  totals.Set(at, totals.Get(at) + static_cast<float>(total));
}

// Adds the squares of a matrix' columns in one row, of the run.
template <typename T>
struct ColumnSquares {
  Elements<T> gradient;
  Elements<Any> coefficient;
  int64_t first_row, columns, begin, end;

  __device__ void operator()(int64_t row, int64_t column, Span span,
                             float (&sums)[1][kVector]) const {
    // In the buffer, which has not all of the first and the last row.
    const int64_t first = (first_row + row) * columns + column - begin;
    const int64_t left = end - begin - first;
    if (-first > span.begin) {
      span.begin = -first < kVector ? static_cast<int>(-first) : kVector;
    }
    if (left < span.end) span.end = left > 0 ? static_cast<int>(left) : 0;
    const float clip = coefficient.Get(0);
    float g[kVector];
    gradient.Load(first, span, g);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[0][j] += clip * g[j] * (clip * g[j]);
  }
};

// Of matrices [first_matrix, end_matrix): a thread for each column adds what of
// it is in the run.
template <typename T>
__global__ void AddColumns(Elements<T> gradient, Elements<Any> coefficient,
                           MatrixPlace place, int64_t first_matrix,
                           int64_t end_matrix, Elements<Any> sums) {
  const float clip = coefficient.Get(0);
  const int64_t n = (end_matrix - first_matrix) * place.columns;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t matrix = first_matrix + i / place.columns;
    const int64_t column = i % place.columns;
    float sum = 0;
    for (int64_t row = matrix * place.rows; row < (matrix + 1) * place.rows;
         ++row) {
      const int64_t k = row * place.columns + column;
      if (k < place.begin || k >= place.end) continue;
      const float g = clip * gradient.Get(k - place.begin);
      sum += g * g;
    }
    const int64_t at =
        place.first_column + matrix * place.column_width + column;
    sums.Set(at, sums.Get(at) + sum);
  }
}

// Rows of so many elements have a block each.
constexpr int64_t kLongRow = 128;
// So many matrices are summed one by one.
constexpr int64_t kFewMatrices = 8;

void CallSums(const KernelCall& call) {
  const LocalTensor& gradient = call.operands[0];
  const MatrixRun part(call);
  const MatrixPlace place(call, call.results[0], call.results[1]);
  const Elements<Any> coefficient(call.operands[1]);
  if (!call.accumulate) {
    for (const LocalTensor& result : call.results) {
      Launch(Fill, BlocksFor(*call.queue, result.elements()), kThreads, 0,
             *call.queue, Elements<Any>(result), result.elements(), 0.0F);
    }
  }
  const Range rows = part.Rows();
  if (rows.size() == 0) return;
  // As many rows at a time as have a sum in the workspace.
  const auto bytes_of = [](int64_t n) { return n * int64_t{sizeof(double)}; };
  const int64_t piece =
      PieceOf(rows.size(), rows.size(), *call.queue, bytes_of);
  auto* const sums = reinterpret_cast<double*>(
      call.queue->Workspace(bytes_of(piece), "a sum"));
  if (sums == nullptr) return;
  const int64_t first_matrix = rows.begin / part.rows;
  const int64_t end_matrix = DivideUp(rows.end, part.rows);
  const int64_t first_total = gradient.offset[0] - call.results[2].offset[0];
  ByType({gradient}, [&]<typename T>() {
    ForEachPiece(rows.size(), piece, [&](Range of) {
      const int64_t begin = rows.begin + of.begin;
      const int64_t end = rows.begin + of.end;
      if (part.columns >= kLongRow) {
        Launch(SumRows<T>, static_cast<unsigned>(of.size()), kThreads, 0,
               *call.queue, Elements<T>(gradient), coefficient, place, begin,
               sums);
      } else {
        Launch(SumShortRows<T>, BlocksFor(*call.queue, of.size()), kThreads, 0,
               *call.queue, Elements<T>(gradient), coefficient, place, begin,
               of.size(), sums);
      }
      const int64_t matrices = DivideUp(end, part.rows) - begin / part.rows;
      Launch(AddRows, static_cast<unsigned>(matrices),
             part.rows > kWarp ? kSumThreads : kWarp, 0, *call.queue, sums,
             begin, end, place, Elements<Any>(call.results[0]),
             Elements<Any>(call.results[2]), first_total);
    });
    if (end_matrix - first_matrix > kFewMatrices) {
      const int64_t columns = (end_matrix - first_matrix) * part.columns;
      Launch(AddColumns<T>, BlocksFor(*call.queue, columns), kThreads, 0,
             *call.queue, Elements<T>(gradient), coefficient, place,
             first_matrix, end_matrix, Elements<Any>(call.results[1]));
      return;
    }
    for (int64_t matrix = first_matrix; matrix < end_matrix; ++matrix) {
      const Range of = {std::max(rows.begin, matrix * part.rows),
                        std::min(rows.end, (matrix + 1) * part.rows)};
      LocalTensor columns = call.results[1];
      columns.data = columns.as<std::byte>() +
                     (place.first_column + matrix * place.column_width) *
                         SizeOf(columns.dtype);
      KernelCall adds = call;
      adds.results = std::span(&columns, 1);
      adds.accumulate = true;
      SumColumns<1>(
          adds,
          ColumnSquares<T>{Elements<T>(gradient), coefficient, of.begin,
                           part.columns, place.begin, place.end},
          of.size(), part.columns);
    }
  });
}

// ---- Moments ----------------------------------------------------------------

// moment = (1 - taken) moment + taken * sum / terms.
__device__ float NextMoment(float moment, float sum, float terms, float take) {
  return (1 - take) * moment + take * (sum / terms);
}

__global__ void UpdateMoment(Elements<Any> moment, Elements<Any> sums,
                             int64_t n, float terms, Elements<Any> coefficient,
                             const float* skipped, AdafactorOptions options) {
  if (coefficient.Get(0) < 0) return;
  const float take = Taken(options, skipped);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    moment.Set(i, NextMoment(moment.Get(i), sums.Get(i), terms, take));
  }
}

// The same of rows, and factor = R / max(mean, epsilon1), of matrices with
// `width` rows here. `mean` is still that of the step before.
__global__ void UpdateRows(Elements<Any> row, Elements<Any> sums,
                           Elements<Any> factor, int64_t n, int64_t width,
                           float rows, float columns, Elements<Any> mean,
                           Elements<Any> totals, Elements<Any> coefficient,
                           const float* skipped, AdafactorOptions options) {
  if (coefficient.Get(0) < 0) return;
  const float take = Taken(options, skipped);
  const auto least = static_cast<float>(options.epsilon1);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float next = NextMoment(row.Get(i), sums.Get(i), columns, take);
    const float of_matrix = NextMoment(
        mean.Get(i / width), totals.Get(i / width), rows * columns, take);
    row.Set(i, next);
    factor.Set(i, next / fmaxf(of_matrix, least));
  }
}

void CallFactors(const KernelCall& call) {
  const Elements<Any> coefficient(call.operands[3]);
  const AdafactorOptions options(call);
  const auto rows = static_cast<float>(call.operands[0].global_shape[1]);
  const auto columns = static_cast<float>(call.operands[1].global_shape[1]);
  const LocalTensor& row = call.results[0];
  Launch(UpdateRows, BlocksFor(*call.queue, row.elements()), kThreads, 0,
         *call.queue, Elements<Any>(row), Elements<Any>(call.operands[0]),
         Elements<Any>(call.results[3]), row.elements(), row.shape[1], rows,
         columns, Elements<Any>(call.results[2]),
         Elements<Any>(call.operands[2]), coefficient, SkippedSteps(call, 4),
         options);
  for (const size_t k : {size_t{1}, size_t{2}}) {
    const int64_t n = call.results[k].elements();
    Launch(UpdateMoment, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           Elements<Any>(call.results[k]), Elements<Any>(call.operands[k]), n,
           k == 1 ? rows : rows * columns, coefficient, SkippedSteps(call, 4),
           options);
  }
}

// ---- Updates ----------------------------------------------------------------

// V of the elements of a matrix, by their places in the buffer.
template <typename T>
struct MatrixVariance {
  MatrixPlace place;
  Elements<T> factors;  // R / mean
  Elements<T> columns;  // C

  explicit MatrixVariance(const KernelCall& call)
      : place(call, call.operands[1], call.operands[2]),
        factors(call.operands[1]),
        columns(call.operands[2]) {}

  __device__ void Load(int64_t first, Span span, float (&v)[kVector]) const {
    const int64_t i = place.begin + first;
    int64_t row = i / place.columns;
    int64_t column = i - row * place.columns;
    float factor = factors.Get(place.RowAt(row));
    int64_t of_matrix = place.ColumnsAt(row);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      v[j] = 0;
      if (!span.Has(j)) continue;
      if (column == place.columns) {
        column = 0;
        ++row;
        factor = factors.Get(place.RowAt(row));
        of_matrix = place.ColumnsAt(row);
      }
      v[j] = factor * columns.Get(of_matrix + column);
      ++column;
    }
  }
};

// g becomes U where it is, and 0 elsewhere.
__device__ void MakeUpdate(float (&g)[kVector], const float (&v)[kVector],
                           Span span, float clip, float least) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    g[j] = span.Has(j) ? clip * g[j] / sqrtf(fmaxf(v[j], least)) : 0;
  }
}

// Elements of which a block makes one partial sum.
constexpr int64_t kUpdateElements = 32 * kSumThreads * kVector;

template <typename T, typename Variance>
__global__ void SumUpdates(Elements<T> gradient, Variance variance,
                           Elements<Any> coefficient, int64_t n, float least,
                           double* partial) {
  const int64_t begin = blockIdx.x * kUpdateElements;
  const int64_t end = begin + kUpdateElements < n ? begin + kUpdateElements : n;
  const float clip = coefficient.Get(0);
  double sum = 0;
  for (int64_t first = begin + threadIdx.x * kVector; clip >= 0 && first < end;
       first += kSumThreads * kVector) {
    const Span span = FirstOf(end - first);
    float u[kVector];
    float v[kVector];
    gradient.Load(first, span, u);
    variance.Load(first, span, v);
    MakeUpdate(u, v, span, clip, least);
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += u[j] * u[j];
    sum += squares;
  }
  sum = Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// parameter = (1 - lr weight_decay) parameter - rate U.
template <typename T, typename Variance>
__global__ void ApplyUpdates(Elements<T> gradient, Variance variance,
                             Elements<Any> squares,
                             Elements<Any> update_squares,
                             Elements<Any> coefficient, const float* skipped,
                             Elements<T> parameter, int64_t n, float least,
                             AdafactorOptions options) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  const float rate =
      Rate(options, squares.Get(0), update_squares.Get(0), skipped);
  const auto decay = static_cast<float>(1 - options.now.Get().learning_rate *
                                                options.weight_decay);
  ForEachVector(n, [&](int64_t first, Span span) {
    float u[kVector];
    float v[kVector];
    float p[kVector];
    gradient.Load(first, span, u);
    variance.Load(first, span, v);
    parameter.Load(first, span, p);
    MakeUpdate(u, v, span, clip, least);
#pragma unroll
    for (int j = 0; j < kVector; ++j) p[j] = p[j] * decay - rate * u[j];
    parameter.Store(first, span, p);
  });
}

// V = (1 - taken) V + taken G^2.
template <typename T>
__global__ void UpdateVariance(Elements<T> gradient, Elements<T> v, int64_t n,
                               Elements<Any> coefficient, const float* skipped,
                               AdafactorOptions options) {
  const float clip = coefficient.Get(0);
  if (clip < 0) return;
  const float take = Taken(options, skipped);
  ForEachVector(n, [&](int64_t first, Span span) {
    float g[kVector];
    float old[kVector];
    gradient.Load(first, span, g);
    v.Load(first, span, old);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      g[j] *= clip;
      old[j] = (1 - take) * old[j] + take * g[j] * g[j];
    }
    v.Store(first, span, old);
  });
}

float LeastVariance(const KernelCall& call) {
  const double epsilon = call.attribute("epsilon1");
  return static_cast<float>(epsilon * epsilon);
}

// The sum of the squares of U, to `result`; `coefficient` is an operand's
// number.
template <typename T, typename Variance>
void CallSumUpdates(const KernelCall& call, Variance variance,
                    size_t coefficient, const LocalTensor& result) {
  const int64_t n = ElementsHere(call);
  const int64_t blocks = DivideUp(n, kUpdateElements);
  auto* const partial = reinterpret_cast<double*>(
      call.queue->Workspace(blocks * int64_t{sizeof(double)}, "a sum"));
  if (partial == nullptr) return;
  Launch(SumUpdates<T, Variance>, static_cast<unsigned>(blocks), kSumThreads, 0,
         *call.queue, Elements<T>(call.operands[0]), variance,
         Elements<Any>(call.operands[coefficient]), n, LeastVariance(call),
         partial);
  KernelCall adds = call;
  adds.results = std::span(&result, 1);
  CallSumPartials(adds, blocks);
}

// The operands behind the variance's begin at number `squares`.
template <typename T, typename Variance>
void CallApplyUpdates(const KernelCall& call, Variance variance,
                      size_t squares) {
  const int64_t n = ElementsHere(call);
  Launch(ApplyUpdates<T, Variance>, BlocksForVectors(*call.queue, n), kThreads,
         0, *call.queue, Elements<T>(call.operands[0]), variance,
         Elements<Any>(call.operands[squares]),
         Elements<Any>(call.operands[squares + 1]),
         Elements<Any>(call.operands[squares + 2]),
         SkippedSteps(call, squares + 3), Elements<T>(call.results[0]), n,
         LeastVariance(call), AdafactorOptions(call));
}

void CallNorm(const KernelCall& call) {
  ByType(call.operands.first(3), [&]<typename T>() {
    CallSumUpdates<T>(call, MatrixVariance<T>(call), 3, call.results[0]);
  });
}

void CallStep(const KernelCall& call) {
  const auto& in = call.operands;
  ByType({in[0], in[1], in[2], call.results[0]}, [&]<typename T>() {
    CallApplyUpdates<T>(call, MatrixVariance<T>(call), 3);
  });
}

void CallVectorNorm(const KernelCall& call) {
  const int64_t n = ElementsHere(call);
  const LocalTensor& v = call.results[0];
  ByType({call.operands[0], v}, [&]<typename T>() {
    Launch(UpdateVariance<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(call.operands[0]), Elements<T>(v), n,
           Elements<Any>(call.operands[1]), SkippedSteps(call, 2),
           AdafactorOptions(call));
    CallSumUpdates<T>(call, Elements<T>(v), 1, call.results[1]);
  });
}

void CallVectorStep(const KernelCall& call) {
  const auto& in = call.operands;
  ByType({in[0], in[1], call.results[0]}, [&]<typename T>() {
    CallApplyUpdates<T>(call, Elements<T>(in[1]), 2);
  });
}

}  // namespace

std::vector<Kernel> CudaAdafactorKernels() {
  return {
      {"adafactor_sums", CallSums, true},
      {"adafactor_factors", CallFactors},
      {"adafactor_norm", CallNorm, true},
      {"adafactor_step", CallStep},
      {"adafactor_vector_norm", CallVectorNorm},
      {"adafactor_vector_step", CallVectorStep},
  };
}

}  // namespace tessera
