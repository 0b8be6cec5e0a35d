#pragma once
// CudaMatMul in plain loops on host memory: the reference of its definition,
// and what CUDA kernels multiply with where they are tested without a GPU.

#include <cmath>

#include "runtime/float16.h"
#include "runtime/kernels/cuda/matmul.h"

namespace tessera {

class HostMatMul : public CudaMatMul {
 public:
  // As CublasLtMatMul takes them.
  bool Takes(const MatMulProblem& p) const override {
    if (p.a != p.b || (p.d != p.a && p.d != DType::kFloat32)) return false;
    if (p.epilogue == MatMulEpilogue::kNone) return true;
    const bool gelu = p.epilogue != MatMulEpilogue::kBias;
    return p.batch == 1 && (!gelu || (SizeOf(p.d) == 2 && p.n % 8 == 0));
  }

  void Run(const MatMulProblem& p, const MatMulData& data,
           CudaQueue&) override {
    for (int64_t i = 0; i < p.batch * p.m; ++i) {
      const int64_t batch = i / p.m;
      const int64_t row = i % p.m;
      for (int64_t column = 0; column < p.n; ++column) {
        double sum = 0;
        for (int64_t k = 0; k < p.k; ++k) {
          const int64_t stride = p.stride_of_a();
          const int64_t a = p.transpose_a ? k * stride + row : row * stride + k;
          const int64_t b = p.transpose_b ? column * p.k + k : k * p.n + column;
          sum += At(data.a, p.a, batch * p.m * p.k + a) *
                 At(data.b, p.b, batch * p.k * p.n + b);
        }
        Finish(p, data, i * p.n + column, column, sum);
      }
    }
  }

 private:
  static double At(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kBFloat16:
        return ToFloat(static_cast<const BFloat16*>(data)[i]);
      case DType::kFloat16:
        return ToFloat(static_cast<const Float16*>(data)[i]);
      default:
        return static_cast<const float*>(data)[i];
    }
  }
  static void Put(void* data, DType dtype, int64_t i, double value) {
    const auto single = static_cast<float>(value);
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<BFloat16*>(data)[i] = ToBFloat16(single);
        break;
      case DType::kFloat16:
        static_cast<Float16*>(data)[i] = ToFloat16(single);
        break;
      default:
        static_cast<float*>(data)[i] = single;
    }
  }

  static void Finish(const MatMulProblem& p, const MatMulData& data, int64_t i,
                     int64_t column, double sum) {
    if (p.accumulate) sum += At(data.d, p.d, i);
    if (p.epilogue == MatMulEpilogue::kBias ||
        p.epilogue == MatMulEpilogue::kBiasGelu) {
      sum += At(data.bias, p.d, column);
    }
    if (p.epilogue == MatMulEpilogue::kGelu ||
        p.epilogue == MatMulEpilogue::kBiasGelu) {
      Put(data.aux, p.d, i, sum);
      sum *= 0.5 * (1 + std::tanh(Inner(sum)));
    }
    if (p.epilogue == MatMulEpilogue::kGeluGradient) {
      const double x = At(data.aux, p.d, i);
      const double t = std::tanh(Inner(x));
      const double slope = kRoot * (1 + 3 * kCubic * x * x);
      sum *= 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope;
    }
    Put(data.d, p.d, i, sum);
  }

  static constexpr double kRoot = 0.7978845608028654;  // sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;
  static double Inner(double x) { return kRoot * (x + kCubic * x * x * x); }
};

}  // namespace tessera
