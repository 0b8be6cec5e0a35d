// Softmax cross-entropy over a vocabulary that may be split: a shard's state
// for each token is (maximum, sum of exp(x - maximum), logit of the target or
// 0). Sums over tokens and over the vocabulary are taken in double. Columns
// that pad the vocabulary are as if they were not there, with gradients of 0; a
// shard of them alone has the state (-inf, 0, 0), and one whose logits are all
// minus infinity the maximum and the sum of that.

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/kernels/vocabulary.h"

namespace tessera {
namespace {

// Which of the first `columns` columns of `logits` holds the token's target, or
// -1: another shard holds it, or the token is not counted.
int64_t TargetColumn(const LocalTensor& logits, int64_t columns,
                     int32_t label) {
  const int64_t column = label - logits.offset.back();
  return label >= 0 && column >= 0 && column < columns ? column : -1;
}

// Calls f(token) for all tokens, on the threads of the call.
template <typename F>
void ForEachToken(const KernelCall& call, const LocalTensor& labels,
                  int64_t width, F f) {
  ForEachRange(call, labels.elements(), RowGrain(width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t token = begin; token < end; ++token) f(token);
               });
}

// labels -> number of labels >= 0.
void CountLabels(const KernelCall& call) {
  const LocalTensor& labels = call.operands[0];
  const int32_t* const label = labels.as<const int32_t>();
  const auto count = std::count_if(label, label + labels.elements(),
                                   [](int32_t l) { return l >= 0; });
  PutOrAdd(call, call.results[0], 0, static_cast<double>(count));
}

// logits, labels, count -> state[tokens, 3].
template <typename T>
void CrossEntropyState(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const LocalTensor& labels = call.operands[1];
  const LocalTensor& state = call.results[0];
  const int64_t width = logits.shape.back();
  const int64_t columns = TokenColumns(call, logits);
  ForEachToken(call, labels, width, [&](int64_t token) {
    const T* const x = logits.as<const T>() + token * width;
    constexpr T kMasked = -std::numeric_limits<T>::infinity();
    const T maximum =
        columns == 0 ? kMasked : ConstMatrixMap<T>(x, 1, columns).maxCoeff();
    double sum = 0;
    // -inf less -inf is no number.
    ForEachBlock(maximum == kMasked ? 0 : columns,
                 [&](int64_t i, int64_t count) {
                   const Block<T> e = (Load(x + i, count) - maximum).exp();
                   sum += Sum(count, [&e](int64_t j) { return e[j]; });
                 });
    const int64_t target =
        TargetColumn(logits, columns, labels.as<const int32_t>()[token]);
    Put(state, 3 * token, maximum);
    Put(state, 3 * token + 1, sum);
    Put(state, 3 * token + 2, target < 0 ? 0 : static_cast<double>(x[target]));
  });
}

// logits, labels, count, states[shards, tokens, 3] -> loss, lse. The logits
// themselves are not read again.
void CrossEntropy(const KernelCall& call) {
  const LocalTensor& labels = call.operands[1];
  const double counted = Get(call.operands[2], 0);
  const LocalTensor& states = call.operands[3];
  const int64_t tokens = labels.elements();
  const int64_t shards = states.elements() / (3 * tokens);
  double loss = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    const auto state = [&](int64_t shard, int64_t i) {
      return Get(states, (shard * tokens + token) * 3 + i);
    };
    double maximum = state(0, 0);
    for (int64_t shard = 1; shard < shards; ++shard) {
      maximum = std::max(maximum, state(shard, 0));
    }
    double sum = 0;
    double target = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      target += state(shard, 2);
      if (state(shard, 1) == 0) continue;  // all of it is masked
      sum += state(shard, 1) * std::exp(state(shard, 0) - maximum);
    }
    const double lse = maximum + std::log(sum);
    Put(call.results[1], token, lse);
    if (labels.as<const int32_t>()[token] >= 0) loss += lse - target;
  }
  // No token is counted where `counted` is 0.
  PutOrAdd(call, call.results[0], 0, counted > 0 ? loss / counted : 0);
}

// logits, labels, count, lse [, loss scale] -> dlogits:
// (softmax - onehot) scale / count.
template <typename T>
void CrossEntropyDx(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const LocalTensor& labels = call.operands[1];
  const double counted = Get(call.operands[2], 0);
  const double scale = call.operands.size() > 4 ? Get(call.operands[4], 0) : 1;
  const int64_t width = logits.shape.back();
  const int64_t columns = TokenColumns(call, logits);
  ForEachToken(call, labels, width, [&](int64_t token) {
    const T* const x = logits.as<const T>() + token * width;
    T* const dx = call.results[0].as<T>() + token * width;
    const int32_t label = labels.as<const int32_t>()[token];
    if (label < 0) {
      std::fill_n(dx, width, T{0});
      return;
    }
    const T lse = static_cast<T>(Get(call.operands[3], token));
    const T weight = static_cast<T>(scale / counted);
    std::fill(dx + columns, dx + width, T{0});
    ForEachBlock(columns, [&](int64_t i, int64_t count) {
      Store<T>((Load(x + i, count) - lse).exp() * weight, count, dx + i);
    });
    const int64_t target = TargetColumn(logits, columns, label);
    if (target >= 0) dx[target] -= weight;
  });
}

}  // namespace

std::vector<Kernel> CpuCrossEntropyKernels() {
  return {
      {"count_labels", CountLabels, true},
      {"cross_entropy.state",
       ByDType<CrossEntropyState<float>, CrossEntropyState<double>>},
      {"cross_entropy", CrossEntropy, true},
      {"cross_entropy_dx",
       ByDType<CrossEntropyDx<float>, CrossEntropyDx<double>>},
  };
}

}  // namespace tessera
