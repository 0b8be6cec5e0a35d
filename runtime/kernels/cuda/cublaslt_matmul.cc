#include "runtime/kernels/cuda/cublaslt_matmul.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "planner/base/divide.h"
#include "planner/base/rng.h"
#include "runtime/kernels/cuda/queue.h"

namespace tessera {
namespace {

Error Unavailable(const std::string& what, const std::string& why) {
  return {ErrorCode::kUnavailable, what + ": " + why, "cublasLt"};
}

Result<void> Check(cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Unavailable(what, std::string(cublasLtGetStatusName(status)) + " (" +
                               cublasLtGetStatusString(status) + ")");
}

Result<void> Check(cudaError_t code, const std::string& what) {
  if (code == cudaSuccess) return {};
  return Unavailable(what, std::string(cudaGetErrorName(code)) + " (" +
                               cudaGetErrorString(code) + ")");
}

cudaDataType_t CudaTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

bool IsGelu(MatMulEpilogue epilogue) {
  return epilogue == MatMulEpilogue::kGelu ||
         epilogue == MatMulEpilogue::kBiasGelu ||
         epilogue == MatMulEpilogue::kGeluGradient;
}

bool HasBias(MatMulEpilogue epilogue) {
  return epilogue == MatMulEpilogue::kBias ||
         epilogue == MatMulEpilogue::kBiasGelu;
}

cublasLtEpilogue_t EpilogueOf(MatMulEpilogue epilogue) {
  switch (epilogue) {
    case MatMulEpilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case MatMulEpilogue::kGelu:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case MatMulEpilogue::kBiasGelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case MatMulEpilogue::kGeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
    default:
      return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// The largest power of 2 up to 16 that divides all addresses. No algorithm
// asks for more.
int AlignmentOf(const MatMulData& data) {
  uintptr_t bits = 16;
  for (const void* pointer : {data.a, data.b, static_cast<const void*>(data.d),
                              data.bias, static_cast<const void*>(data.aux)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return static_cast<int>(bits & (~bits + 1));
}

template <typename T>
Result<void> Set(cublasLtMatmulDescOpaque_t& product,
                 cublasLtMatmulDescAttributes_t attribute, const T& value) {
  return Check(
      cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value),
      "an attribute of the product");
}

// A row-major rows x columns matrix is a column-major columns x rows one. Rows
// are `row_stride` apart.
Result<void> Describe(int64_t rows, int64_t columns, int64_t row_stride,
                      DType dtype, int64_t batch,
                      cublasLtMatrixLayoutOpaque_t* layout) {
  TESSERA_RETURN_IF_ERROR(
      Check(cublasLtMatrixLayoutInit(layout, CudaTypeOf(dtype),
                                     static_cast<uint64_t>(columns),
                                     static_cast<uint64_t>(rows), row_stride),
            "a matrix"));
  if (batch == 1) return {};
  const auto count = static_cast<int32_t>(batch);
  const int64_t stride = rows * row_stride;
  TESSERA_RETURN_IF_ERROR(Check(
      cublasLtMatrixLayoutSetAttribute(
          layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
      "a batch"));
  return Check(cublasLtMatrixLayoutSetAttribute(
                   layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                   sizeof stride),
               "a batch");
}

// Operands and results of a product for timing, several sets of them, so that
// what one run leaves in the caches is of no use to the next.
class TimingMemory {
 public:
  TimingMemory() = default;
  TimingMemory(const TimingMemory&) = delete;
  TimingMemory& operator=(const TimingMemory&) = delete;
  ~TimingMemory() { cudaFree(memory_); }

  Result<void> Allocate(const MatMulKey& key, cudaStream_t stream) {
    const MatMulProblem& p = key.problem;
    const auto bytes = [&](int64_t rows, int64_t columns, DType dtype) {
      return RoundUp(p.batch * rows * columns * SizeOf(dtype) + key.alignment,
                     256);
    };
    const int64_t a = bytes(p.transpose_a ? p.k : p.m, p.stride_of_a(), p.a);
    const int64_t b = bytes(p.k, p.n, p.b);
    const int64_t d = bytes(p.m, p.n, p.d);
    const int64_t bias = bytes(1, p.n, p.d);
    const int64_t set = a + b + 2 * d + bias;
    // Several times the L2 cache, of 50 to 60 MB on Hopper.
    constexpr int64_t kCold = int64_t{256} << 20;
    int64_t sets = std::clamp<int64_t>(kCold / set + 1, 2, 64);
    while (cudaMalloc(&memory_, static_cast<size_t>(sets * set)) !=
           cudaSuccess) {
      cudaGetLastError();  // clears it
      sets /= 2;
      if (sets == 0) {
        return Unavailable("timing",
                           std::to_string(set) + " bytes are not free");
      }
    }
    TESSERA_RETURN_IF_ERROR(Fill(sets * set, stream));
    // Exactly as aligned as the key says.
    auto* at = static_cast<std::byte*>(memory_) +
               (key.alignment < 16 ? key.alignment : 0);
    for (int64_t i = 0; i < sets; ++i, at += set) {
      sets_.push_back({.a = at,
                       .b = at + a,
                       .d = at + a + b,
                       .bias = at + a + b + 2 * d,
                       .aux = at + a + b + d});
    }
    return {};
  }

  const MatMulData& Next() { return sets_[next_++ % sets_.size()]; }

 private:
  // Random numbers from 0.5 to 2 and their negatives, whichever of the three
  // dtypes reads them: zeros are multiplied faster than data.
  Result<void> Fill(int64_t bytes, cudaStream_t stream) {
    std::vector<uint16_t> noise(1 << 19);
    Rng rng(1);
    for (uint16_t& word : noise) {
      word = static_cast<uint16_t>((rng.Below(1 << 16) & 0x80ff) | 0x3f00);
    }
    const auto size = static_cast<int64_t>(noise.size() * sizeof noise[0]);
    for (int64_t at = 0; at < bytes; at += size) {
      TESSERA_RETURN_IF_ERROR(Check(
          cudaMemcpyAsync(static_cast<std::byte*>(memory_) + at, noise.data(),
                          static_cast<size_t>(std::min(size, bytes - at)),
                          cudaMemcpyHostToDevice, stream),
          "timing"));
    }
    return Check(cudaStreamSynchronize(stream), "timing");
  }

  void* memory_ = nullptr;
  std::vector<MatMulData> sets_;
  size_t next_ = 0;
};

// Points of a stream, and the time between them.
class Stopwatch {
 public:
  Stopwatch() = default;
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    for (cudaEvent_t point : points_) cudaEventDestroy(point);
  }
  void Mark(cudaStream_t stream) {
    cudaEventCreate(&points_.emplace_back());
    cudaEventRecord(points_.back(), stream);
  }
  // Of the i-th mark to the next one. Waits for that.
  Result<double> Microseconds(size_t i) const {
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventSynchronize(points_[i + 1]), "timing"));
    float milliseconds = 0;
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventElapsedTime(&milliseconds, points_[i], points_[i + 1]),
              "timing"));
    return 1000.0 * milliseconds;
  }

 private:
  std::vector<cudaEvent_t> points_;
};

}  // namespace

Result<std::unique_ptr<CublasLtMatMul>> CublasLtMatMul::Make(
    const CublasLtOptions& options) {
  std::unique_ptr<CublasLtMatMul> made(new CublasLtMatMul(options));
  int ordinal = 0;
  cudaDeviceProp properties;
  TESSERA_RETURN_IF_ERROR(Check(cudaGetDevice(&ordinal), "cudaGetDevice"));
  TESSERA_RETURN_IF_ERROR(Check(cudaGetDeviceProperties(&properties, ordinal),
                                "cudaGetDeviceProperties"));
  TESSERA_RETURN_IF_ERROR(Check(cublasLtCreate(&made->handle_), "create"));
  made->choices_.device = properties.name;
  made->choices_.version = static_cast<int64_t>(cublasLtGetVersion());
  return made;
}

CublasLtMatMul::CublasLtMatMul(const CublasLtOptions& options)
    : options_(options) {}

CublasLtMatMul::~CublasLtMatMul() {
  if (handle_ != nullptr) cublasLtDestroy(handle_);
}

bool CublasLtMatMul::Takes(const MatMulProblem& p) const {
  if (p.a != p.b || p.a == DType::kFloat64 || !IsFloat(p.a)) return false;
  if (p.d != p.a && p.d != DType::kFloat32) return false;
  if (p.epilogue == MatMulEpilogue::kNone) return true;
  if (p.batch != 1) return false;
  return !IsGelu(p.epilogue) || (SizeOf(p.d) == 2 && p.n % 8 == 0);
}

// Row-major D = op(A) op(B) is, read column by column, D^T = op(B)^T op(A)^T:
// the library's first operand is B.
Result<CublasLtMatMul::Plan> CublasLtMatMul::MakePlan(
    const MatMulKey& key) const {
  const MatMulProblem& p = key.problem;
  Plan plan = {};
  TESSERA_RETURN_IF_ERROR(
      Check(cublasLtMatmulDescInit(
                &plan.product,
                key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                CUDA_R_32F),
            "a product"));
  const auto transpose = [](bool yes) {
    return static_cast<int32_t>(yes ? CUBLAS_OP_T : CUBLAS_OP_N);
  };
  TESSERA_RETURN_IF_ERROR(
      Set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, transpose(p.transpose_b)));
  TESSERA_RETURN_IF_ERROR(
      Set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, transpose(p.transpose_a)));
  TESSERA_RETURN_IF_ERROR(Set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE,
                              static_cast<uint32_t>(EpilogueOf(p.epilogue))));
  if (IsGelu(p.epilogue)) {
    TESSERA_RETURN_IF_ERROR(
        Set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n));
  }
  const int64_t row_of_b = p.transpose_b ? p.k : p.n;
  TESSERA_RETURN_IF_ERROR(Describe(p.transpose_a ? p.k : p.m, p.row_of_a(),
                                   p.stride_of_a(), p.a, p.batch, &plan.a));
  TESSERA_RETURN_IF_ERROR(Describe(p.transpose_b ? p.n : p.k, row_of_b,
                                   row_of_b, p.b, p.batch, &plan.b));
  TESSERA_RETURN_IF_ERROR(Describe(p.m, p.n, p.n, p.d, p.batch, &plan.d));
  return plan;
}

// The pointers of the epilogue; others are refused.
Result<void> CublasLtMatMul::SetPointers(Plan& plan, MatMulEpilogue epilogue,
                                         const MatMulData& data) {
  if (HasBias(epilogue)) {
    TESSERA_RETURN_IF_ERROR(
        Set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, data.bias));
  }
  if (!IsGelu(epilogue)) return {};
  return Set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, data.aux);
}

Result<std::vector<cublasLtMatmulHeuristicResult_t>> CublasLtMatMul::Candidates(
    const MatMulKey& key, Plan& plan, const MatMulData& data, int count,
    const CudaQueue& queue) const {
  // It learns from the pointers how they are aligned.
  TESSERA_RETURN_IF_ERROR(SetPointers(plan, key.problem.epilogue, data));
  cublasLtMatmulPreferenceOpaque_t preference;
  TESSERA_RETURN_IF_ERROR(
      Check(cublasLtMatmulPreferenceInit(&preference), "a preference"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute,
                          auto value) {
    return Check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute,
                                                      &value, sizeof value),
                 "a preference");
  };
  TESSERA_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                 static_cast<uint64_t>(queue.matmul_bytes)));
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (key.problem.d == DType::kFloat32) {
    reductions |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
  }
  TESSERA_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    TESSERA_RETURN_IF_ERROR(
        prefer(attribute, static_cast<uint32_t>(key.alignment)));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> found(
      static_cast<size_t>(count));
  int returned = 0;
  TESSERA_RETURN_IF_ERROR(Check(
      cublasLtMatmulAlgoGetHeuristic(handle_, &plan.product, &plan.b, &plan.a,
                                     &plan.d, &plan.d, &preference, count,
                                     found.data(), &returned),
      tessera::Describe(key.problem)));
  found.resize(static_cast<size_t>(returned));
  std::erase_if(found, [](const cublasLtMatmulHeuristicResult_t& result) {
    return result.state != CUBLAS_STATUS_SUCCESS;
  });
  if (found.empty()) {
    return Unavailable(tessera::Describe(key.problem), "no algorithm");
  }
  return found;
}

Result<void> CublasLtMatMul::Enqueue(Plan plan, const MatMulKey& key,
                                     const MatMulData& data,
                                     const CudaQueue& queue) const {
  TESSERA_RETURN_IF_ERROR(SetPointers(plan, key.problem.epilogue, data));
  const float one = 1;
  const float beta = key.problem.accumulate ? 1.0f : 0.0f;
  return Check(
      cublasLtMatmul(handle_, &plan.product, &one, data.b, &plan.b, data.a,
                     &plan.a, &beta, data.d, &plan.d, data.d, &plan.d,
                     &plan.algorithm, queue.workspace,
                     static_cast<size_t>(queue.matmul_bytes), queue.stream),
      tessera::Describe(key.problem));
}

Result<std::vector<double>> CublasLtMatMul::Tune(const MatMulKey& key,
                                                 int candidates,
                                                 CudaQueue& queue) {
  constexpr int kWarmUps = 2;
  constexpr int kRuns = 9;
  TESSERA_TRY(Plan plan, MakePlan(key));
  TimingMemory memory;
  TESSERA_RETURN_IF_ERROR(memory.Allocate(key, queue.stream));
  TESSERA_TRY(const auto found,
              Candidates(key, plan, memory.Next(), candidates, queue));
  // By turns, there and back, without a pause, as in a step: a GPU at its power
  // limit has lower clocks than one that rests between products.
  Stopwatch watch;
  watch.Mark(queue.stream);
  const auto at_place = [&](size_t run, size_t i) {
    return run % 2 == 0 ? i : found.size() - 1 - i;
  };
  for (size_t run = 0; run < kWarmUps + kRuns; ++run) {
    for (size_t i = 0; i < found.size(); ++i) {
      plan.algorithm = found[at_place(run, i)].algo;
      TESSERA_RETURN_IF_ERROR(Enqueue(plan, key, memory.Next(), queue));
      watch.Mark(queue.stream);
    }
  }
  std::vector<double> medians;
  for (size_t i = 0; i < found.size(); ++i) {
    std::vector<double> times;
    for (size_t run = kWarmUps; run < kWarmUps + kRuns; ++run) {
      TESSERA_TRY(times.emplace_back(),
                  watch.Microseconds(run * found.size() + at_place(run, i)));
    }
    std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
    medians.push_back(times[kRuns / 2]);
  }
  const auto best =
      static_cast<size_t>(std::ranges::min_element(medians) - medians.begin());
  plan.algorithm = found[best].algo;
  plans_[key] = plan;
  MatMulChoice choice;
  static_assert(sizeof choice.algorithm == sizeof plan.algorithm);
  std::memcpy(choice.algorithm.data(), &plan.algorithm, sizeof plan.algorithm);
  choice.microseconds = medians[best];
  choices_.rows[key] = choice;
  return medians;
}

Result<void> CublasLtMatMul::Adopt(const MatMulChoices& choices) {
  if (choices.device != choices_.device) {
    return InvalidInput("choices for '" + choices.device + "': expected '" +
                        choices_.device + "'");
  }
  if (choices.version != choices_.version) {
    return InvalidInput("choices of cuBLASLt " +
                        std::to_string(choices.version) + ": expected " +
                        std::to_string(choices_.version));
  }
  for (const auto& [key, choice] : choices.rows) {
    choices_.rows[key] = choice;
    plans_.erase(key);
  }
  return {};
}

void CublasLtMatMul::Run(const MatMulProblem& problem, const MatMulData& data,
                         CudaQueue& queue) {
  const auto run = [&]() -> Result<void> {
    const MatMulKey key = {problem, AlignmentOf(data),
                           options_.tf32 && problem.a == DType::kFloat32};
    const auto known = plans_.find(key);
    if (known != plans_.end()) return Enqueue(known->second, key, data, queue);
    TESSERA_TRY(Plan plan, MakePlan(key));
    const auto chosen = choices_.rows.find(key);
    if (chosen != choices_.rows.end()) {
      std::memcpy(&plan.algorithm, chosen->second.algorithm.data(),
                  sizeof plan.algorithm);
    } else {
      TESSERA_TRY(const auto found, Candidates(key, plan, data, 1, queue));
      plan.algorithm = found[0].algo;
      untuned_.push_back(key);
    }
    plans_.emplace(key, plan);
    return Enqueue(plan, key, data, queue);
  };
  const Result<void> done = run();
  if (!done && queue.error.empty()) queue.error = done.error().ToString();
}

}  // namespace tessera
