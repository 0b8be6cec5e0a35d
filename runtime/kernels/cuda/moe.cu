// Mixture of experts. Formulas and what shards hold: runtime/kernels/cpu/
// moe.cc. A token is routed by one warp, in fp32 from logits that every rank of
// a routing group has whole; of equal logits the lower expert comes first.
//
// Who gets a place with an expert is decided in the order of tokens: one thread
// for each expert goes through the choices of a sample.

#include "runtime/kernels/cuda/buckets.h"
#include "runtime/kernels/cuda/matmul.h"
#include "runtime/kernels/cuda/pieces.h"
#include "runtime/kernels/losses.h"
#include "runtime/kernels/routing.h"

namespace tessera {
namespace {

// ---- Routing ----------------------------------------------------------------

constexpr unsigned kRouteWarps = 4;  // tokens of a block
constexpr int kMostExperts = 1024;
constexpr int kMostChoices = 32;
constexpr int kMostGroups = kWarp;  // one for each lane

// How a router scores and chooses: the attributes of its operator.
struct Routing {
  int experts;
  int top_k;
  int groups;
  int top_groups;
  int group_best;
  bool sigmoid;
};

// Of one token, in shared memory.
struct Route {
  float score[kMostExperts];     // softmax or sigmoids of all logits
  float total;                   // their sum
  int32_t choice[kMostChoices];  // experts, best first
  float group_score[kMostGroups];
  bool open[kMostGroups];  // groups from which the token chooses
};

// The sum of the `count` largest of scores[0, n).
__device__ float SumOfBest(const float* logits, int n, int count, bool sigmoid,
                           float maximum) {
  float sum = 0;
  float last = INFINITY;
  int last_at = -1;
  for (int i = 0; i < count; ++i) {
    float best = -INFINITY;
    int best_at = n;
    for (int e = 0; e < n; ++e) {
      const bool behind =
          logits[e] < last || (logits[e] == last && e > last_at);
      if (!behind || logits[e] <= best) continue;
      best = logits[e];
      best_at = e;
    }
    last = best;
    last_at = best_at;
    sum += sigmoid ? 1 / (1 + expf(-best)) : expf(best - maximum);
  }
  return sum;
}

// Which groups are open; a lane for each. route.score has the logits.
__device__ void OpenGroups(const Routing& routing, float maximum,
                           Route& route) {
  const int lane = static_cast<int>(threadIdx.x);
  const int each = routing.experts / routing.groups;
  __syncwarp();
  if (lane < routing.groups) {
    route.group_score[lane] =
        routing.groups == 1
            ? 0
            : SumOfBest(route.score + lane * each, each, routing.group_best,
                        routing.sigmoid, maximum);
  }
  __syncwarp();
  if (lane < routing.groups) {
    const float mine = route.group_score[lane];
    int better = 0;
    for (int g = 0; g < routing.groups; ++g) {
      const float other = route.group_score[g];
      better += other > mine || (other == mine && g < lane);
    }
    route.open[lane] = better < routing.top_groups;
  }
  __syncwarp();
}

// The warp's route of `token`.
__device__ void RouteToken(Elements<Any> logits, int64_t token,
                           const Routing& routing, Route& route) {
  const int lane = static_cast<int>(threadIdx.x);
  const int experts = routing.experts;
  const int top_k = routing.top_k;
  const int each = experts / routing.groups;
  float maximum = -INFINITY;
  for (int e = lane; e < experts; e += kWarp) {
    route.score[e] = logits.Get(token * experts + e);
    maximum = fmaxf(maximum, route.score[e]);
  }
  maximum = ReduceWarp(maximum, [](float a, float b) { return fmaxf(a, b); });
  OpenGroups(routing, maximum, route);
  struct Best {
    float logit;
    int32_t expert;
  };
  const auto better = [](Best a, Best b) {
    const bool first =
        a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert);
    return first ? a : b;
  };
  // The k-th best is the best of those behind the one before.
  Best last = {INFINITY, -1};
  for (int k = 0; k < top_k; ++k) {
    Best best = {-INFINITY, experts};
    for (int e = lane; e < experts; e += kWarp) {
      const Best candidate = {route.score[e], e};
      const bool behind =
          candidate.logit < last.logit ||
          (candidate.logit == last.logit && candidate.expert > last.expert);
      if (behind && route.open[e / each]) best = better(best, candidate);
    }
    last = ReduceWarp(best, better);
    // Nothing is behind where logits are not numbers.
    if (lane == 0) route.choice[k] = min(last.expert, experts - 1);
  }
  float sum = 0;
  for (int e = lane; e < experts; e += kWarp) {
    const float x = route.score[e];
    route.score[e] = routing.sigmoid ? 1 / (1 + expf(-x)) : expf(x - maximum);
    sum += route.score[e];
  }
  sum = ReduceWarp(sum, [](float a, float b) { return a + b; });
  if (!routing.sigmoid) {
    for (int e = lane; e < experts; e += kWarp) route.score[e] /= sum;
  }
  if (lane == 0) route.total = routing.sigmoid ? sum : 1;
  __syncwarp();
}

// How scores become weights.
struct Weighting {
  bool renormalise;
  float scale;

  // What the chosen scores are divided by.
  __device__ float Divisor(const Route& route, int top_k) const {
    if (!renormalise) return 1 / scale;
    float sum = static_cast<float>(kOfNoScore);
    for (int k = 0; k < top_k; ++k) sum += route.score[route.choice[k]];
    return sum / scale;
  }
};

// The choices that a shard of k has.
struct Choices {
  int top_k;
  int first;
  int width;
};

// logits -> weights of the shard's choices, and all choices.
__global__ void GateWeights(Elements<Any> logits, Elements<Any> weights,
                            int32_t* chosen, int64_t tokens, Routing routing,
                            Choices choices, Weighting weighting) {
  TESSERA_SHARED(routes, Route[kRouteWarps]);
  Route& route = routes[threadIdx.y];
  const int64_t token = int64_t{blockIdx.x} * kRouteWarps + threadIdx.y;
  if (token >= tokens) return;
  RouteToken(logits, token, routing, route);
  const float divisor = weighting.Divisor(route, choices.top_k);
  for (int k = static_cast<int>(threadIdx.x); k < choices.top_k; k += kWarp) {
    const int32_t expert = route.choice[k];
    chosen[token * choices.top_k + k] = expert;
    if (k < choices.first || k >= choices.first + choices.width) continue;
    weights.Set(token * choices.width + k - choices.first,
                route.score[expert] / divisor);
  }
}

// All choices -> slots of the shard's. One block for each sample of `seq`
// tokens.
constexpr unsigned kPlaceThreads = 256;
__global__ void GateSlots(const int32_t* chosen, int32_t* slots, int64_t seq,
                          int experts, Choices choices, int64_t capacity) {
  TESSERA_SHARED(held, int32_t[kPlaceThreads]);
  const int64_t n = seq * choices.top_k;
  const int64_t begin = blockIdx.x * n;
  for (int e = 0; e < experts; e += kPlaceThreads) {
    const int mine = e + static_cast<int>(threadIdx.x);
    int64_t used = 0;
    for (int64_t at = 0; at < n; at += kPlaceThreads) {
      const int64_t count = n - at < kPlaceThreads ? n - at : kPlaceThreads;
      if (threadIdx.x < count)
        held[threadIdx.x] = chosen[begin + at + threadIdx.x];
      __syncthreads();
      for (int64_t i = 0; i < count; ++i) {
        if (held[i] != mine) continue;
        const int64_t place = used++;
        const int64_t token = (begin + at + i) / choices.top_k;
        const auto k = static_cast<int>((begin + at + i) % choices.top_k);
        if (k < choices.first || k >= choices.first + choices.width) continue;
        slots[token * choices.width + k - choices.first] = static_cast<int32_t>(
            place < capacity ? mine * capacity + place : -1);
      }
      __syncthreads();
    }
  }
}

// dweights, logits -> dlogits.
__global__ void GateDx(Elements<Any> dweights, Elements<Any> logits,
                       Elements<Any> dlogits, int64_t tokens, Routing routing,
                       Choices choices, Weighting weighting) {
  TESSERA_SHARED(routes, Route[kRouteWarps]);
  Route& route = routes[threadIdx.y];
  const int64_t token = int64_t{blockIdx.x} * kRouteWarps + threadIdx.y;
  if (token >= tokens) return;
  RouteToken(logits, token, routing, route);
  const int experts = routing.experts;
  const float divisor = weighting.Divisor(route, choices.top_k);
  float sum = 0;  // of score * g
  for (int k = 0; k < choices.width; ++k) {
    sum += route.score[route.choice[choices.first + k]] *
           (dweights.Get(token * choices.width + k) / divisor);
  }
  const bool renormalise = weighting.renormalise;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kWarp) {
    float g = 0;
    for (int k = 0; k < choices.top_k; ++k) {
      if (route.choice[k] != e) continue;
      const int of_shard = k - choices.first;
      if (of_shard >= 0 && of_shard < choices.width) {
        g += dweights.Get(token * choices.width + of_shard) / divisor;
      }
      if (renormalise) g -= sum / (divisor * weighting.scale);
    }
    const float p = route.score[e];
    dlogits.Set(
        token * experts + e,
        p * (routing.sigmoid ? (1 - p) * g : g - (renormalise ? 0 : sum)));
  }
}

// ---- Balance ----------------------------------------------------------------

// Of one sample: the share of its choices that each expert has, and the mean
// probability of each, at loads[sample][2][experts]. Tokens are routed
// kBalanceWarps at a time, and one thread for each expert adds them in order.
constexpr unsigned kBalanceWarps = 8;
__global__ void SampleLoads(Elements<Any> logits, float* loads, int64_t seq,
                            Routing routing) {
  const int experts = routing.experts;
  const int top_k = routing.top_k;
  TESSERA_SHARED(routes, Route[kBalanceWarps]);
  float* const share = loads + int64_t{blockIdx.x} * 2 * experts;
  float* const probability = share + experts;
  const unsigned thread = threadIdx.y * kWarp + threadIdx.x;
  for (int64_t at = 0; at < seq; at += kBalanceWarps) {
    if (at + threadIdx.y < seq) {
      RouteToken(logits, blockIdx.x * seq + at + threadIdx.y, routing,
                 routes[threadIdx.y]);
    }
    __syncthreads();
    const int64_t count = seq - at < kBalanceWarps ? seq - at : kBalanceWarps;
    for (int e = static_cast<int>(thread); e < experts;
         e += kBalanceWarps * kWarp) {
      float choices = at == 0 ? 0 : share[e];
      float sum = at == 0 ? 0 : probability[e];
      for (int64_t i = 0; i < count; ++i) {
        sum += routes[i].score[e] / routes[i].total;
        for (int k = 0; k < top_k; ++k) choices += routes[i].choice[k] == e;
      }
      const bool last = at + kBalanceWarps >= seq;
      share[e] = last ? choices / static_cast<float>(seq * top_k) : choices;
      probability[e] = last ? sum / static_cast<float>(seq) : sum;
    }
    __syncthreads();
  }
}

// The loads of all samples -> loss.
__global__ void BalanceLoss(const float* loads, int64_t samples, int experts,
                            float scale, Elements<Any> loss, bool accumulate) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < samples * experts; i += blockDim.x) {
    const float* const share = loads + i / experts * 2 * experts;
    const auto e = static_cast<int>(i % experts);
    sum += double{share[e]} * double{share[experts + e]};
  }
  sum = Sum(sum) * double{scale};
  if (threadIdx.x > 0) return;
  loss.Set(0, static_cast<float>(sum) + (accumulate ? loss.Get(0) : 0));
}

// logits, loads [, loss scale] -> dlogits.
__global__ void BalanceDx(Elements<Any> logits, const float* loads,
                          Elements<Any> loss_scale, Elements<Any> dlogits,
                          int64_t tokens, int64_t seq, Routing routing,
                          float scale) {
  TESSERA_SHARED(routes, Route[kRouteWarps]);
  Route& route = routes[threadIdx.y];
  const int64_t token = int64_t{blockIdx.x} * kRouteWarps + threadIdx.y;
  if (token >= tokens) return;
  RouteToken(logits, token, routing, route);
  const int experts = routing.experts;
  if (loss_scale.data != nullptr) scale *= loss_scale.Get(0);
  const float* const share = loads + token / seq * 2 * experts;
  float mean = 0;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kWarp) {
    mean += route.score[e] / route.total * share[e];
  }
  mean = ReduceWarp(mean, [](float a, float b) { return a + b; });
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kWarp) {
    const float p = route.score[e];
    const float slope = routing.sigmoid ? p * (1 - p) / route.total : p;
    dlogits.Set(token * experts + e, scale * slope * (share[e] - mean));
  }
}

// ---- Rows and slots ---------------------------------------------------------

// Where the choices of `slots` [b, n, k] lie in a local block of slots
// [e, b, c, h].
struct SlotBlock {
  int64_t experts, samples, places;  // of the block
  int64_t first_expert, first_place, capacity;
  int64_t rows_per_sample, top_k;

  // The block's slot of a choice, or -1.
  __device__ int64_t SlotOf(int32_t number, int64_t choice) const {
    if (number < 0) return -1;
    const int64_t expert = number / capacity - first_expert;
    const int64_t place = number % capacity - first_place;
    if (expert < 0 || expert >= experts || place < 0 || place >= places) {
      return -1;
    }
    const int64_t sample = choice / top_k / rows_per_sample;
    return (expert * samples + sample) * places + place;
  }
};

// The choice is an item of its slot's bucket.
struct SlotOfChoice {
  const int32_t* slots;
  SlotBlock block;

  __device__ int64_t operator()(int64_t choice) const {
    return block.SlotOf(slots[choice], choice);
  }
};
struct RowOfChoice {
  int64_t choices_of_row;

  __device__ int64_t operator()(int64_t choice) const {
    return choice / choices_of_row;
  }
};

// The sum of the slots of a row's choices, in order; a warp for each row and
// its vectors blockIdx.y * 32, ...
template <typename T>
__global__ void FromSlots(Elements<T> x, SlotOfChoice slot_of, Elements<T> y,
                          int64_t rows, int64_t width, int64_t choices) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (row >= rows || column >= width) return;
  const Span span = FirstOf(width - column);
  float sum[kVector] = {};
  for (int64_t k = row * choices; k < (row + 1) * choices; ++k) {
    const int64_t slot = slot_of(k);
    if (slot < 0) continue;
    float v[kVector];
    x.Load(slot * width + column, span, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += v[j];
  }
  y.Store(row * width + column, span, sum);
}

// ---- Combination ------------------------------------------------------------

// z[rows, k, h], weights[rows, k] -> y[rows, h].
template <typename T>
__global__ void Combine(Elements<T> z, Elements<Any> weights, Elements<T> y,
                        int64_t rows, int64_t width, int64_t choices) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (row >= rows || column >= width) return;
  const Span span = FirstOf(width - column);
  float sum[kVector] = {};
  for (int64_t k = row * choices; k < (row + 1) * choices; ++k) {
    const float weight = weights.Get(k);
    float v[kVector];
    z.Load(k * width + column, span, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += weight * v[j];
  }
  y.Store(row * width + column, span, sum);
}

// dy[rows, h], weights[rows, k] -> dz[rows, k, h]: for `n` choices in all.
template <typename T>
__global__ void CombineDx(Elements<T> dy, Elements<Any> weights, Elements<T> dz,
                          int64_t n, int64_t width, int64_t choices) {
  const int64_t k = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (k >= n || column >= width) return;
  const Span span = FirstOf(width - column);
  const float weight = weights.Get(k);
  float v[kVector];
  dy.Load(k / choices * width + column, span, v);
#pragma unroll
  for (int j = 0; j < kVector; ++j) v[j] *= weight;
  dz.Store(k * width + column, span, v);
}

// dy[rows, h], z[rows, k, h] -> dweights[rows, k].
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    CombineDw(Elements<T> dy, Elements<T> z, Elements<Any> dweights, int64_t n,
              int64_t width, int64_t choices) {
  const int64_t k = RowOfThread();
  if (k >= n) return;
  float sum = 0;
  RowOf(z, k, width)
      .ForEach([&](int64_t, int64_t column, Span span, const auto& v) {
        float d[kVector];
        dy.Load(k / choices * width + column, span, d);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum += d[j] * v[0][j];
      });
  sum = Sum(sum);
  if (threadIdx.x == 0) dweights.Set(k, sum);
}

// ---- Calls ------------------------------------------------------------------

// Whether the kernels have room for the router of these logits; an error where
// not.
bool HasRoom(const KernelCall& call, const LocalTensor& logits) {
  const auto fits = [&](int64_t count, int64_t most, const char* what) {
    if (count <= most) return true;
    call.queue->Fail("a router with " + std::to_string(count) + what +
                     ": CUDA kernels have up to " + std::to_string(most));
    return false;
  };
  const auto whole = [&](const char* name) {
    return static_cast<int64_t>(call.attribute(name));
  };
  return fits(logits.shape.back(), kMostExperts, " experts") &&
         fits(whole("top_k"), kMostChoices, " experts for each token") &&
         fits(whole("groups"), kMostGroups, " groups of experts");
}
Routing RoutingOf(const KernelCall& call, const LocalTensor& logits) {
  const auto whole = [&](const char* name) {
    return static_cast<int>(call.attribute(name));
  };
  return {.experts = static_cast<int>(logits.shape.back()),
          .top_k = whole("top_k"),
          .groups = whole("groups"),
          .top_groups = whole("top_groups"),
          .group_best = whole("group_best"),
          .sigmoid = call.attribute("sigmoid") != 0};
}
Weighting WeightingOf(const KernelCall& call) {
  return {.renormalise = call.attribute("renormalise") != 0,
          .scale = static_cast<float>(call.attribute("scale"))};
}
Choices ChoicesOf(const LocalTensor& weights) {
  return {static_cast<int>(weights.global_shape.back()),
          static_cast<int>(weights.offset.back()),
          static_cast<int>(weights.shape.back())};
}
unsigned RouteBlocks(int64_t tokens) {
  return BlocksOf(tokens, kRouteWarps);
}
constexpr dim3 kRouteBlock = {kWarp, kRouteWarps, 1};

// Calls f(part) for parts of a call that have as many samples as find room for
// `count` numbers each in the workspace.
template <typename F>
void InPiecesOfSamples(const KernelCall& call, const LocalTensor& logits,
                       int64_t count,
                       std::initializer_list<const LocalTensor*> of_all, F f) {
  if (!HasRoom(call, logits)) return;
  const int64_t samples = logits.shape[0];
  const auto bytes_of = [&](int64_t n) { return 4 * n * count; };
  const int64_t piece =
      PieceOf(samples, std::max<int64_t>(samples, 1), *call.queue, bytes_of);
  if (call.queue->Workspace(bytes_of(piece), "routing") == nullptr) return;
  ForEachPieceOfSamples(call, samples, piece, of_all, f);
}
template <typename T>
T* Workspace(const KernelCall& call) {
  return reinterpret_cast<T*>(call.queue->workspace);
}

// Of samples for which there is workspace.
void GateOfSamples(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const Choices choices = ChoicesOf(call.results[0]);
  const int64_t seq = logits.shape[1];
  const int64_t tokens = logits.shape[0] * seq;
  auto* const chosen = Workspace<int32_t>(call);
  const Routing routing = RoutingOf(call, logits);
  Launch(GateWeights, RouteBlocks(tokens), kRouteBlock, 0, *call.queue,
         Elements<Any>(logits), Elements<Any>(call.results[0]), chosen, tokens,
         routing, choices, WeightingOf(call));
  Launch(GateSlots, static_cast<unsigned>(logits.shape[0]), kPlaceThreads, 0,
         *call.queue, chosen, call.results[1].as<int32_t>(), seq,
         routing.experts, choices,
         static_cast<int64_t>(call.attribute("capacity")));
}

// logits[b, s, e] -> weights[b, s, k], slots[b, s, k].
void CallGate(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  InPiecesOfSamples(call, logits,
                    logits.shape[1] * ChoicesOf(call.results[0]).top_k, {},
                    GateOfSamples);
}

// dweights, logits -> dlogits.
void CallGateDx(const KernelCall& call) {
  const LocalTensor& logits = call.operands[1];
  if (!HasRoom(call, logits)) return;
  const int64_t tokens = logits.shape[0] * logits.shape[1];
  Launch(GateDx, RouteBlocks(tokens), kRouteBlock, 0, *call.queue,
         Elements<Any>(call.operands[0]), Elements<Any>(logits),
         Elements<Any>(call.results[0]), tokens, RoutingOf(call, logits),
         ChoicesOf(call.operands[0]), WeightingOf(call));
}

// The loads of all samples, in the workspace.
float* LaunchLoads(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  auto* const loads = Workspace<float>(call);
  Launch(SampleLoads, static_cast<unsigned>(logits.shape[0]),
         dim3(kWarp, kBalanceWarps), 0, *call.queue, Elements<Any>(logits),
         loads, logits.shape[1], RoutingOf(call, logits));
  return loads;
}

void BalanceOfSamples(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const float* const loads = LaunchLoads(call);
  Launch(BalanceLoss, 1, kSumThreads, 0, *call.queue, loads, logits.shape[0],
         RoutingOf(call, logits).experts,
         static_cast<float>(BalanceScale(call)), Elements<Any>(call.results[0]),
         call.accumulate);
}

void CallBalance(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  InPiecesOfSamples(call, logits, 2 * logits.shape[2], {&call.results[0]},
                    BalanceOfSamples);
}

void BalanceDxOfSamples(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const int64_t seq = logits.shape[1];
  const int64_t tokens = logits.shape[0] * seq;
  const float* const loads = LaunchLoads(call);
  Launch(BalanceDx, RouteBlocks(tokens), kRouteBlock, 0, *call.queue,
         Elements<Any>(logits), loads,
         call.operands.size() > 1 ? Elements<Any>(call.operands[1])
                                  : Elements<Any>(),
         Elements<Any>(call.results[0]), tokens, seq, RoutingOf(call, logits),
         static_cast<float>(BalanceScale(call) / static_cast<double>(seq)));
}

void CallBalanceDx(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const LocalTensor* const loss_scale =
      call.operands.size() > 1 ? &call.operands[1] : nullptr;
  InPiecesOfSamples(call, logits, 2 * logits.shape[2], {loss_scale},
                    BalanceDxOfSamples);
}

// The choices of `slots` [b, n, k] in the local block `at` [e, b, c, h].
SlotOfChoice SlotsIn(const LocalTensor& at, const LocalTensor& slots) {
  return {slots.as<const int32_t>(),
          {.experts = at.shape[0],
           .samples = at.shape[1],
           .places = at.shape[2],
           .first_expert = at.offset[0],
           .first_place = at.offset[2],
           .capacity = at.global_shape[2],
           .rows_per_sample = slots.shape[1],
           .top_k = slots.shape[2]}};
}

// x[b, t, h] (or, by choice, [b, t, k, h]), slots[b, t, k] -> [e, b, s, h].
template <bool kByChoice>
void CallToSlots(const KernelCall& call) {
  const LocalTensor& slots = call.operands[1];
  const LocalTensor& y = call.results[0];
  AddByBucket(call, slots.elements(), SlotsIn(y, slots),
              RowOfChoice{kByChoice ? 1 : slots.shape[2]}, call.operands[0], y);
}

// A warp for each of `rows` and 256 of its columns.
constexpr unsigned kRowsOfBlock = 8;
dim3 RowsByColumns(int64_t rows, int64_t width) {
  return {BlocksOf(rows, kRowsOfBlock), BlocksOf(width, kColumnsOfBlock), 1};
}

// [e, b, s, h], slots[b, t, k] -> y[b, t, h] (or, by choice, [b, t, k, h]).
template <bool kByChoice>
void CallFromSlots(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& slots = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t choices = kByChoice ? 1 : slots.shape[2];
  const int64_t rows = slots.elements() / choices;
  const int64_t width = y.shape.back();
  ByType({x, y}, [&]<typename T>() {
    Launch(FromSlots<T>, RowsByColumns(rows, width), dim3(kWarp, kRowsOfBlock),
           0, *call.queue, Elements<T>(x), SlotsIn(x, slots), Elements<T>(y),
           rows, width, choices);
  });
}

void CallCombine(const KernelCall& call) {
  const LocalTensor& z = call.operands[0];
  const LocalTensor& weights = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t choices = weights.shape.back();
  const int64_t rows = weights.elements() / choices;
  const int64_t width = y.shape.back();
  ByType({z, y}, [&]<typename T>() {
    Launch(Combine<T>, RowsByColumns(rows, width), dim3(kWarp, kRowsOfBlock), 0,
           *call.queue, Elements<T>(z), Elements<Any>(weights), Elements<T>(y),
           rows, width, choices);
  });
}

void CallCombineDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& weights = call.operands[1];
  const LocalTensor& dz = call.results[0];
  const int64_t n = weights.elements();
  const int64_t width = dy.shape.back();
  ByType({dy, dz}, [&]<typename T>() {
    Launch(CombineDx<T>, RowsByColumns(n, width), dim3(kWarp, kRowsOfBlock), 0,
           *call.queue, Elements<T>(dy), Elements<Any>(weights),
           Elements<T>(dz), n, width, weights.shape.back());
  });
}

void CallCombineDw(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& z = call.operands[1];
  const LocalTensor& dweights = call.results[0];
  const int64_t n = dweights.elements();
  const int64_t width = dy.shape.back();
  const RowGrid grid = RowGridFor(n, width);
  ByType({dy, z}, [&]<typename T>() {
    Launch(CombineDw<T>, grid.grid, grid.block, 0, *call.queue, Elements<T>(dy),
           Elements<T>(z), Elements<Any>(dweights), n, width,
           dweights.shape.back());
  });
}

// ---- Experts ----------------------------------------------------------------

// The rows and columns of each expert's matrix.
int64_t Columns(const LocalTensor& tensor) {
  return tensor.shape.back();
}
int64_t Rows(const LocalTensor& tensor) {
  return tensor.elements() / tensor.shape[0] / Columns(tensor);
}

void Multiply(const KernelCall& call, bool transpose_a, bool transpose_b) {
  const LocalTensor& a = call.operands[0];
  const LocalTensor& b = call.operands[1];
  const LocalTensor& d = call.results[0];
  const MatMulProblem problem = {.m = Rows(d),
                                 .n = Columns(d),
                                 .k = transpose_a ? Rows(a) : Columns(a),
                                 .transpose_a = transpose_a,
                                 .transpose_b = transpose_b,
                                 .a = a.dtype,
                                 .b = b.dtype,
                                 .d = d.dtype,
                                 .batch = d.shape[0],
                                 .accumulate = call.accumulate};
  if (!call.queue->matmul->Takes(problem)) {
    return call.queue->Fail("no matrix product " + Describe(problem));
  }
  call.queue->matmul->Run(problem, {.a = a.data, .b = b.data, .d = d.data},
                          *call.queue);
}

// x[e, b, s, i], w[e, o, i] -> y[e, b, s, o].
void ExpertLinear(const KernelCall& call) {
  Multiply(call, false, true);
}
// dy, w -> dx.
void ExpertLinearDx(const KernelCall& call) {
  Multiply(call, false, false);
}
// dy, x -> dw.
void ExpertLinearDw(const KernelCall& call) {
  Multiply(call, true, false);
}

}  // namespace

std::vector<Kernel> CudaMoeKernels() {
  return {
      {"moe_gate", CallGate},
      {"moe_gate_dx", CallGateDx},
      {"moe_balance", CallBalance, true},
      {"moe_balance_dx", CallBalanceDx},
      {"moe_dispatch", CallToSlots<false>},
      {"moe_dispatch_dx", CallFromSlots<false>},
      {"moe_collect", CallFromSlots<true>},
      {"moe_collect_dx", CallToSlots<true>},
      {"moe_combine", CallCombine},
      {"moe_combine_dx", CallCombineDx},
      {"moe_combine_dw", CallCombineDw},
      {"expert_linear", ExpertLinear, true},
      {"expert_linear_dx", ExpertLinearDx, true},
      {"expert_linear_dw", ExpertLinearDw, true},
  };
}

}  // namespace tessera
