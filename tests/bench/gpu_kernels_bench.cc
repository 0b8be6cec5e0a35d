// CUDA kernels at the shapes of GPT-2 124M (16 sequences of 1024 tokens) and
// Llama 7B (4 of 2048). Bytes per second count what a kernel has to read and
// write once. KernelCopy, of 1 GiB, is the bandwidth that they are compared
// with.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/kernels/kernel.h"
#include "tests/bench/gpu_bench.h"

namespace tessera {
namespace {

template <typename Call>
void Measure(benchmark::State& state, double bytes_per_call, Call call) {
  if (!Gpu().Synchronize()) return state.SkipWithError("the GPU is not well");
  for (auto _ : state) {
    for (int i = 0; i < kCallsPerWait; ++i) call();
    if (auto done = Gpu().Synchronize(); !done) {
      return state.SkipWithError(done.error().ToString().c_str());
    }
  }
  state.SetBytesProcessed(static_cast<int64_t>(
      static_cast<double>(state.iterations() * kCallsPerWait) *
      bytes_per_call));
}

// A call of a kernel on tensors of noise.
class KernelBench {
 public:
  explicit KernelBench(std::string_view kernel,
                       std::vector<Attribute> attributes = {})
      : run_(FindKernel(kernel)->run), attributes_(std::move(attributes)) {}
  KernelBench(const KernelBench&) = delete;
  KernelBench& operator=(const KernelBench&) = delete;
  ~KernelBench() {
    for (const auto& side : {operands_, results_}) {
      for (const LocalTensor& tensor : side) Gpu().Free(tensor.data);
    }
  }

  KernelBench& In(Shape shape, DType dtype) {
    return Add(operands_, std::move(shape), dtype);
  }
  KernelBench& Out(Shape shape, DType dtype) {
    return Add(results_, std::move(shape), dtype);
  }
  // Ids below `limit`.
  KernelBench& Ids(Shape shape, uint32_t limit) {
    In(std::move(shape), DType::kInt32);
    const LocalTensor& tensor = operands_.back();
    std::vector<uint32_t> ids(static_cast<size_t>(tensor.elements()));
    for (uint32_t& id : ids) id = Next() % limit;
    Gpu().Write(tensor.data, ids.data(), {tensor.elements() * 4});
    return *this;
  }
  KernelBench& By(std::string_view rule) {
    rule_ = IndexRule::Parse(rule).value();
    return *this;
  }
  KernelBench& Accumulate() {
    accumulate_ = true;
    return *this;
  }

  // Results that are updated (`in_place`) are read, too.
  void Run(benchmark::State& state, bool in_place = false) {
    double bytes = 0;
    for (const LocalTensor& tensor : operands_) bytes += BytesOf(tensor);
    for (const LocalTensor& tensor : results_) {
      bytes += BytesOf(tensor) * (in_place || accumulate_ ? 2 : 1);
    }
    const KernelCall call = {.rule = rule_.factors.empty() ? nullptr : &rule_,
                             .attributes = attributes_,
                             .operands = operands_,
                             .results = results_,
                             .accumulate = accumulate_,
                             .queue = Gpu().kernel_queue()};
    Measure(state, bytes, [&] { run_(call); });
  }

 private:
  static const Kernel* FindKernel(std::string_view name) {
    const Kernel* const fused = Gpu().FindFusedKernel(name);
    return fused != nullptr ? fused : Gpu().FindKernel(name).value();
  }
  static double BytesOf(const LocalTensor& tensor) {
    return static_cast<double>(tensor.elements() * SizeOf(tensor.dtype));
  }

  // Knuth's MMIX generator.
  uint32_t Next() {
    bits_ = bits_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(bits_ >> 33);
  }

  // Words whose halves and whole are floats between 0.5 and 1: nothing
  // overflows, and no coefficient skips a step.
  KernelBench& Add(std::vector<LocalTensor>& side, Shape shape, DType dtype) {
    LocalTensor tensor = {.dtype = dtype,
                          .shape = shape,
                          .offset = Shape(shape.size(), 0),
                          .global_shape = shape};
    const int64_t bytes = tensor.elements() * SizeOf(dtype);
    tensor.data = Gpu().Allocate({bytes}, MemoryCategory::kActivation).value();
    constexpr int64_t kPiece = 1 << 20;
    std::vector<uint32_t> noise(kPiece / 4);
    for (uint32_t& word : noise) word = (Next() & 0x007f007fu) | 0x3f003f00u;
    for (int64_t at = 0; at < bytes; at += kPiece) {
      Gpu().Write(tensor.as<std::byte>() + at, noise.data(),
                  {std::min(bytes - at, kPiece)});
    }
    side.push_back(std::move(tensor));
    return *this;
  }

  void (*const run_)(const KernelCall&);
  IndexRule rule_;
  std::vector<Attribute> attributes_;
  std::vector<LocalTensor> operands_;
  std::vector<LocalTensor> results_;
  bool accumulate_ = false;
  uint64_t bits_ = 1;
};

constexpr DType kHalf = DType::kBFloat16;
constexpr DType kFloat = DType::kFloat32;

// ---- What the others are measured against -----------------------------------

void KernelCopy(benchmark::State& state) {
  const int64_t bytes = int64_t{1} << 30;
  void* const from =
      Gpu().Allocate({bytes}, MemoryCategory::kActivation).value();
  void* const to = Gpu().Allocate({bytes}, MemoryCategory::kActivation).value();
  Gpu().Zero(from, {bytes});
  Measure(state, 2.0 * static_cast<double>(bytes),
          [&] { Gpu().Copy(to, from, {.run_bytes = bytes}); });
  Gpu().Free(from);
  Gpu().Free(to);
}

// ---- Rows -------------------------------------------------------------------

// Arguments: rows, columns.
void KernelLayerNorm(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("layer_norm", {{"epsilon", 1e-5}})
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .In({width}, kHalf)
      .Out({rows, width}, kHalf)
      .Out({rows}, kFloat)
      .Out({rows}, kFloat)
      .Run(state);
}

void KernelLayerNormDx(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("layer_norm_dx")
      .In({rows, width}, kHalf)
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .In({rows}, kFloat)
      .In({rows}, kFloat)
      .Out({rows, width}, kHalf)
      .Run(state);
}

void KernelLayerNormDw(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("layer_norm_dw")
      .In({rows, width}, kHalf)
      .In({rows, width}, kHalf)
      .In({rows}, kFloat)
      .In({rows}, kFloat)
      .Out({width}, kFloat)
      .Out({width}, kFloat)
      .Accumulate()
      .Run(state);
}

// A norm's and its residual's gradients, as blocks of GPT-2 and of Llama have
// them. Arguments: rows, columns.
void KernelLayerNormGradients(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("layer_norm_dx+sum+dw+db")
      .In({rows, width}, kHalf)
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .In({rows}, kFloat)
      .In({rows}, kFloat)
      .In({rows, width}, kHalf)
      .Out({rows, width}, kHalf)
      .Out({width}, kFloat)
      .Out({width}, kFloat)
      .Out({width}, kFloat)
      .Run(state);
}

void KernelRmsNormGradients(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("rms_norm_dx+sum+dw")
      .In({rows, width}, kHalf)
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .In({rows}, kFloat)
      .In({rows, width}, kHalf)
      .Out({rows, width}, kHalf)
      .Out({width}, kFloat)
      .Run(state);
}

void KernelRmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("rms_norm", {{"epsilon", 1e-5}})
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .Out({rows, width}, kHalf)
      .Out({rows}, kFloat)
      .Run(state);
}

void KernelRmsNormDx(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  KernelBench("rms_norm_dx")
      .In({rows, width}, kHalf)
      .In({rows, width}, kHalf)
      .In({width}, kHalf)
      .In({rows}, kFloat)
      .Out({rows, width}, kHalf)
      .Run(state);
}

// ---- Elements ---------------------------------------------------------------

void KernelGelu(benchmark::State& state) {
  const Shape shape = {state.range(0), state.range(1)};
  KernelBench("gelu").In(shape, kHalf).Out(shape, kHalf).Run(state);
}

void KernelSiluDx(benchmark::State& state) {
  const Shape shape = {state.range(0), state.range(1)};
  KernelBench("silu_dx")
      .In(shape, kHalf)
      .In(shape, kHalf)
      .Out(shape, kHalf)
      .Run(state);
}

void KernelAdd(benchmark::State& state) {
  const Shape shape = {state.range(0), state.range(1)};
  KernelBench("add")
      .In(shape, kHalf)
      .In(shape, kHalf)
      .Out(shape, kHalf)
      .Run(state);
}

void KernelDropout(benchmark::State& state) {
  const Shape shape = {state.range(0), state.range(1)};
  KernelBench("dropout", {{"probability", 0.1}, {"salt", 1}})
      .In(shape, kHalf)
      .Out(shape, kHalf)
      .Run(state);
}

// Arguments: tokens, heads; heads of 128.
void KernelRotary(benchmark::State& state) {
  const int64_t tokens = state.range(0), heads = state.range(1);
  KernelBench("rotary", {{"fraction", 1}, {"theta", 10000}})
      .In({tokens, heads, 128}, kHalf)
      .Ids({tokens}, 2048)
      .Out({tokens, heads, 128}, kHalf)
      .Run(state);
}

// ---- The vocabulary ---------------------------------------------------------

// Arguments: tokens, vocabulary[, width].
void KernelEmbedding(benchmark::State& state) {
  const int64_t tokens = state.range(0), rows = state.range(1);
  KernelBench("embedding")
      .Ids({1, tokens}, static_cast<uint32_t>(rows))
      .In({rows, state.range(2)}, kHalf)
      .Out({1, tokens, state.range(2)}, kHalf)
      .Run(state);
}

void KernelEmbeddingDw(benchmark::State& state) {
  const int64_t tokens = state.range(0), rows = state.range(1);
  KernelBench("embedding_dw")
      .In({1, tokens, state.range(2)}, kHalf)
      .Ids({1, tokens}, static_cast<uint32_t>(rows))
      .Out({rows, state.range(2)}, kFloat)
      .Run(state);
}

void KernelCrossEntropyState(benchmark::State& state) {
  const int64_t tokens = state.range(0), rows = state.range(1);
  KernelBench("cross_entropy.state")
      .In({1, tokens, rows}, kHalf)
      .Ids({1, tokens}, static_cast<uint32_t>(rows))
      .In({}, kFloat)
      .Out({1, tokens, 3}, kFloat)
      .Run(state);
}

void KernelCrossEntropyDx(benchmark::State& state) {
  const int64_t tokens = state.range(0), rows = state.range(1);
  KernelBench("cross_entropy_dx")
      .In({1, tokens, rows}, kHalf)
      .Ids({1, tokens}, static_cast<uint32_t>(rows))
      .In({}, kFloat)
      .In({1, tokens}, kFloat)
      .Out({1, tokens, rows}, kHalf)
      .Run(state);
}

// ---- The optimizer ----------------------------------------------------------

// Argument: parameters.
void KernelAdamW(benchmark::State& state) {
  const Shape shape = {state.range(0)};
  KernelBench("adamw", {{"lr", 1e-4},
                        {"beta1", 0.9},
                        {"beta2", 0.95},
                        {"epsilon", 1e-8},
                        {"weight_decay", 0.1}})
      .In(shape, kFloat)
      .In({}, kFloat)
      .Out(shape, kFloat)
      .Out(shape, kFloat)
      .Out(shape, kFloat)
      .Run(state, /*in_place=*/true);
}

// The 16 weights of a GPT-2 block of 768, in one launch (argument 1) or in one
// each (0).
void KernelAdamWOfABlock(benchmark::State& state) {
  constexpr int64_t kHidden = 768;
  std::vector<int64_t> sizes(4, kHidden * kHidden);
  sizes.insert(sizes.end(), 2, 4 * kHidden * kHidden);
  sizes.insert(sizes.end(), 9, kHidden);
  sizes.push_back(4 * kHidden);
  const std::vector<Attribute> attributes = {{"lr", 1e-4},
                                             {"beta1", 0.9},
                                             {"beta2", 0.95},
                                             {"epsilon", 1e-8},
                                             {"weight_decay", 0.1}};
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto make = [&](const Shape& shape) {
    LocalTensor tensor = {.dtype = kFloat,
                          .shape = shape,
                          .offset = Shape(shape.size(), 0),
                          .global_shape = shape};
    buffers.push_back(std::make_unique<Buffer>(tensor.elements() * 4));
    tensor.data = buffers.back()->data();
    return tensor;
  };
  const LocalTensor coefficient = make({});
  std::vector<std::vector<LocalTensor>> operands;
  std::vector<std::vector<LocalTensor>> results;
  double bytes = 0;
  for (const int64_t n : sizes) {
    operands.push_back({make({n}), coefficient});
    results.push_back({make({n}), make({n}), make({n})});
    bytes += static_cast<double>(n) * 7 * 4;  // four are read, three written
  }
  std::vector<KernelCall> calls;
  for (size_t i = 0; i < sizes.size(); ++i) {
    calls.push_back({.attributes = attributes,
                     .operands = operands[i],
                     .results = results[i],
                     .queue = Gpu().kernel_queue()});
  }
  const Kernel& adamw = *Gpu().FindKernel("adamw").value();
  const bool at_once = state.range(0) != 0;
  Measure(state, bytes, [&] {
    if (at_once) return adamw.run_list(calls);
    for (const KernelCall& call : calls) adamw.run(call);
  });
}

void KernelCast(benchmark::State& state) {
  const Shape shape = {state.range(0)};
  KernelBench("cast").In(shape, kFloat).Out(shape, kHalf).Run(state);
}

void KernelSquareSum(benchmark::State& state) {
  KernelBench("square_sum")
      .In({state.range(0)}, kFloat)
      .Out({}, kFloat)
      .Run(state);
}

// ---- A router ---------------------------------------------------------------

// Gradients of the logits of so many experts, in fp32, of tokens so wide.
void KernelRouterDx(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int64_t width = state.range(1);
  const int64_t experts = state.range(2);
  KernelBench("linear_dx")
      .By("bo,oi->bi")
      .In({tokens, experts}, kFloat)
      .In({experts, width}, kHalf)
      .Out({tokens, width}, kHalf)
      .Run(state);
}

void KernelRouterDw(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int64_t width = state.range(1);
  const int64_t experts = state.range(2);
  KernelBench("linear_dw")
      .By("bo,bi->oi")
      .In({tokens, experts}, kFloat)
      .In({tokens, width}, kHalf)
      .Out({experts, width}, kFloat)
      .Accumulate()
      .Run(state);
}

// ---- The table --------------------------------------------------------------

void Rows(benchmark::internal::Benchmark* bench) {
  bench->Args({16384, 768})->Args({8192, 4096})->UseRealTime();
}
void Hidden(benchmark::internal::Benchmark* bench) {
  bench->Args({16384, 3072})->Args({8192, 11008})->UseRealTime();
}
// The third argument is the width of embeddings.
void Vocabularies(benchmark::internal::Benchmark* bench) {
  bench->Args({16384, 50257, 768})->Args({8192, 32000, 4096})->UseRealTime();
}
void Parameters(benchmark::internal::Benchmark* bench) {
  bench->Arg(38597376)->Arg(131072000)->UseRealTime();  // token embeddings
}

void Routers(benchmark::internal::Benchmark* bench) {  // Mixtral, DeepSeek V3
  bench->Args({65536, 4096, 8})->Args({65536, 7168, 256})->UseRealTime();
}

BENCHMARK(KernelCopy)->UseRealTime();
BENCHMARK(KernelLayerNorm)->Apply(Rows);
BENCHMARK(KernelLayerNormDx)->Apply(Rows);
BENCHMARK(KernelLayerNormDw)->Apply(Rows);
BENCHMARK(KernelLayerNormGradients)
    ->Args({65536, 768})
    ->Args({65536, 1024})
    ->Args({32768, 1280})
    ->Args({32768, 1600})
    ->Args({8192, 4096})
    ->Args({4096, 5120});
BENCHMARK(KernelRmsNormGradients)->Args({4096, 4096})->Args({16384, 2048});
BENCHMARK(KernelRmsNorm)->Apply(Rows);
BENCHMARK(KernelRmsNormDx)->Apply(Rows);
BENCHMARK(KernelGelu)->Apply(Hidden);
BENCHMARK(KernelSiluDx)->Apply(Hidden);
BENCHMARK(KernelAdd)->Apply(Rows);
BENCHMARK(KernelDropout)->Apply(Rows);
BENCHMARK(KernelRotary)->Args({8192, 32})->UseRealTime();
BENCHMARK(KernelEmbedding)->Apply(Vocabularies);
BENCHMARK(KernelEmbeddingDw)->Apply(Vocabularies);
BENCHMARK(KernelCrossEntropyState)->Apply(Vocabularies);
BENCHMARK(KernelCrossEntropyDx)->Apply(Vocabularies);
BENCHMARK(KernelAdamW)->Apply(Parameters);
BENCHMARK(KernelAdamWOfABlock)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(KernelCast)->Apply(Parameters);
BENCHMARK(KernelSquareSum)->Apply(Parameters);
BENCHMARK(KernelRouterDx)->Apply(Routers);
BENCHMARK(KernelRouterDw)->Apply(Routers);

}  // namespace
}  // namespace tessera
