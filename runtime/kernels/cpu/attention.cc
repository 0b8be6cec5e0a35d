// Causal grouped-query attention in tiles of queries by keys, with the running
// softmax of Dao et al. 2022: memory is a few tiles, and a tile that no query
// sees is never computed. What a query sees is decided by positions, so keys
// may come in any order.

#include <cmath>
#include <limits>

#include "runtime/kernels/alibi.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

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

// Extents of "bsgrd,btgd,btge,bs,bt->bsgre,bsgr" and the two attributes.
struct Problem {
  int64_t b, s, g, r, d, t, e;
  double scale;
  int64_t window;
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
        window(static_cast<int64_t>(call.attribute("window"))),
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
  std::vector<KeyTile> tiles((keys + kTileKeys - 1) / kTileKeys);
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

// A query sees the positions in (after, upto].
struct Sight {
  int32_t after;
  int32_t upto;
};

Sight SightOf(int32_t position, int64_t window) {
  constexpr int64_t kLowest = std::numeric_limits<int32_t>::min();
  return {static_cast<int32_t>(window > 0 ? std::max(kLowest, position - window)
                                          : kLowest),
          position};
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

// Adds ALiBi's biases of one query to its scores.
template <typename T>
void AddBias(const Problem& p, int64_t group, int64_t head, int32_t position,
             const KeyTile& tile, T* row) {
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
  const int64_t tiles = (p.s + kTileQueries - 1) / kTileQueries;
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
      sights.push_back(SightOf(positions[i], p.window));
    }
    for (int64_t head = 0; head < p.r; ++head) tile(head, first, sights);
  }
}

// q, k, v, query positions, key positions -> o, lse. A query that sees no key
// gives zeros and the log-sum-exp -infinity. A call that accumulates begins
// with what o and lse hold, as one more tile of keys.
template <typename T>
void Attention(const KernelCall& call) {
  const Problem p(call, call.operands[0], call.operands[1], call.operands[2]);
  const T* const q = call.operands[0].as<const T>();
  const T* const k = call.operands[1].as<const T>();
  const T* const v = call.operands[2].as<const T>();
  const auto* const query_positions = call.operands[3].as<const int32_t>();
  const auto* const key_positions = call.operands[4].as<const int32_t>();
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
              AddBias(p, group, head, sights[i].upto, tile, data);
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

// do, q, k, v, query positions, key positions, o, lse -> dq, dk, dv. With
// P = exp(scale q k^T - lse): dv = P^T do, and with dP = do v^T and
// dS = P (dP - rowsum(do o)): dq = scale dS k, dk = scale dS^T q.
template <typename T>
void AttentionDqkv(const KernelCall& call) {
  const Problem p(call, call.operands[1], call.operands[2], call.operands[3]);
  const T* const output_gradient = call.operands[0].as<const T>();
  const T* const q = call.operands[1].as<const T>();
  const T* const k = call.operands[2].as<const T>();
  const T* const v = call.operands[3].as<const T>();
  const auto* const query_positions = call.operands[4].as<const int32_t>();
  const auto* const key_positions = call.operands[5].as<const int32_t>();
  const T* const o = call.operands[6].as<const T>();
  const T scale = static_cast<T>(p.scale);
  if (!call.accumulate) {
    for (const LocalTensor& result : call.results) {
      std::fill_n(result.as<T>(), result.elements(), T{0});
    }
  }

  ForEachGroup(call, p, [&](int64_t sample, int64_t group) {
    Matrix<T> scores(kTileQueries, kTileKeys);
    Matrix<T> gradients(kTileQueries, kTileKeys);
    // Padding of the tiles is computed and never used: keep it finite.
    gradients.setZero();
    T lse[kTileQueries];
    T dot[kTileQueries];
    const std::vector<KeyTile> tiles =
        KeyTiles(key_positions + sample * p.t, p.t);
    ForEachQueryTile(
        p, query_positions + sample * p.s,
        [&](int64_t head, int64_t first, const std::vector<Sight>& sights) {
          const auto rows = static_cast<int64_t>(sights.size());
          const auto queries = p.Queries<ConstHeadMap<T>>(q, p.d, sample, group,
                                                          head, first, rows);
          const auto dy = p.Queries<ConstHeadMap<T>>(
              output_gradient, p.e, sample, group, head, first, rows);
          const auto y = p.Queries<ConstHeadMap<T>>(o, p.e, sample, group, head,
                                                    first, rows);
          auto dq = p.Queries<HeadMap<T>>(call.results[0].as<T>(), p.d, sample,
                                          group, head, first, rows);
          for (int64_t i = 0; i < rows; ++i) {
            const double logarithm =
                Get(call.operands[7], p.Row(sample, first + i, group, head));
            lse[i] = std::isinf(logarithm) ? T{0} : static_cast<T>(logarithm);
            const T* const a = dy.row(i).data();
            const T* const c = y.row(i).data();
            dot[i] = static_cast<T>(
                Sum(p.e, [a, c](int64_t j) { return a[j] * c[j]; }));
          }
          for (const KeyTile& tile : tiles) {
            const Seen seen = SeenOf(sights, tile);
            if (seen == Seen::kNothing) continue;
            const auto keys = p.Keys<ConstHeadMap<T>>(k, p.d, sample, group,
                                                      tile.first, tile.count);
            const auto values = p.Keys<ConstHeadMap<T>>(v, p.e, sample, group,
                                                        tile.first, tile.count);
            auto dk = p.Keys<HeadMap<T>>(call.results[1].as<T>(), p.d, sample,
                                         group, tile.first, tile.count);
            auto dv = p.Keys<HeadMap<T>>(call.results[2].as<T>(), p.e, sample,
                                         group, tile.first, tile.count);
            auto part = scores.topLeftCorner(rows, tile.count);
            auto gradient = gradients.topLeftCorner(rows, tile.count);
            part.noalias() = scale * queries * keys.transpose();
            gradient.noalias() = dy * values.transpose();
            for (int64_t i = 0; i < rows; ++i) {
              T* const data = scores.row(i).data();
              TileRow<T> row(data);
              AddBias(p, group, head, sights[i].upto, tile, data);
              // Masked scores may exceed the log-sum-exp without bound.
              if (seen == Seen::kSome) Mask(sights[i], tile, lse[i], data);
              row = (row - lse[i]).exp();
              if (seen == Seen::kSome) Mask(sights[i], tile, T{0}, data);
            }
            dv.noalias() += part.transpose() * dy;
            for (int64_t i = 0; i < rows; ++i) {
              const TileRow<T> row(scores.row(i).data());
              TileRow<T> gradient_row(gradients.row(i).data());
              gradient_row = row * (gradient_row - dot[i]);
            }
            dq.noalias() += scale * gradient * keys;
            dk.noalias() += scale * gradient.transpose() * queries;
          }
        });
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
  };
}

}  // namespace tessera
