// Mixture of experts. Routing is computed in double from logits that every
// rank of a routing group has whole; slots are moved row by row, and those of
// other ranks (other experts, other places) are passed over.

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <vector>

#include "runtime/kernels/attributes.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/gemm.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/kernels/losses.h"
#include "runtime/kernels/routing.h"

namespace tessera {
namespace {

// ---- routing

// How a router scores and chooses: the attributes of its operator.
struct Routing {
  int64_t top_k, groups, top_groups, group_best;
  bool sigmoid;

  explicit Routing(const KernelCall& call)
      : top_k(WholeAttribute(call, "top_k")),
        groups(WholeAttribute(call, "groups")),
        top_groups(WholeAttribute(call, "top_groups")),
        group_best(WholeAttribute(call, "group_best")),
        sigmoid(call.attribute("sigmoid") != 0) {}
};

// A token's scores, and its `top_k` experts, best first; of equal logits the
// lower expert comes first.
struct Route {
  std::vector<double> scores;  // softmax or sigmoids of all logits
  double total = 1;            // their sum
  std::vector<int64_t> experts;
};

// Sorts the `count` indices with the largest values to the front; of equal
// values the lower index comes first.
void Best(const std::vector<double>& values, int64_t count,
          std::vector<int64_t>& indices) {
  std::partial_sort(indices.begin(), indices.begin() + count, indices.end(),
                    [&](int64_t a, int64_t b) {
                      return values[a] > values[b] ||
                             (values[a] == values[b] && a < b);
                    });
  indices.resize(count);
}

// The groups from which a token chooses.
std::vector<int64_t> OpenGroups(const Routing& routing,
                                const std::vector<double>& scores) {
  const int64_t each = static_cast<int64_t>(scores.size()) / routing.groups;
  std::vector<double> sums(routing.groups);
  std::vector<int64_t> groups(routing.groups);
  for (int64_t g = 0; g < routing.groups; ++g) {
    std::vector<double> best(scores.begin() + g * each,
                             scores.begin() + (g + 1) * each);
    std::partial_sort(best.begin(), best.begin() + routing.group_best,
                      best.end(), std::greater<>());
    for (int64_t i = 0; i < routing.group_best; ++i) sums[g] += best[i];
    groups[g] = g;
  }
  Best(sums, routing.top_groups, groups);
  return groups;
}

Route RouteOf(const LocalTensor& logits, int64_t token,
              const Routing& routing) {
  const int64_t n = logits.shape.back();
  std::vector<double> x(n);
  for (int64_t e = 0; e < n; ++e) x[e] = Get(logits, token * n + e);
  Route route;
  route.scores = x;
  const double maximum = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& score : route.scores) {
    score = routing.sigmoid ? 1 / (1 + std::exp(-score))
                            : std::exp(score - maximum);
    sum += score;
  }
  if (routing.sigmoid) {
    route.total = sum;
  } else {
    for (double& score : route.scores) score /= sum;
  }
  const int64_t each = n / routing.groups;
  for (const int64_t g : OpenGroups(routing, route.scores)) {
    for (int64_t e = 0; e < each; ++e) route.experts.push_back(g * each + e);
  }
  TESSERA_CHECK(routing.top_k <= static_cast<int64_t>(route.experts.size()))
      << routing.top_k << " of " << route.experts.size() << " experts";
  Best(x, routing.top_k, route.experts);
  return route;
}

// What the chosen scores are divided by.
double Divisor(const KernelCall& call, const Route& route) {
  const double scale = call.attribute("scale");
  if (call.attribute("renormalise") == 0) return 1 / scale;
  double sum = kOfNoScore;
  for (int64_t e : route.experts) sum += route.scores[e];
  return sum / scale;
}

// Calls f(begin, end) for ranges of the tokens, or of what else has one row of
// scores, on the threads of the call.
template <typename F>
void ForEachTokens(const KernelCall& call, int64_t tokens, int64_t experts,
                   F f) {
  constexpr int64_t kOfScore = 16;  // a score takes as long as so many sums
  ForEachRange(call, tokens, RowGrain(kOfScore * experts), f);
}

// logits[b, s, e] -> weights[b, s, k], slots[b, s, k]. A shard of k has some of
// the choices.
void Gate(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const LocalTensor& weights = call.results[0];
  const LocalTensor& slots = call.results[1];
  const auto capacity = static_cast<int64_t>(call.attribute("capacity"));
  const Routing routing(call);
  const int64_t top_k = routing.top_k;
  const int64_t first = weights.offset.back();
  const int64_t width = weights.shape.back();
  const int64_t seq = logits.shape[1];
  const int64_t experts = logits.shape[2];
  const int64_t samples = logits.shape[0];
  std::vector<int64_t> chosen(samples * seq * top_k);
  ForEachTokens(call, samples * seq, experts, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const Route route = RouteOf(logits, token, routing);
      std::copy_n(route.experts.begin(), top_k, chosen.begin() + token * top_k);
      const double divisor = Divisor(call, route);
      for (int64_t k = first; k < first + width; ++k) {
        Put(weights, token * width + k - first,
            route.scores[route.experts[k]] / divisor);
      }
    }
  });
  // An expert's places go to tokens in their order.
  ForEachRange(
      call, samples, RowGrain(seq * top_k), [&](int64_t begin, int64_t end) {
        for (int64_t sample = begin; sample < end; ++sample) {
          std::vector<int64_t> used(experts);
          for (int64_t token = sample * seq; token < (sample + 1) * seq;
               ++token) {
            for (int64_t k = 0; k < top_k; ++k) {
              const int64_t expert = chosen[token * top_k + k];
              const int64_t place = used[expert]++;
              if (k < first || k >= first + width) continue;
              slots.as<int32_t>()[token * width + k - first] =
                  static_cast<int32_t>(
                      place < capacity ? expert * capacity + place : -1);
            }
          }
        }
      });
}

// dweights[b, s, k], logits -> dlogits. With w = p / d over the choices:
// dlogits_e = p_e (g_e - sum of p g), or p_e (1 - p_e) g_e of sigmoids, with
// g = dw / d of the chosen, 0 of others; d = 1 / scale, or the sum of the
// chosen p over the scale, whose gradient takes the mean of g off. A shard of
// k yields a part of the sums over choices.
void GateDx(const KernelCall& call) {
  const LocalTensor& dweights = call.operands[0];
  const LocalTensor& logits = call.operands[1];
  const LocalTensor& dlogits = call.results[0];
  const Routing routing(call);
  const int64_t first = dweights.offset.back();
  const int64_t width = dweights.shape.back();
  const int64_t experts = logits.shape.back();
  const bool renormalised = call.attribute("renormalise") != 0;
  const double scale = call.attribute("scale");
  const int64_t tokens = logits.elements() / experts;
  const auto of_token = [&](int64_t token, std::vector<double>& g) {
    const Route route = RouteOf(logits, token, routing);
    const std::vector<double>& p = route.scores;
    const double divisor = Divisor(call, route);
    std::fill(g.begin(), g.end(), 0);
    double sum = 0;  // of p g
    for (int64_t k = first; k < first + width; ++k) {
      const int64_t expert = route.experts[k];
      g[expert] = Get(dweights, token * width + k - first) / divisor;
      sum += p[expert] * g[expert];
    }
    if (renormalised) {
      for (int64_t expert : route.experts) {
        g[expert] -= sum / (divisor * scale);
      }
      sum = 0;
    }
    for (int64_t e = 0; e < experts; ++e) {
      Put(dlogits, token * experts + e,
          p[e] * (routing.sigmoid ? (1 - p[e]) * g[e] : g[e] - sum));
    }
  };
  ForEachTokens(call, tokens, experts, [&](int64_t begin, int64_t end) {
    std::vector<double> g(experts);
    for (int64_t token = begin; token < end; ++token) of_token(token, g);
  });
}

// ---- balance

// Of one sample: the share of its choices that each expert has, and the mean
// probability of each.
struct Loads {
  std::vector<double> share;
  std::vector<double> probability;
};

Loads LoadsOf(const KernelCall& call, int64_t sample) {
  const LocalTensor& logits = call.operands[0];
  const int64_t seq = logits.shape[1];
  const Routing routing(call);
  Loads load;
  load.share.resize(logits.shape[2]);
  load.probability.resize(logits.shape[2]);
  for (int64_t s = 0; s < seq; ++s) {
    const Route route = RouteOf(logits, sample * seq + s, routing);
    for (int64_t e : route.experts) {
      load.share[e] += 1 / static_cast<double>(seq * routing.top_k);
    }
    for (size_t e = 0; e < load.probability.size(); ++e) {
      load.probability[e] +=
          route.scores[e] / route.total / static_cast<double>(seq);
    }
  }
  return load;
}

// Of all samples.
std::vector<Loads> AllLoads(const KernelCall& call) {
  const Shape& shape = call.operands[0].shape;
  std::vector<Loads> loads(shape[0]);
  ForEachTokens(call, shape[0], shape[1] * shape[2],
                [&](int64_t begin, int64_t end) {
                  for (int64_t b = begin; b < end; ++b) {
                    loads[b] = LoadsOf(call, b);
                  }
                });
  return loads;
}

// logits -> loss.
void Balance(const KernelCall& call) {
  double loss = 0;
  for (const Loads& load : AllLoads(call)) {
    for (size_t e = 0; e < load.share.size(); ++e) {
      loss += load.share[e] * load.probability[e];
    }
  }
  PutOrAdd(call, call.results[0], 0, BalanceScale(call) * loss);
}

// logits [, loss scale] -> dlogits; the shares are counts and have no gradient.
// The sigmoid's slope is p (1 - p), where p is the score before it is divided.
void BalanceDx(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  const int64_t seq = logits.shape[1];
  const int64_t experts = logits.shape[2];
  const Routing routing(call);
  const double loss_scale =
      call.operands.size() > 1 ? Get(call.operands[1], 0) : 1;
  const double scale =
      loss_scale * BalanceScale(call) / static_cast<double>(seq);
  const std::vector<Loads> loads = AllLoads(call);
  ForEachTokens(
      call, logits.shape[0] * seq, experts, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const std::vector<double>& share = loads[token / seq].share;
          const Route route = RouteOf(logits, token, routing);
          const std::vector<double>& p = route.scores;
          double mean = 0;
          for (int64_t e = 0; e < experts; ++e) {
            mean += p[e] / route.total * share[e];
          }
          for (int64_t e = 0; e < experts; ++e) {
            const double slope =
                routing.sigmoid ? p[e] * (1 - p[e]) / route.total : p[e];
            Put(call.results[0], token * experts + e,
                scale * slope * (share[e] - mean));
          }
        }
      });
}

// ---- rows and slots

// Calls f(row, choice, slot) for the choices of rows [begin, end) of `slots`
// [b, n, k] whose slot lies in the local block `at` of slots [e, b, c, h]:
// `row` counts (b, n), `slot` counts (e, b, c).
template <typename F>
void ForEachSlot(const LocalTensor& slots, const LocalTensor& at, int64_t begin,
                 int64_t end, F f) {
  const int64_t capacity = at.global_shape[2];
  const int64_t top_k = slots.shape[2];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sample = row / slots.shape[1];
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t number = slots.as<const int32_t>()[row * top_k + k];
      if (number < 0) continue;
      const int64_t expert = number / capacity - at.offset[0];
      const int64_t place = number % capacity - at.offset[2];
      if (expert < 0 || expert >= at.shape[0] || place < 0 ||
          place >= at.shape[2]) {
        continue;
      }
      f(row, row * top_k + k,
        (expert * at.shape[1] + sample) * at.shape[2] + place);
    }
  }
}

template <typename T>
void AddRow(const T* from, T* to, int64_t width) {
  ForEachBlock(width, [&](int64_t i, int64_t count) {
    Store<T>(Load(to + i, count) + Load(from + i, count), count, to + i);
  });
}

// x[b, t, h] (or, by choice, [b, t, k, h]), slots[b, t, k] -> [e, b, s, h].
// Several rows may have one slot: threads share samples and columns.
template <typename T, bool kByChoice>
void ToSlots(const KernelCall& call) {
  const LocalTensor& slots = call.operands[1];
  const LocalTensor& to = call.results[0];
  const int64_t width = to.shape.back();
  const int64_t rows = slots.shape[1];  // of a sample
  const int64_t samples = slots.shape[0];
  const int64_t places = to.shape[2];
  const int64_t blocks = DivideUp(width, kBlock);
  const T* const x = call.operands[0].as<const T>();
  T* const y = to.as<T>();
  const auto fill = [&](int64_t sample, int64_t first, int64_t count) {
    for (int64_t e = 0; e < to.shape[0]; ++e) {
      for (int64_t s = 0; s < places; ++s) {
        const int64_t slot = (e * samples + sample) * places + s;
        std::fill_n(y + slot * width + first, count, T{0});
      }
    }
    ForEachSlot(slots, to, sample * rows, (sample + 1) * rows,
                [&](int64_t row, int64_t choice, int64_t slot) {
                  const int64_t from = kByChoice ? choice : row;
                  AddRow(x + from * width + first, y + slot * width + first,
                         count);
                });
  };
  const int64_t block_elements = to.shape[0] * places * kBlock;
  ForEachRange(call, samples * blocks, RowGrain(block_elements),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end;) {
                   const int64_t sample = i / blocks;
                   const int64_t next = std::min(end, (sample + 1) * blocks);
                   const int64_t first = i % blocks * kBlock;
                   const int64_t count =
                       std::min(width - first, (next - i) * kBlock);
                   fill(sample, first, count);
                   i = next;
                 }
               });
}

// [e, b, s, h], slots[b, t, k] -> y[b, t, h] (or, by choice, [b, t, k, h]).
template <typename T, bool kByChoice>
void FromSlots(const KernelCall& call) {
  const LocalTensor& slots = call.operands[1];
  const LocalTensor& from = call.operands[0];
  const int64_t width = from.shape.back();
  const int64_t of_row = (kByChoice ? slots.shape[2] : 1) * width;
  const T* const x = from.as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, slots.shape[0] * slots.shape[1],
               RowGrain(slots.shape[2] * width),
               [&](int64_t begin, int64_t end) {
                 std::fill_n(y + begin * of_row, (end - begin) * of_row, T{0});
                 ForEachSlot(slots, from, begin, end,
                             [&](int64_t row, int64_t choice, int64_t slot) {
                               const int64_t to = kByChoice ? choice : row;
                               AddRow(x + slot * width, y + to * width, width);
                             });
               });
}

// z[b, s, k, h], weights[b, s, k] -> y[b, s, h].
template <typename T>
void Combine(const KernelCall& call) {
  const LocalTensor& weights = call.operands[1];
  const int64_t top_k = weights.shape.back();
  const int64_t width = call.results[0].shape.back();
  const T* const z = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  const auto of_row = [&](int64_t row) {
    ForEachBlock(width, [&](int64_t i, int64_t count) {
      Block<T> sum = Block<T>::Zero();
      for (int64_t k = row * top_k; k < (row + 1) * top_k; ++k) {
        sum += static_cast<T>(Get(weights, k)) * Load(z + k * width + i, count);
      }
      Store<T>(sum, count, y + row * width + i);
    });
  };
  ForEachRange(call, weights.elements() / top_k, RowGrain(top_k * width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) of_row(row);
               });
}

// dy[b, s, h], weights[b, s, k] -> dz[b, s, k, h].
template <typename T>
void CombineDx(const KernelCall& call) {
  const LocalTensor& weights = call.operands[1];
  const int64_t top_k = weights.shape.back();
  const int64_t width = call.operands[0].shape.back();
  const T* const dy = call.operands[0].as<const T>();
  T* const dz = call.results[0].as<T>();
  const auto of_choice = [&](int64_t k) {
    const T weight = static_cast<T>(Get(weights, k));
    const int64_t row = k / top_k;
    ForEachBlock(width, [&](int64_t i, int64_t count) {
      Store<T>(weight * Load(dy + row * width + i, count), count,
               dz + k * width + i);
    });
  };
  ForEachRange(call, weights.elements(), RowGrain(width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t k = begin; k < end; ++k) of_choice(k);
               });
}

// dy[b, s, h], z[b, s, k, h] -> dweights[b, s, k].
template <typename T>
void CombineDw(const KernelCall& call) {
  const LocalTensor& dweights = call.results[0];
  const int64_t top_k = dweights.shape.back();
  const int64_t width = call.operands[0].shape.back();
  const T* const dy = call.operands[0].as<const T>();
  const T* const z = call.operands[1].as<const T>();
  const auto of_choice = [&](int64_t k) {
    const T* const a = dy + k / top_k * width;
    const T* const b = z + k * width;
    Put(dweights, k, Sum(width, [&](int64_t i) {
          return static_cast<double>(a[i]) * static_cast<double>(b[i]);
        }));
  };
  ForEachRange(call, dweights.elements(), RowGrain(width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t k = begin; k < end; ++k) of_choice(k);
               });
}

// ---- experts

// The matrices of the experts, one behind the other: the columns are the last
// dimension, the rows all between.
template <typename T>
struct Matrices {
  T* first = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;

  explicit Matrices(const LocalTensor& tensor)
      : first(tensor.as<T>()), columns(tensor.shape.back()) {
    rows = tensor.elements() / tensor.shape[0] / columns;
  }
  MatrixView<std::remove_const_t<T>> Of(int64_t expert) const {
    return {first + expert * rows * columns, columns, 1};
  }
};

// y = a b of each expert, where either may be transposed first.
template <typename T, bool kTransposedA, bool kTransposedB>
void OfExperts(const KernelCall& call) {
  const Matrices<const T> a(call.operands[0]);
  const Matrices<const T> b(call.operands[1]);
  const Matrices<T> y(call.results[0]);
  const int64_t depth = kTransposedA ? a.rows : a.columns;
  for (int64_t e = 0; e < call.results[0].shape[0]; ++e) {
    Gemm(y.rows, y.columns, depth,
         kTransposedA ? a.Of(e).Transposed() : a.Of(e),
         kTransposedB ? b.Of(e).Transposed() : b.Of(e),
         static_cast<const T*>(nullptr), call.accumulate,
         y.first + e * y.rows * y.columns, call.threads);
  }
}

// x[e, b, s, i], w[e, o, i] -> y[e, b, s, o].
template <typename T>
constexpr auto ExpertLinear = OfExperts<T, false, true>;
// dy, w -> dx.
template <typename T>
constexpr auto ExpertLinearDx = OfExperts<T, false, false>;
// dy, x -> dw.
template <typename T>
constexpr auto ExpertLinearDw = OfExperts<T, true, false>;

}  // namespace

std::vector<Kernel> CpuMoeKernels() {
  return {
      {"moe_gate", Gate},
      {"moe_gate_dx", GateDx},
      {"moe_balance", Balance, true},
      {"moe_balance_dx", BalanceDx},
      {"moe_dispatch", ByDType<ToSlots<float, false>, ToSlots<double, false>>},
      {"moe_dispatch_dx",
       ByDType<FromSlots<float, false>, FromSlots<double, false>>},
      {"moe_collect", ByDType<FromSlots<float, true>, FromSlots<double, true>>},
      {"moe_collect_dx", ByDType<ToSlots<float, true>, ToSlots<double, true>>},
      {"moe_combine", ByDType<Combine<float>, Combine<double>>},
      {"moe_combine_dx", ByDType<CombineDx<float>, CombineDx<double>>},
      {"moe_combine_dw", ByDType<CombineDw<float>, CombineDw<double>>},
      {"expert_linear", ByDType<ExpertLinear<float>, ExpertLinear<double>>,
       true},
      {"expert_linear_dx",
       ByDType<ExpertLinearDx<float>, ExpertLinearDx<double>>, true},
      {"expert_linear_dw",
       ByDType<ExpertLinearDw<float>, ExpertLinearDw<double>>, true},
  };
}

}  // namespace tessera
