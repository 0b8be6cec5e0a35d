// Adafactor's kernels: formulas in planner/lower/factored_update.h. A negative
// clip coefficient skips the step.

#include "runtime/kernels/adafactor.h"

#include <cmath>
#include <vector>

#include "planner/base/divide.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// t, from 1, without skipped steps. The state of the loss scale, if there is
// one, is operand `scale`.
double StepNumber(const KernelCall& call, size_t scale) {
  const double skipped =
      call.operands.size() > scale ? Get(call.operands[scale], 2) : 0;
  const StepNumbers now = call.step_argument().Get();
  return static_cast<double>(now.step) + 1 - skipped;
}

// What U is multiplied by, from the sums of squares of parameter and update.
double Rate(const AdafactorOptions& options, double squares,
            double update_squares, double t) {
  const double rms = std::sqrt(squares / options.elements);
  const double update_rms = std::sqrt(update_squares / options.elements);
  return std::max(options.epsilon2, rms) *
         std::min(options.now.Get().learning_rate, 1 / std::sqrt(t)) /
         std::max(1.0, update_rms / options.d);
}

template <typename T>
void Zero(const LocalTensor& tensor) {
  std::fill_n(tensor.as<T>(), tensor.elements(), T{0});
}

// gradient, clip coefficient -> sums of squares of rows, columns, matrices.
template <typename T>
void Sums(const KernelCall& call) {
  const LocalTensor& gradient = call.operands[0];
  const double clip = Get(call.operands[1], 0);
  const MatrixRun part(call);
  const VectorPlace row_place(gradient, call.results[0], 1);
  const VectorPlace column_place(gradient, call.results[1], 2);
  T* const rows = call.results[0].as<T>() + row_place.first;
  T* const columns = call.results[1].as<T>() + column_place.first;
  T* const totals =
      call.results[2].as<T>() + gradient.offset[0] - call.results[2].offset[0];
  if (!call.accumulate) {
    for (const LocalTensor& result : call.results) Zero<T>(result);
  }
  const T* const elements = gradient.as<const T>() - part.run.begin;
  const auto square = [&](int64_t i) {
    const double g = clip * static_cast<double>(elements[i]);
    return g * g;
  };
  const Range here = part.Rows();
  std::vector<double> squares(static_cast<size_t>(here.size()));
  ForEachRange(call, here.size(), RowGrain(part.columns),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = here.begin + i;
                   const Range of = part.Columns(row);
                   const int64_t first = row * part.columns + of.begin;
                   squares[static_cast<size_t>(i)] = Sum(
                       of.size(), [&](int64_t j) { return square(first + j); });
                 }
               });
  for (int64_t begin = here.begin; begin < here.end;) {
    const int64_t matrix = begin / part.rows;
    const int64_t end = std::min((matrix + 1) * part.rows, here.end);
    double total = 0;
    for (int64_t row = begin; row < end; ++row) {
      const double sum = squares[static_cast<size_t>(row - here.begin)];
      rows[matrix * row_place.width + row % part.rows] += static_cast<T>(sum);
      total += sum;
    }
    totals[matrix] += static_cast<T>(total);

    T* const of_matrix = columns + matrix * column_place.width;
    const int64_t blocks = DivideUp(part.columns, kBlock);
    ForEachRange(
        call, blocks, RowGrain(kBlock * (end - begin)),
        [&](int64_t first_block, int64_t end_block) {
          for (int64_t block = first_block; block < end_block; ++block) {
            const int64_t left = block * kBlock;
            double sums[kBlock] = {};
            for (int64_t row = begin; row < end; ++row) {
              const Range of = part.Columns(row);
              const int64_t last = std::min(of.end, left + kBlock);
              for (int64_t c = std::max(of.begin, left); c < last; ++c) {
                sums[c - left] += square(row * part.columns + c);
              }
            }
            const int64_t count = std::min(kBlock, part.columns - left);
            for (int64_t c = 0; c < count; ++c) {
              of_matrix[left + c] += static_cast<T>(sums[c]);
            }
          }
        });
    begin = end;
  }
}

// Sums of rows, columns and matrices, clip coefficient [, loss scale] -> R, C,
// mean (in place), R / max(mean, epsilon1).
template <typename T>
void Factors(const KernelCall& call) {
  if (Get(call.operands[3], 0) < 0) return;
  const AdafactorOptions options(call);
  const double take = std::pow(StepNumber(call, 4), options.beta2_decay);
  const auto update = [&](T* moment, const T* sums, int64_t n, double terms) {
    for (int64_t i = 0; i < n; ++i) {
      moment[i] = static_cast<T>((1 - take) * static_cast<double>(moment[i]) +
                                 take * static_cast<double>(sums[i]) / terms);
    }
  };
  const auto rows = static_cast<double>(call.operands[0].global_shape[1]);
  const auto columns = static_cast<double>(call.operands[1].global_shape[1]);
  T* const row = call.results[0].as<T>();
  T* const mean = call.results[2].as<T>();
  update(row, call.operands[0].as<const T>(), call.results[0].elements(),
         columns);
  update(call.results[1].as<T>(), call.operands[1].as<const T>(),
         call.results[1].elements(), rows);
  update(mean, call.operands[2].as<const T>(), call.results[2].elements(),
         rows * columns);
  const int64_t width = call.results[0].shape[1];
  T* const factor = call.results[3].as<T>();
  const T least = static_cast<T>(options.epsilon1);
  for (int64_t i = 0; i < call.results[3].elements(); ++i) {
    factor[i] = row[i] / std::max(mean[i / width], least);
  }
}

// V of a matrix: of the second and the third operand, R / mean and C.
template <typename T>
class MatrixVariance {
 public:
  explicit MatrixVariance(const KernelCall& call)
      : part_(call),
        row_place_(call.operands[0], call.operands[1], 1),
        column_place_(call.operands[0], call.operands[2], 2),
        factors_(call.operands[1].as<const T>() + row_place_.first),
        columns_(call.operands[2].as<const T>() + column_place_.first) {}

  // Of elements of the buffer.
  Block<T> Load(int64_t first, int64_t count) const {
    Block<T> v = Block<T>::Zero();
    int64_t row = (part_.run.begin + first) / part_.columns;
    int64_t column = (part_.run.begin + first) % part_.columns;
    for (int64_t i = 0; i < count; ++row, column = 0) {
      const int64_t matrix = row / part_.rows;
      const T factor = factors_[matrix * row_place_.width + row % part_.rows];
      const T* const from = columns_ + matrix * column_place_.width + column;
      const int64_t end = std::min(count, i + part_.columns - column);
      for (int64_t k = 0; i < end; ++i, ++k) v[i] = factor * from[k];
    }
    return v;
  }

 private:
  MatrixRun part_;
  VectorPlace row_place_;
  VectorPlace column_place_;
  const T* factors_;
  const T* columns_;
};

// V of a vector.
template <typename T>
class VectorVariance {
 public:
  explicit VectorVariance(const LocalTensor& v) : v_(v.as<const T>()) {}
  Block<T> Load(int64_t first, int64_t count) const {
    return tessera::Load(v_ + first, count);
  }

 private:
  const T* v_;
};

// U of elements of the buffer.
template <typename T, typename Variance>
Block<T> Update(const KernelCall& call, const Variance& variance, T clip,
                T least, int64_t first, int64_t count) {
  const T* const g = call.operands[0].as<const T>() + first;
  return clip * Load(g, count) / variance.Load(first, count).max(least).sqrt();
}

// epsilon1^2.
template <typename T>
T LeastVariance(const KernelCall& call) {
  const double epsilon = call.attribute("epsilon1");
  return static_cast<T>(epsilon * epsilon);
}

// The sum of the squares of U.
template <typename T, typename Variance>
double UpdateSquares(const KernelCall& call, const Variance& variance, T clip) {
  const T least = LeastVariance<T>(call);
  const int64_t n = ElementsHere(call);
  std::vector<double> sums(static_cast<size_t>(DivideUp(n, kBlock)));
  ForEachBlock(call, n, [&](int64_t i, int64_t count) {
    const Block<T> u = Update(call, variance, clip, least, i, count);
    sums[static_cast<size_t>(i / kBlock)] = Sum(count, [&](int64_t k) {
      return static_cast<double>(u[k]) * static_cast<double>(u[k]);
    });
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// Operands: those of the variance, squares of parameter and of U from number
// `squares` on, clip coefficient [, loss scale].
template <typename T, typename Variance>
void ApplyUpdate(const KernelCall& call, const Variance& variance,
                 size_t squares) {
  const T clip = static_cast<T>(Get(call.operands[squares + 2], 0));
  const AdafactorOptions options(call);
  const T rate = static_cast<T>(Rate(options, Get(call.operands[squares], 0),
                                     Get(call.operands[squares + 1], 0),
                                     StepNumber(call, squares + 3)));
  const T decay = static_cast<T>(1 - options.now.Get().learning_rate *
                                         options.weight_decay);
  const T least = LeastVariance<T>(call);
  T* const parameter = call.results[0].as<T>();
  ForEachBlock(call, ElementsHere(call), [&](int64_t i, int64_t count) {
    T* const p = parameter + i;
    Store<T>(Load(p, count) * decay -
                 rate * Update(call, variance, clip, least, i, count),
             count, p);
  });
}

bool SkipsStep(const KernelCall& call, size_t coefficient) {
  return Get(call.operands[coefficient], 0) < 0;
}

// gradient, R / mean, C, clip coefficient -> sum of the squares of U.
template <typename T>
void Norm(const KernelCall& call) {
  const double sum =
      SkipsStep(call, 3)
          ? 0
          : UpdateSquares(call, MatrixVariance<T>(call),
                          static_cast<T>(Get(call.operands[3], 0)));
  PutOrAdd(call, call.results[0], 0, sum);
}

// gradient, R / mean, C, squares of parameter and of U, clip coefficient [,
// loss scale] -> parameter (in place).
template <typename T>
void Step(const KernelCall& call) {
  if (SkipsStep(call, 5)) return;
  ApplyUpdate<T>(call, MatrixVariance<T>(call), 3);
}

// gradient, clip coefficient [, loss scale] -> V (in place), sum of the squares
// of U.
template <typename T>
void VectorNorm(const KernelCall& call) {
  if (SkipsStep(call, 1)) return Put(call.results[1], 0, 0);
  const T clip = static_cast<T>(Get(call.operands[1], 0));
  const double taken =
      std::pow(StepNumber(call, 2), call.attribute("beta2_decay"));
  const T take = static_cast<T>(taken);
  const T keep = static_cast<T>(1 - taken);
  const T* const gradient = call.operands[0].as<const T>();
  T* const v = call.results[0].as<T>();
  ForEachBlock(call, ElementsHere(call), [&](int64_t i, int64_t count) {
    const Block<T> g = clip * Load(gradient + i, count);
    Store<T>(keep * Load(v + i, count) + take * g * g, count, v + i);
  });
  Put(call.results[1], 0,
      UpdateSquares(call, VectorVariance<T>(call.results[0]), clip));
}

// gradient, V, squares of parameter and of U, clip coefficient [, loss scale]
// -> parameter (in place).
template <typename T>
void VectorStep(const KernelCall& call) {
  if (SkipsStep(call, 4)) return;
  ApplyUpdate<T>(call, VectorVariance<T>(call.operands[1]), 2);
}

}  // namespace

std::vector<Kernel> CpuAdafactorKernels() {
  return {
      {"adafactor_sums", ByDType<Sums<float>, Sums<double>>, true},
      {"adafactor_factors", ByDType<Factors<float>, Factors<double>>},
      {"adafactor_norm", ByDType<Norm<float>, Norm<double>>, true},
      {"adafactor_step", ByDType<Step<float>, Step<double>>},
      {"adafactor_vector_norm", ByDType<VectorNorm<float>, VectorNorm<double>>},
      {"adafactor_vector_step", ByDType<VectorStep<float>, VectorStep<double>>},
  };
}

}  // namespace tessera
