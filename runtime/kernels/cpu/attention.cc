// Grouped-query attention in tiles of queries by keys, with the running
// softmax of Dao et al. 2022: memory is a few tiles, and a tile that no query
// sees is never computed. What a query sees is decided by positions, so keys
// may come in any order.

#include <cmath>
#include <limits>

#include "planner/base/divide.h"
#include "runtime/kernels/alibi.h"
#include "runtime/kernels/attributes.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/kernels/relative_bias.h"

namespace tessera {
namespace {

// A tile of scores (16 KiB in fp32) lies in the first two caches beside its
// queries and keys.
constexpr int64_t kTileQueries = 64;
constexpr int64_t kTileKeys = 64;

// A tile's rows are aligned and of fixed length; see vector.h.
template <typename T>
using TileRow = Eigen::Map<Eigen::Array<T, kTileKeys, 1>, Eigen::AlignedMax>;

// One head's rows of q, k, v and their kin: every `stride`-th run of elements.
template <typename T>
using HeadMap = Eigen::Map<Matrix<T>, 0, Eigen::OuterStride<>>;
template <typename T>
using ConstHeadMap = Eigen::Map<const Matrix<T>, 0, Eigen::OuterStride<>>;

// Extents of "bsgrd,btgd,btge,bs,bt->bsgre,bsgr" and what the attributes say.
struct Problem {
  int64_t b, s, g, r, d, t, e;
  double scale;
  int64_t window;
  bool causal;
  std::vector<double> slopes;  // of ALiBi, by head; empty: none

  Problem(const KernelCall& call, const LocalTensor& q, const LocalTensor& k,
          const LocalTensor& v)
      : b(q.shape[0]),
        s(q.shape[1]),
        g(q.shape[2]),
        r(q.shape[3]),
        d(q.shape[4]),
        t(k.shape[1]),
        e(v.shape[3]),
        scale(call.attribute("scale")),
        window(static_cast<int64_t>(AttributeOr(call, "window", 0))),
        causal(AttributeOr(call, "causal", 1) != 0),
        slopes(AlibiSlopes(call, q)) {}

  // Rows of keys [first, first + count) of sample `sample`, group `group`.
  template <typename Map, typename Pointer>
  Map Keys(Pointer data, int64_t width, int64_t sample, int64_t group,
           int64_t first, int64_t count) const {
    return Map(data + ((sample * t + first) * g + group) * width, count, width,
               Eigen::OuterStride<>(g * width));
  }
  // Index of (sample, query, group, r) in lse.
  int64_t Row(int64_t sample, int64_t query, int64_t group,
              int64_t head) const {
    return ((sample * s + query) * g + group) * r + head;
  }
  // Rows of queries [first, first + count) of one head.
  template <typename Map, typename Pointer>
  Map Queries(Pointer data, int64_t width, int64_t sample, int64_t group,
              int64_t head, int64_t first, int64_t count) const {
    return Map(data + Row(sample, first, group, head) * width, count, width,
               Eigen::OuterStride<>(g * r * width));
  }
};

// A run of at most kTileKeys keys and their positions. Behind the last key
// stand positions that no query sees.
struct KeyTile {
  int64_t first = 0;
  int64_t count = 0;
  int32_t lowest = 0;
  int32_t highest = 0;
  alignas(64) int32_t positions[kTileKeys];
};

std::vector<KeyTile> KeyTiles(const int32_t* positions, int64_t keys) {
  std::vector<KeyTile> tiles(DivideUp(keys, kTileKeys));
  int64_t first = 0;
  for (KeyTile& tile : tiles) {
    tile.first = first;
    tile.count = std::min(kTileKeys, keys - first);
    const int32_t* const begin = positions + first;
    const int32_t* const end = begin + tile.count;
    tile.lowest = *std::min_element(begin, end);
    tile.highest = *std::max_element(begin, end);
    std::fill(std::begin(tile.positions), std::end(tile.positions),
              std::numeric_limits<int32_t>::max());
    std::copy(begin, end, tile.positions);
    first += tile.count;
  }
  return tiles;
}

// A query at `position` sees the positions in (after, upto].
struct Sight {
  int32_t position;
  int32_t after;
  int32_t upto;
};

// Where there is no causal mask, no query sees negative positions.
Sight SightOf(const Problem& p, int32_t position) {
  const int64_t lowest = p.causal ? std::numeric_limits<int32_t>::min() : -1;
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - 1;
  const int64_t window = p.window;
  const int64_t after =
      window > 0 ? std::max(lowest, position - window) : lowest;
  const int64_t upto = p.causal     ? position
                       : window > 0 ? std::min(kHighest, position + window - 1)
                                    : kHighest;
  return {position, static_cast<int32_t>(after), static_cast<int32_t>(upto)};
}

// The part of a tile that a run of queries sees.
enum class Seen { kNothing, kSome, kAll };

Seen SeenOf(const std::vector<Sight>& sights, const KeyTile& tile) {
  bool all = tile.count == kTileKeys;
  bool some = false;
  for (const Sight& sight : sights) {
    all = all && tile.highest <= sight.upto && tile.lowest > sight.after;
    some = some || (tile.lowest <= sight.upto && tile.highest > sight.after);
  }
  return all ? Seen::kAll : some ? Seen::kSome : Seen::kNothing;
}

// Writes `value` over the keys that the query does not see.
template <typename T>
void Mask(const Sight& sight, const KeyTile& tile, T value, T* row) {
  for (int64_t j = 0; j < kTileKeys; ++j) {
    const bool seen =
        (tile.positions[j] <= sight.upto) & (tile.positions[j] > sight.after);
    row[j] = seen ? row[j] : value;
  }
}

// T5's biases, (buckets, g, r); none where `table` is null.
template <typename T>
struct RelativeBias {
  const T* table = nullptr;
  RelativeBuckets buckets;

  RelativeBias(const KernelCall& call, const LocalTensor* table_in) {
    if (table_in == nullptr) return;
    table = table_in->as<const T>();
    buckets = RelativeBucketsOf(call, table_in->shape[0]);
  }
};

// Adds the biases of one query, ALiBi's or T5's, to its scores.
template <typename T>
void AddBias(const Problem& p, const RelativeBias<T>& bias, int64_t group,
             int64_t head, int32_t position, const KeyTile& tile, T* row) {
  if (bias.table != nullptr) {
    const T* const of_head = bias.table + group * p.r + head;
    for (int64_t j = 0; j < tile.count; ++j) {
      row[j] +=
          of_head[bias.buckets.Of(position, tile.positions[j]) * p.g * p.r];
    }
  }
  if (p.slopes.empty()) return;
  const T slope = static_cast<T>(p.slopes[group * p.r + head]);
  for (int64_t j = 0; j < tile.count; ++j) {
    row[j] +=
        slope * (static_cast<T>(tile.positions[j]) - static_cast<T>(position));
  }
}

// Calls group(sample, group) for all of them, on the threads of the call: they
// share no key, no value and no query.
template <typename F>
void ForEachGroup(const KernelCall& call, const Problem& p, F f) {
  const int64_t tiles = DivideUp(p.s, kTileQueries);
  ForEachRange(call, p.b * p.g, tiles * p.r > 1 ? 1 : p.b * p.g,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) f(i / p.g, i % p.g);
               });
}

// Calls tile(head, first query, sights of the queries) for every tile of a
// group's queries.
template <typename F>
void ForEachQueryTile(const Problem& p, const int32_t* positions, F tile) {
  std::vector<Sight> sights;
  for (int64_t first = 0; first < p.s; first += kTileQueries) {
    sights.clear();
    for (int64_t i = first; i < std::min(first + kTileQueries, p.s); ++i) {
      sights.push_back(SightOf(p, positions[i]));
    }
    for (int64_t head = 0; head < p.r; ++head) tile(head, first, sights);
  }
}

// q, k, v, query positions, key positions [, biases] -> o, lse. A query that
// sees no key gives zeros and the log-sum-exp -infinity. A call that
// accumulates begins with what o and lse hold, as one more tile of keys.
template <typename T>
void Attention(const KernelCall& call) {
  const Problem p(call, call.operands[0], call.operands[1], call.operands[2]);
  const T* const q = call.operands[0].as<const T>();
  const T* const k = call.operands[1].as<const T>();
  const T* const v = call.operands[2].as<const T>();
  const auto* const query_positions = call.operands[3].as<const int32_t>();
  const auto* const key_positions = call.operands[4].as<const int32_t>();
  const RelativeBias<T> bias(
      call, call.operands.size() > 5 ? &call.operands[5] : nullptr);
  T* const o = call.results[0].as<T>();
  constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

  ForEachGroup(call, p, [&](int64_t sample, int64_t group) {
    Matrix<T> scores(kTileQueries, kTileKeys);
    Matrix<T> output(kTileQueries, p.e);
    T maximum[kTileQueries];
    T sum[kTileQueries];
    const std::vector<KeyTile> tiles =
        KeyTiles(key_positions + sample * p.t, p.t);
    ForEachQueryTile(
        p, query_positions + sample * p.s,
        [&](int64_t head, int64_t first, const std::vector<Sight>& sights) {
          const auto rows = static_cast<int64_t>(sights.size());
          const auto queries = p.Queries<ConstHeadMap<T>>(q, p.d, sample, group,
                                                          head, first, rows);
          output.setZero();
          std::fill_n(maximum, rows, kMinusInfinity);
          std::fill_n(sum, rows, T{0});
          auto results =
              p.Queries<HeadMap<T>>(o, p.e, sample, group, head, first, rows);
          for (int64_t i = 0; call.accumulate && i < rows; ++i) {
            const double lse =
                Get(call.results[1], p.Row(sample, first + i, group, head));
            if (std::isinf(lse)) continue;
            output.row(i) = results.row(i);
            maximum[i] = static_cast<T>(lse);
            sum[i] = 1;
          }
          for (const KeyTile& tile : tiles) {
            const Seen seen = SeenOf(sights, tile);
            if (seen == Seen::kNothing) continue;
            auto part = scores.topLeftCorner(rows, tile.count);
            part.noalias() = static_cast<T>(p.scale) * queries *
                             p.Keys<ConstHeadMap<T>>(k, p.d, sample, group,
                                                     tile.first, tile.count)
                                 .transpose();
            for (int64_t i = 0; i < rows; ++i) {
              T* const data = scores.row(i).data();
              TileRow<T> row(data);
              AddBias(p, bias, group, head, sights[i].position, tile, data);
              if (seen == Seen::kSome) {
                Mask(sights[i], tile, kMinusInfinity, data);
              }
              const T larger = std::max(maximum[i], row.maxCoeff());
              const T shift = larger == kMinusInfinity ? T{0} : larger;
              row = (row - shift).exp();
              // Eigen's exp(-infinity) is tiny, not zero, in fp64.
              if (seen == Seen::kSome) Mask(sights[i], tile, T{0}, data);
              const T fade = std::exp(maximum[i] - shift);
              sum[i] = sum[i] * fade + row.sum();
              output.row(i) *= fade;
              maximum[i] = larger;
            }
            output.topRows(rows).noalias() +=
                part * p.Keys<ConstHeadMap<T>>(v, p.e, sample, group,
                                               tile.first, tile.count);
          }
          for (int64_t i = 0; i < rows; ++i) {
            const bool blind = sum[i] == 0;
            results.row(i) = output.row(i) * (blind ? T{0} : 1 / sum[i]);
            Put(call.results[1], p.Row(sample, first + i, group, head),
                blind ? kMinusInfinity : maximum[i] + std::log(sum[i]));
          }
        });
  });
}

// What backward makes of a run of queries and a tile of keys of one head.
template <typename T>
struct GradientTile {
  int64_t sample, group, head;
  int64_t first;  // query
  const std::vector<Sight>& sights;
  const KeyTile& tile;
  const Matrix<T>& weights;  // P, in rows of kTileKeys
  const Matrix<T>& slopes;   // dS

  int64_t rows() const { return static_cast<int64_t>(sights.size()); }
};

// do, q, k, v, query positions, key positions [, biases], o, lse.
template <typename T>
struct GradientOperands {
  const T* output_gradient;
  const T* q;
  const T* k;
  const T* v;
  const int32_t* query_positions;
  const int32_t* key_positions;
  RelativeBias<T> bias;
  const T* o;
  LocalTensor lse;

  explicit GradientOperands(const KernelCall& call)
      : output_gradient(call.operands[0].as<const T>()),
        q(call.operands[1].as<const T>()),
        k(call.operands[2].as<const T>()),
        v(call.operands[3].as<const T>()),
        query_positions(call.operands[4].as<const int32_t>()),
        key_positions(call.operands[5].as<const int32_t>()),
        bias(call, call.operands.size() > 8 ? &call.operands[6] : nullptr),
        o(call.operands[call.operands.size() - 2].as<const T>()),
        lse(call.operands[call.operands.size() - 1]) {}
};

// Calls f(GradientTile) for all tiles of a group that are seen, with
// P = exp(scale q k^T + bias - lse) and, with dP = do v^T,
// dS = P (dP - rowsum(do o)).
template <typename T, typename F>
void ForEachGradientTile(const Problem& p, const GradientOperands<T>& in,
                         int64_t sample, int64_t group, F f) {
  const T scale = static_cast<T>(p.scale);
  Matrix<T> scores(kTileQueries, kTileKeys);
  Matrix<T> gradients(kTileQueries, kTileKeys);
  // Padding of the tiles is computed and never used: keep it finite.
  gradients.setZero();
  T lse[kTileQueries];
  T dot[kTileQueries];
  const std::vector<KeyTile> tiles =
      KeyTiles(in.key_positions + sample * p.t, p.t);
  ForEachQueryTile(
      p, in.query_positions + sample * p.s,
      [&](int64_t head, int64_t first, const std::vector<Sight>& sights) {
        const auto rows = static_cast<int64_t>(sights.size());
        const auto queries = p.Queries<ConstHeadMap<T>>(
            in.q, p.d, sample, group, head, first, rows);
        const auto dy = p.Queries<ConstHeadMap<T>>(
            in.output_gradient, p.e, sample, group, head, first, rows);
        const auto y = p.Queries<ConstHeadMap<T>>(in.o, p.e, sample, group,
                                                  head, first, rows);
        for (int64_t i = 0; i < rows; ++i) {
          const double logarithm =
              Get(in.lse, p.Row(sample, first + i, group, head));
          lse[i] = std::isinf(logarithm) ? T{0} : static_cast<T>(logarithm);
          const T* const a = dy.row(i).data();
          const T* const c = y.row(i).data();
          dot[i] = static_cast<T>(
              Sum(p.e, [a, c](int64_t j) { return a[j] * c[j]; }));
        }
        for (const KeyTile& tile : tiles) {
          const Seen seen = SeenOf(sights, tile);
          if (seen == Seen::kNothing) continue;
          const auto keys = p.Keys<ConstHeadMap<T>>(in.k, p.d, sample, group,
                                                    tile.first, tile.count);
          const auto values = p.Keys<ConstHeadMap<T>>(in.v, p.e, sample, group,
                                                      tile.first, tile.count);
          auto part = scores.topLeftCorner(rows, tile.count);
          auto gradient = gradients.topLeftCorner(rows, tile.count);
          part.noalias() = scale * queries * keys.transpose();
          gradient.noalias() = dy * values.transpose();
          for (int64_t i = 0; i < rows; ++i) {
            T* const data = scores.row(i).data();
            TileRow<T> row(data);
            AddBias(p, in.bias, group, head, sights[i].position, tile, data);
            // Masked scores may exceed the log-sum-exp without bound.
            if (seen == Seen::kSome) Mask(sights[i], tile, lse[i], data);
            row = (row - lse[i]).exp();
            if (seen == Seen::kSome) Mask(sights[i], tile, T{0}, data);
            TileRow<T> gradient_row(gradients.row(i).data());
            gradient_row = row * (gradient_row - dot[i]);
          }
          f(GradientTile<T>{sample, group, head, first, sights, tile, scores,
                            gradients});
        }
      });
}

// -> dq, dk, dv: dv = P^T do, dq = scale dS k, dk = scale dS^T q.
template <typename T>
void AttentionDqkv(const KernelCall& call) {
  const Problem p(call, call.operands[1], call.operands[2], call.operands[3]);
  const GradientOperands<T> in(call);
  const T scale = static_cast<T>(p.scale);
  if (!call.accumulate) {
    for (const LocalTensor& result : call.results) {
      std::fill_n(result.as<T>(), result.elements(), T{0});
    }
  }
  ForEachGroup(call, p, [&](int64_t sample, int64_t group) {
    ForEachGradientTile(p, in, sample, group, [&](const GradientTile<T>& at) {
      const KeyTile& tile = at.tile;
      const auto queries = [&](const T* data, int64_t width) {
        return p.Queries<ConstHeadMap<T>>(data, width, sample, group, at.head,
                                          at.first, at.rows());
      };
      auto dq = p.Queries<HeadMap<T>>(call.results[0].as<T>(), p.d, sample,
                                      group, at.head, at.first, at.rows());
      auto dk = p.Keys<HeadMap<T>>(call.results[1].as<T>(), p.d, sample, group,
                                   tile.first, tile.count);
      auto dv = p.Keys<HeadMap<T>>(call.results[2].as<T>(), p.e, sample, group,
                                   tile.first, tile.count);
      const auto weights = at.weights.topLeftCorner(at.rows(), tile.count);
      const auto slopes = at.slopes.topLeftCorner(at.rows(), tile.count);
      dv.noalias() += weights.transpose() * queries(in.output_gradient, p.e);
      dq.noalias() += scale * slopes *
                      p.Keys<ConstHeadMap<T>>(in.k, p.d, sample, group,
                                              tile.first, tile.count);
      dk.noalias() += scale * slopes.transpose() * queries(in.q, p.d);
    });
  });
}

// -> dbias: of each bucket and head the sum of dS, in double. A group's heads
// are of one thread, which takes the samples in order.
template <typename T>
void AttentionDbias(const KernelCall& call) {
  const Problem p(call, call.operands[1], call.operands[2], call.operands[3]);
  const GradientOperands<T> in(call);
  const LocalTensor& result = call.results[0];
  const int64_t heads = p.g * p.r;
  ForEachRange(call, p.g, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      std::vector<double> sums(static_cast<size_t>(result.shape[0] * p.r));
      for (int64_t sample = 0; sample < p.b; ++sample) {
        ForEachGradientTile(
            p, in, sample, group, [&](const GradientTile<T>& at) {
              for (int64_t i = 0; i < at.rows(); ++i) {
                for (int64_t j = 0; j < at.tile.count; ++j) {
                  const int64_t bucket = in.bias.buckets.Of(
                      at.sights[i].position, at.tile.positions[j]);
                  sums[static_cast<size_t>(bucket * p.r + at.head)] +=
                      at.slopes(i, j);
                }
              }
            });
      }
      for (int64_t i = 0; i < std::ssize(sums); ++i) {
        PutOrAdd(call, result, i / p.r * heads + group * p.r + i % p.r,
                 sums[static_cast<size_t>(i)]);
      }
    }
  });
}

}  // namespace

std::vector<Kernel> CpuAttentionKernels() {
  return {
      {"attention", ByDType<Attention<float>, Attention<double>>, true},
      {"attention_dqkv", ByDType<AttentionDqkv<float>, AttentionDqkv<double>>,
       true},
      {"attention_alibi", ByDType<Attention<float>, Attention<double>>, true},
      {"attention_alibi_dqkv",
       ByDType<AttentionDqkv<float>, AttentionDqkv<double>>, true},
      {"attention_bidirectional", ByDType<Attention<float>, Attention<double>>,
       true},
      {"attention_bidirectional_dqkv",
       ByDType<AttentionDqkv<float>, AttentionDqkv<double>>, true},
      {"attention_relative", ByDType<Attention<float>, Attention<double>>,
       true},
      {"attention_relative_dqkv",
       ByDType<AttentionDqkv<float>, AttentionDqkv<double>>, true},
      {"attention_relative_dbias",
       ByDType<AttentionDbias<float>, AttentionDbias<double>>, true},
  };
}

}  // namespace tessera
