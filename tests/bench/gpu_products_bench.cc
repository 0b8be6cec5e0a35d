// Matrix products and attention at the shapes of GPT-2 124M to 1558M and Llama
// 7B, through the kernels that train.
//
// MatMul/M/N/K/PASS: y = x w^T + bias (0), dx = dy w (1), dw += dy^T x in fp32
// (2), all of bf16; or y = GELU(x w^T + bias), with what it is the GELU of (3),
// and dx = dy w times that GELU's derivative (4), of the layer that follows.
// Before it runs, the first 16 algorithms of cuBLASLt are
// timed with cold caches: `first_us` is what the heuristic would take,
// `best_us` the fastest, which then runs.
//
// Attention/B/S/G/R/D/PASS/BY: causal, forward (0) or the gradients (1); by our
// own kernels (0), by cuDNN as the kernel calls it (1), by cuDNN alone (2), or
// so with its fastest algorithm, whose sums have no order (3). Products above
// the diagonal are not counted as work.

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/kernels/cuda/cublaslt_matmul.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sdpa.h"
#include "tests/bench/gpu_bench.h"

namespace tessera {
namespace {

struct Model {
  const char* name;
  int64_t hidden, feed_forward, vocabulary;  // the latter two as they are split
  int64_t heads, head_width;
  int64_t tokens;  // of a microbatch
};

constexpr Model kModels[] = {
    {"gpt2-124m", 768, 3072, 50304, 12, 64, 32768},
    {"gpt2-350m", 1024, 4096, 50304, 16, 64, 16384},
    {"gpt2-774m", 1280, 5120, 50304, 20, 64, 16384},
    {"gpt2-1558m", 1600, 6400, 50304, 25, 64, 16384},
    {"llama-7b", 4096, 11008, 32000, 32, 128, 4096},
};
constexpr int64_t kSequence = 1024;

enum Pass { kForward, kDx, kDw, kForwardGelu, kDxGelu };

void MatMul(benchmark::State& state) {
  constexpr int kCandidates = 16;
  const int64_t m = state.range(0);
  const int64_t n = state.range(1);
  const int64_t k = state.range(2);
  MatMulProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = problem.b = problem.d = DType::kBFloat16;
  switch (state.range(3)) {
    case kForward:
      problem.transpose_b = true;
      problem.epilogue = MatMulEpilogue::kBias;
      break;
    case kForwardGelu:
      problem.transpose_b = true;
      problem.epilogue = MatMulEpilogue::kBiasGelu;
      break;
    case kDxGelu:
      problem.epilogue = MatMulEpilogue::kGeluGradient;
      [[fallthrough]];
    case kDx:
      std::swap(problem.n, problem.k);
      break;
    case kDw:
      problem = {.m = n,
                 .n = k,
                 .k = m,
                 .transpose_a = true,
                 .a = DType::kBFloat16,
                 .b = DType::kBFloat16,
                 .accumulate = true};
      break;
  }
  state.SetLabel(Describe(problem));
  CudaQueue& queue = *Gpu().kernel_queue();
  auto matmul = CublasLtMatMul::Make();
  if (!matmul) {
    return state.SkipWithError(matmul.error().ToString().c_str());
  }
  const auto times = (*matmul)->Tune({.problem = problem}, kCandidates, queue);
  if (!times) return state.SkipWithError(times.error().ToString().c_str());
  const Buffer a(m * std::max(n, k) * 2), b(m * std::max(n, k) * 2);
  const Buffer w(n * k * 4), bias(n * 2),
      aux(state.range(3) >= kForwardGelu ? m * std::max(n, k) * 2 : 2);
  MatMulData data = {.a = a.data(),
                     .b = w.data(),
                     .d = b.data(),
                     .bias = bias.data(),
                     .aux = aux.data()};
  if (state.range(3) == kDw) {
    data = {.a = a.data(), .b = b.data(), .d = w.data()};
  }
  Run(state, [&] { (*matmul)->Run(problem, data, queue); });
  state.counters["first_us"] = times->front();
  state.counters["best_us"] = *std::min_element(times->begin(), times->end());
  state.counters["flops"] = PerSecond(2.0 * static_cast<double>(m * n * k));
}

void MatMulShapes(benchmark::internal::Benchmark* benchmark) {
  for (const Model& model : kModels) {
    const int64_t h = model.hidden;
    for (const auto& [n, k] : {std::pair{3 * h, h},
                               {h, h},
                               {model.feed_forward, h},
                               {h, model.feed_forward},
                               {model.vocabulary, h}}) {
      for (const Pass pass : {kForward, kDx, kDw}) {
        benchmark->Args({model.tokens, n, k, pass});
      }
    }
    benchmark->Args({model.tokens, model.feed_forward, h, kForwardGelu});
    benchmark->Args({model.tokens, h, model.feed_forward, kDxGelu});
  }
}

// One call of attention and its gradients on memory of its own.
class AttentionCall {
 public:
  AttentionCall(int64_t b, int64_t s, int64_t g, int64_t r, int64_t d)
      : shapes_{{b, s, g, r, d}, {b, s, g, d}, {b, s, g, r}, {b, s}} {
    for (const Shape& shape : {queries(), keys(), keys(), queries(), queries(),
                               queries(), keys(), keys()}) {
      heads_.push_back(MakeTensor(shape, DType::kBFloat16));
    }
    lse_ = MakeTensor(shapes_[2], DType::kFloat32);
    positions_ = MakeTensor(shapes_[3], DType::kInt32);
    std::vector<int32_t> places(static_cast<size_t>(b * s));
    for (int64_t i = 0; i < b * s; ++i) {
      places[static_cast<size_t>(i)] = static_cast<int32_t>(i % s);
    }
    Gpu().Write(positions_.data, places.data(), {4 * b * s});
  }

  void Run(bool backward, CudaQueue* queue) const {
    const std::vector<Attribute> attributes = {
        {"scale", 1 / std::sqrt(static_cast<double>(queries()[4]))},
        {"window", 0}};
    const auto& [q, k, v, o, d_o, dq, dk, dv] = All();
    const std::vector<LocalTensor> operands =
        backward ? std::vector{d_o, q, k, v, positions_, positions_, o, lse_}
                 : std::vector{q, k, v, positions_, positions_};
    const std::vector<LocalTensor> results =
        backward ? std::vector{dq, dk, dv} : std::vector{o, lse_};
    KernelCall call;
    call.attributes = attributes;
    call.operands = operands;
    call.results = results;
    call.places_are_positions = true;
    call.queue = queue;
    static const Kernel* const kernels[] = {
        FindCudaKernel("attention").value(),
        FindCudaKernel("attention_dqkv").value()};
    kernels[backward]->run(call);
  }

  // As the kernel calls it, without its copies of the log-sum-exps.
  void RunAlone(bool backward, bool deterministic, CudaQueue* queue) const {
    const auto& [q, k, v, o, d_o, dq, dk, dv] = All();
    const Shape& shape = queries();
    const SdpaProblem problem = {
        .samples = shape[0],
        .heads = shape[2] * shape[3],
        .groups = shape[2],
        .length = shape[1],
        .d = shape[4],
        .e = shape[4],
        .scale = 1 / std::sqrt(static_cast<float>(shape[4])),
        .backward = backward,
        .deterministic = deterministic};
    if (!queue->sdpa->Takes(problem)) return queue->Fail("cuDNN has no kernel");
    queue->sdpa->Run(problem,
                     {.q = q.data,
                      .k = k.data,
                      .v = v.data,
                      .o = o.data,
                      .lse = lse_.as<float>(),
                      .d_o = d_o.data,
                      .dq = dq.data,
                      .dk = dk.data,
                      .dv = dv.data},
                     *queue);
  }

 private:
  const Shape& queries() const { return shapes_[0]; }
  const Shape& keys() const { return shapes_[1]; }

  LocalTensor MakeTensor(const Shape& shape, DType dtype) {
    LocalTensor tensor;
    tensor.shape = tensor.global_shape = shape;
    tensor.offset.assign(shape.size(), 0);
    tensor.dtype = dtype;
    buffers_.push_back(
        std::make_unique<Buffer>(tensor.elements() * SizeOf(dtype)));
    tensor.data = buffers_.back()->data();
    return tensor;
  }

  struct Heads {
    const LocalTensor &q, &k, &v, &o, &d_o, &dq, &dk, &dv;
  };
  Heads All() const {
    return {heads_[0], heads_[1], heads_[2], heads_[3],
            heads_[4], heads_[5], heads_[6], heads_[7]};
  }

  std::vector<Shape> shapes_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<LocalTensor> heads_;
  LocalTensor lse_;
  LocalTensor positions_;
};

void Attention(benchmark::State& state) {
  enum By { kOwn, kCudnn, kAlone, kAloneUnordered };
  const int64_t b = state.range(0), s = state.range(1), g = state.range(2),
                r = state.range(3), d = state.range(4);
  const bool backward = state.range(5) != 0;
  const int64_t by = state.range(6);
  CudaQueue* const queue = Gpu().kernel_queue();
  CudaSdpa* const cudnn = queue->sdpa;
  if (by != kOwn && cudnn == nullptr) {
    return state.SkipWithError("no cuDNN");
  }
  const AttentionCall call(b, s, g, r, d);
  if (by == kOwn) queue->sdpa = nullptr;
  call.Run(/*backward=*/false, queue);  // o and lse
  Run(state, [&] {
    by >= kAlone ? call.RunAlone(backward, by == kAlone, queue)
                 : call.Run(backward, queue);
  });
  queue->sdpa = cudnn;
  // Two products forward, five backward, over half of the square.
  const auto products = static_cast<double>(b * g * r * s * s * d);
  state.counters["flops"] = PerSecond((backward ? 5 : 2) * products);
}

void AttentionShapes(benchmark::internal::Benchmark* benchmark) {
  for (const Model& model : kModels) {
    for (const int64_t pass : {0, 1}) {
      for (const int64_t by : {0, 1, 2, 3}) {
        if (by == 3 && pass == 0) continue;
        benchmark->Args({model.tokens / kSequence, kSequence, model.heads, 1,
                         model.head_width, pass, by});
      }
    }
  }
  // Grouped queries, and a long row.
  for (const int64_t pass : {0, 1}) {
    for (const int64_t by : {0, 1, 2, 3}) {
      if (by == 3 && pass == 0) continue;
      benchmark->Args({1, 8192, 8, 4, 128, pass, by});
    }
  }
}

// A given number of times: what is done before it takes longer.
constexpr int kIterations = 5;
BENCHMARK(MatMul)->Apply(MatMulShapes)->Iterations(kIterations)->UseRealTime();
BENCHMARK(Attention)
    ->Apply(AttentionShapes)
    ->Iterations(kIterations)
    ->UseRealTime();

}  // namespace
}  // namespace tessera
