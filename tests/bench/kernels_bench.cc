// CPU kernels at GPT-2 124M's shapes: 4 sequences of 256 tokens, width 768, 12
// heads of 64.

#include <benchmark/benchmark.h>

#include <cmath>

#include "runtime/kernels/kernel.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 4;
constexpr int64_t kSeq = 256;
constexpr int64_t kTokens = kBatch * kSeq;
constexpr int64_t kWidth = 768;
constexpr int64_t kHeads = 12;
constexpr int64_t kHead = 64;
constexpr int64_t kVocabulary = 50257;

// A call of `kernel` on fp32 tensors of the rule's shapes.
class Bench {
 public:
  Bench(std::string_view kernel, std::vector<Attribute> attributes = {})
      : run_(FindCpuKernel(kernel).value()->run),
        attributes_(std::move(attributes)) {}

  Bench& Rule(std::string_view rule) {
    rule_ = IndexRule::Parse(rule).value();
    return *this;
  }
  Bench& In(Shape shape) { return Add(operands_, std::move(shape)); }
  Bench& Out(Shape shape) { return Add(results_, std::move(shape)); }
  Bench& Ints(Shape shape, int32_t period) {
    In(std::move(shape));
    LocalTensor& tensor = operands_.back();
    tensor.dtype = DType::kInt32;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.as<int32_t>()[i] = static_cast<int32_t>(i % period);
    }
    return *this;
  }

  // `flops` of one call give the rate.
  void Run(benchmark::State& state, double flops) {
    const KernelCall call = {.rule = &rule_,
                             .attributes = attributes_,
                             .operands = operands_,
                             .results = results_};
    for (auto _ : state) {
      run_(call);
      benchmark::ClobberMemory();
    }
    if (flops > 0) {
      state.counters["flop/s"] = benchmark::Counter(
          flops, benchmark::Counter::kIsIterationInvariantRate);
    }
  }

 private:
  Bench& Add(std::vector<LocalTensor>& list, Shape shape) {
    LocalTensor tensor = {.shape = shape,
                          .offset = Shape(shape.size(), 0),
                          .global_shape = shape};
    std::vector<float>& data =
        buffers_.emplace_back(static_cast<size_t>(tensor.elements()));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = std::sin(static_cast<float>(i));
    }
    tensor.data = data.data();
    list.push_back(tensor);
    return *this;
  }

  void (*run_)(const KernelCall&);
  std::vector<Attribute> attributes_;
  IndexRule rule_;
  std::vector<std::vector<float>> buffers_;
  std::vector<LocalTensor> operands_;
  std::vector<LocalTensor> results_;
};

void Linear(benchmark::State& state) {
  const int64_t in = state.range(0);
  const int64_t out = state.range(1);
  Bench("linear")
      .Rule("bsi,oi+o->bso")
      .In({kBatch, kSeq, in})
      .In({out, in})
      .In({out})
      .Out({kBatch, kSeq, out})
      .Run(state, 2.0 * kTokens * in * out);
}
BENCHMARK(Linear)->Args({768, 3072})->Args({3072, 768})->Args({768, 768});
BENCHMARK(Linear)->Args({768, kVocabulary})->Unit(benchmark::kMillisecond);

void LinearDx(benchmark::State& state) {
  Bench("linear_dx")
      .Rule("bso,oi->bsi")
      .In({kBatch, kSeq, 3072})
      .In({3072, 768})
      .Out({kBatch, kSeq, 768})
      .Run(state, 2.0 * kTokens * 3072 * 768);
}
BENCHMARK(LinearDx);

void LinearDw(benchmark::State& state) {
  Bench("linear_dw")
      .Rule("bso,bsi->oi")
      .In({kBatch, kSeq, 3072})
      .In({kBatch, kSeq, 768})
      .Out({3072, 768})
      .Run(state, 2.0 * kTokens * 3072 * 768);
}
BENCHMARK(LinearDw);

const Shape kQ = {kBatch, kSeq, kHeads, 1, kHead};
const Shape kK = {kBatch, kSeq, kHeads, kHead};
// Products of the keys that causal queries see, half of all.
constexpr double kPairFlops = 2.0 * kBatch * kHeads * kSeq * kSeq / 2 * kHead;

void Attention(benchmark::State& state) {
  Bench("attention", {{"scale", 0.125}, {"window", 0}})
      .In(kQ)
      .In(kK)
      .In(kK)
      .Ints({kBatch, kSeq}, kSeq)
      .Ints({kBatch, kSeq}, kSeq)
      .Out(kQ)
      .Out({kBatch, kSeq, kHeads, 1})
      .Run(state, 2 * kPairFlops);
}
BENCHMARK(Attention);

void AttentionDqkv(benchmark::State& state) {
  Bench("attention_dqkv", {{"scale", 0.125}, {"window", 0}})
      .In(kQ)
      .In(kQ)
      .In(kK)
      .In(kK)
      .Ints({kBatch, kSeq}, kSeq)
      .Ints({kBatch, kSeq}, kSeq)
      .In(kQ)
      .In({kBatch, kSeq, kHeads, 1})
      .Out(kQ)
      .Out(kK)
      .Out(kK)
      .Run(state, 5 * kPairFlops);
}
BENCHMARK(AttentionDqkv);

const Shape kX = {kBatch, kSeq, kWidth};
const Shape kRows = {kBatch, kSeq};

void LayerNorm(benchmark::State& state) {
  Bench("layer_norm", {{"epsilon", 1e-5}})
      .In(kX)
      .In({kWidth})
      .In({kWidth})
      .Out(kX)
      .Out(kRows)
      .Out(kRows)
      .Run(state, 0);
}
BENCHMARK(LayerNorm);

void LayerNormDx(benchmark::State& state) {
  Bench("layer_norm_dx")
      .In(kX)
      .In(kX)
      .In({kWidth})
      .In(kRows)
      .In(kRows)
      .Out(kX)
      .Run(state, 0);
}
BENCHMARK(LayerNormDx);

void LayerNormDw(benchmark::State& state) {
  Bench("layer_norm_dw")
      .In(kX)
      .In(kX)
      .In(kRows)
      .In(kRows)
      .Out({kWidth})
      .Out({kWidth})
      .Run(state, 0);
}
BENCHMARK(LayerNormDw);

void LinearDb(benchmark::State& state) {
  Bench("linear_db").In({kBatch, kSeq, 3072}).Out({3072}).Run(state, 0);
}
BENCHMARK(LinearDb);

void Gelu(benchmark::State& state) {
  const Shape wide = {kBatch, kSeq, 4 * kWidth};
  Bench("gelu").In(wide).Out(wide).Run(state, 0);
}
BENCHMARK(Gelu);

void GeluDx(benchmark::State& state) {
  const Shape wide = {kBatch, kSeq, 4 * kWidth};
  Bench("gelu_dx").In(wide).In(wide).Out(wide).Run(state, 0);
}
BENCHMARK(GeluDx);

void Dropout(benchmark::State& state) {
  Bench("dropout", {{"probability", 0.1}, {"salt", 1}})
      .In(kX)
      .Out(kX)
      .Run(state, 0);
}
BENCHMARK(Dropout);

void CrossEntropyState(benchmark::State& state) {
  Bench("cross_entropy.state")
      .In({kBatch, kSeq, kVocabulary})
      .Ints(kRows, kVocabulary)
      .In({})
      .Out({kBatch, kSeq, 3})
      .Run(state, 0);
}
BENCHMARK(CrossEntropyState)->Unit(benchmark::kMillisecond);

void CrossEntropyDx(benchmark::State& state) {
  Bench("cross_entropy_dx")
      .In({kBatch, kSeq, kVocabulary})
      .Ints(kRows, kVocabulary)
      .In({})
      .In(kRows)
      .Out({kBatch, kSeq, kVocabulary})
      .Run(state, 0);
}
BENCHMARK(CrossEntropyDx)->Unit(benchmark::kMillisecond);

void AdamW(benchmark::State& state) {
  const Shape flat = {3072 * 768};
  Bench("adamw", {{"beta1", 0.9},
                  {"beta2", 0.95},
                  {"epsilon", 1e-8},
                  {"lr", 3e-4},
                  {"weight_decay", 0.1}})
      .In(flat)
      .In({})
      .Out(flat)
      .Out(flat)
      .Out(flat)
      .Run(state, 0);
}
BENCHMARK(AdamW);

}  // namespace
}  // namespace tessera
