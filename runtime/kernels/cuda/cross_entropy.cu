// Softmax cross-entropy over a vocabulary that may be split. One block goes
// through the logits of a token once, with a running maximum and sum (Milakov
// and Gimelshein 2018); probabilities are not stored, but as the gradient.

#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/vocabulary.h"

namespace tessera {
namespace {

struct Vocabulary {
  int64_t first;  // global id of the first column
  int64_t width;
  int64_t tokens;  // columns that are no padding, which stands behind them

  // The column that holds a token's target, or -1.
  __device__ int64_t Column(int32_t label) const {
    const int64_t column = label - first;
    return label >= 0 && column >= 0 && column < tokens ? column : -1;
  }
};

// Calls f(first, span) for the vectors of the first `columns` columns of the
// block's row.
template <typename F>
__device__ void ForEachVectorOfRow(int64_t row, int64_t width, int64_t columns,
                                   F f) {
  const int64_t begin = row * width;
  const int64_t end = begin + columns;
  for (int64_t first = begin / kVector * kVector + threadIdx.x * kVector;
       first < end; first += blockDim.x * kVector) {
    f(first, Span{static_cast<int>(begin > first ? begin - first : 0),
                  static_cast<int>(end - first < kVector ? end - first
                                                         : int64_t{kVector})});
  }
}

unsigned ThreadsFor(int64_t width) {
  const int64_t warps = (width / kVector + 1) / kWarp + 1;
  return static_cast<unsigned>(std::min<int64_t>(warps, 16) * kWarp);
}

// labels -> number of labels >= 0.
template <bool kAccumulate>
__global__ void CountLabels(const int32_t* labels, int64_t n,
                            Elements<Any> count) {
  unsigned counted = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    counted += labels[i] >= 0 ? 1 : 0;
  }
  counted = Sum(counted);
  if (threadIdx.x > 0) return;
  const auto value = static_cast<float>(counted);
  count.Set(0, kAccumulate ? count.Get(0) + value : value);
}

// ---- Forward ----------------------------------------------------------------

struct MaxAndSum {
  float maximum;
  float sum;  // of exp(x - maximum)
};

// exp(from - to), where both may be minus infinity.
__device__ float Scale(float from, float to) {
  return from == to ? 1 : __expf(from - to);
}

__device__ MaxAndSum Merge(MaxAndSum a, MaxAndSum b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  return {maximum, a.sum * Scale(a.maximum, maximum) +
                       b.sum * Scale(b.maximum, maximum)};
}

// logits, labels -> state[tokens, 3].
template <typename T>
__global__ void CrossEntropyState(Elements<T> logits, const int32_t* labels,
                                  Elements<Any> state, Vocabulary vocabulary) {
  const int64_t token = blockIdx.x;
  MaxAndSum mine = {-INFINITY, 0};
  const int64_t width = vocabulary.width;
  const int64_t tokens = vocabulary.tokens;
  ForEachVectorOfRow(token, width, tokens, [&](int64_t first, Span span) {
    float x[kVector];
    logits.Load(first, span, x);
    float maximum = -INFINITY;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) maximum = fmaxf(maximum, x[j]);
    }
    if (maximum > mine.maximum) {
      mine.sum *= Scale(mine.maximum, maximum);
      mine.maximum = maximum;
    }
    if (mine.maximum == -INFINITY) return;  // exp(-inf + inf) is no number
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) mine.sum += __expf(x[j] - mine.maximum);
    }
  });
  const MaxAndSum all =
      Reduce(mine, MaxAndSum{-INFINITY, 0},
             [](MaxAndSum a, MaxAndSum b) { return Merge(a, b); });
  if (threadIdx.x > 0) return;
  const int64_t target = vocabulary.Column(labels[token]);
  state.Set(3 * token, all.maximum);
  state.Set(3 * token + 1, all.sum);
  state.Set(3 * token + 2,
            target < 0 ? 0 : logits.Get(token * vocabulary.width + target));
}

// labels, states[shards, tokens, 3] -> lse, and partial sums of the loss by
// block.
__global__ void MergeStates(const int32_t* labels, Elements<Any> states,
                            int64_t shards, int64_t tokens, Elements<Any> lse,
                            double* partial) {
  double loss = 0;
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token < tokens) {
    MaxAndSum all = {-INFINITY, 0};
    float target = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const int64_t at = (shard * tokens + token) * 3;
      all = Merge(all, {states.Get(at), states.Get(at + 1)});
      target += states.Get(at + 2);
    }
    const float value = all.maximum + logf(all.sum);
    lse.Set(token, value);
    if (labels[token] >= 0) loss = double{value} - target;
  }
  loss = Sum(loss);
  if (threadIdx.x == 0) partial[blockIdx.x] = loss;
}

// ---- Backward ---------------------------------------------------------------

// logits, labels, count, lse [, loss scale] -> dlogits.
template <typename T>
__global__ void CrossEntropyDx(Elements<T> logits, const int32_t* labels,
                               Elements<Any> count, Elements<Any> lse,
                               Elements<Any> loss_scale, Elements<T> dlogits,
                               Vocabulary vocabulary) {
  const int64_t token = blockIdx.x;
  const int32_t label = labels[token];
  const int64_t target = token * vocabulary.width + vocabulary.Column(label);
  const bool has_target = vocabulary.Column(label) >= 0;
  const float scale = loss_scale.data == nullptr ? 1 : loss_scale.Get(0);
  const float weight = label < 0 ? 0 : scale / count.Get(0);
  const float log_sum = lse.Get(token);
  const int64_t width = vocabulary.width;
  const int64_t padding = token * width + vocabulary.tokens;
  ForEachVectorOfRow(token, width, width, [&](int64_t first, Span span) {
    float x[kVector] = {};
    if (label >= 0) {
      logits.Load(first, span, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[j] = first + j < padding ? __expf(x[j] - log_sum) * weight : 0;
        if (has_target && first + j == target) x[j] -= weight;
      }
    }
    dlogits.Store(first, span, x);
  });
}

// ---- Calls ------------------------------------------------------------------

Vocabulary VocabularyOf(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  return {logits.offset.back(), logits.shape.back(),
          TokenColumns(call, logits)};
}

void CallCountLabels(const KernelCall& call) {
  const LocalTensor& labels = call.operands[0];
  Launch(call.accumulate ? CountLabels<true> : CountLabels<false>, 1,
         kSumThreads, 0, *call.queue, labels.as<const int32_t>(),
         labels.elements(), Elements<Any>(call.results[0]));
}

// logits, labels, count -> state.
void CallState(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const LocalTensor& labels = call.operands[1];
  ByType({logits}, [&]<typename T>() {
    Launch(CrossEntropyState<T>, static_cast<unsigned>(labels.elements()),
           ThreadsFor(logits.shape.back()), 0, *call.queue, Elements<T>(logits),
           labels.as<const int32_t>(), Elements<Any>(call.results[0]),
           VocabularyOf(call));
  });
}

// logits, labels, count, states -> loss, lse.
void CallCrossEntropy(const KernelCall& call) {
  const LocalTensor& labels = call.operands[1];
  const LocalTensor& states = call.operands[3];
  const int64_t tokens = labels.elements();
  const int64_t blocks = DivideUp(tokens, kThreads);
  auto* const partial = reinterpret_cast<double*>(
      call.queue->Workspace(blocks * int64_t{sizeof(double)}, "a sum"));
  if (partial == nullptr) return;
  Launch(MergeStates, static_cast<unsigned>(blocks), kThreads, 0, *call.queue,
         labels.as<const int32_t>(), Elements<Any>(states),
         states.elements() / std::max<int64_t>(3 * tokens, 1), tokens,
         Elements<Any>(call.results[1]), partial);
  CallSumPartials(call, blocks, Elements<Any>(call.operands[2]));
}

void CallCrossEntropyDx(const KernelCall& call) {
  const auto& in = call.operands;
  const LocalTensor& dlogits = call.results[0];
  ByType({in[0], dlogits}, [&]<typename T>() {
    Launch(CrossEntropyDx<T>, static_cast<unsigned>(in[1].elements()),
           ThreadsFor(in[0].shape.back()), 0, *call.queue, Elements<T>(in[0]),
           in[1].as<const int32_t>(), Elements<Any>(in[2]),
           Elements<Any>(in[3]),
           in.size() > 4 ? Elements<Any>(in[4]) : Elements<Any>(),
           Elements<T>(dlogits), VocabularyOf(call));
  });
}

}  // namespace

std::vector<Kernel> CudaCrossEntropyKernels() {
  return {
      {"count_labels", CallCountLabels, true},
      {"cross_entropy.state", CallState},
      {"cross_entropy", CallCrossEntropy, true},
      {"cross_entropy_dx", CallCrossEntropyDx},
  };
}

}  // namespace tessera
