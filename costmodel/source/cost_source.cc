#include "costmodel/source/cost_source.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/sequence_order.h"

namespace tessera {
namespace {

// Of the rows of a collective from `row` on, which end at `end`, the least
// time: what disturbs a measurement makes it longer, and no payload takes
// longer than a larger one has to.
double LeastFrom(ProfileDb::Iterator row, ProfileDb::Iterator end) {
  double least = row->second.median_s;
  for (; row != end; ++row) least = std::min(least, row->second.median_s);
  return least;
}

std::optional<Cost> Measured(const CostQuery& query, const ProfileDb* profile) {
  if (profile == nullptr) return std::nullopt;
  const auto found = profile->rows.find(query.key);
  if (found == profile->rows.end()) return std::nullopt;
  const double seconds =
      query.collective
          ? LeastFrom(found, profile->CollectiveRows(query.key).second)
          : found->second.median_s;
  return Cost{seconds * query.share_of_measured, CostSource::kMeasured};
}

// How far beyond the measured sizes a kernel's time is still believed: a
// choice, fitted to nothing.
constexpr double kReach = 4;

// Rows whose work differs by less say more about the noise of measuring than
// about the slope between them; they count as one, their mean.
constexpr double kAlike = 1.1;

struct Point {
  double work = 0;
  double seconds = 0;
};

// Sorted by work; rows of like work become one, their mean.
void Normalise(std::vector<Point>& points) {
  std::ranges::sort(
      points, {}, [](const Point& p) { return std::pair(p.work, p.seconds); });
  size_t kept = 0;
  for (size_t i = 0; i < points.size();) {
    const double most = points[i].work * kAlike;
    Point sum;
    double count = 0;
    for (; i < points.size() && points[i].work <= most; ++i, ++count) {
      sum.work += points[i].work;
      sum.seconds += points[i].seconds;
    }
    points[kept++] = {sum.work / count, sum.seconds / count};
  }
  points.resize(kept);
}

// The two points that lie around `work`, or the two at the end it is beyond.
size_t SegmentOf(const std::vector<Point>& points, double work) {
  size_t right = 1;
  while (right + 1 < points.size() && points[right].work < work) ++right;
  return right;
}

double Outer(double slope) {
  return std::clamp(slope, 0.0, 1.0);
}

// Of the rows of the key's rule those that differ from it in one extent alone,
// of which most do (of several the first).
std::vector<Point> AlongOneFactor(const ProfileKey& key,
                                  const ProfileDb& profile) {
  std::vector<std::vector<Point>> along(key.extents.size());
  const auto [begin, end] = profile.Family(key);
  for (auto row = begin; row != end; ++row) {
    if (row->first.rule != key.rule) continue;
    const std::vector<int64_t>& extents = row->first.extents;
    size_t different = 0;
    size_t factor = 0;
    for (size_t f = 0; f < extents.size(); ++f) {
      if (extents[f] == key.extents[f]) continue;
      ++different;
      factor = f;
    }
    const auto work = WorkOf(row->first);
    if (different != 1 || !work || !(*work > 0)) continue;
    along[factor].push_back({*work, row->second.median_s});
  }
  const auto most = std::ranges::max_element(
      along, {},
      [](const std::vector<Point>& points) { return points.size(); });
  return most == along.end() ? std::vector<Point>() : std::move(*most);
}

// What a profile has of a kernel, by its work.
struct KernelRows {
  double work = 0;            // of the query
  std::vector<Point> points;  // normalised, at least one
  bool own = false;           // an operator of the user's own

  // The work nearest to the query's that the rows still tell of.
  double Within() const {
    return own ? work
               : std::clamp(work, points.front().work / kReach,
                            points.back().work * kReach);
  }
};

// Nothing where it has no row of the kernel.
std::optional<KernelRows> RowsOfKernel(const CostQuery& query,
                                       const ProfileDb& profile) {
  const auto work = WorkOf(query.key);
  if (!work || !(*work > 0)) return std::nullopt;
  std::vector<Point> same_rule;
  std::vector<Point> any_rule;
  const auto [begin, end] = profile.Family(query.key);
  for (auto row = begin; row != end; ++row) {
    const auto row_work = WorkOf(row->first);
    if (!row_work || !(*row_work > 0)) continue;
    any_rule.push_back({*row_work, row->second.median_s});
    if (row->first.rule == query.key.rule) same_rule.push_back(any_rule.back());
  }
  std::vector<Point>& points = same_rule.empty() ? any_rule : same_rule;
  if (points.empty()) return std::nullopt;
  const OpDef* op = OperatorOf(query.key.name);
  const bool own = op != nullptr && OwnOpOf(*op) != nullptr;
  if (own) {
    std::vector<Point> along = AlongOneFactor(query.key, profile);
    if (!along.empty()) points = std::move(along);
  }
  Normalise(points);
  return KernelRows{*work, std::move(points), own};
}

// Straight lines through the logarithms.
double AlongRows(const std::vector<Point>& points, double work) {
  if (points.size() == 1) return points[0].seconds * work / points[0].work;
  const size_t right = SegmentOf(points, work);
  const Point& a = points[right - 1];
  const Point& b = points[right];
  double slope = std::log(b.seconds / a.seconds) / std::log(b.work / a.work);
  // Beyond the ends time grows with the work, and at most as fast.
  if (work > b.work) return b.seconds * std::pow(work / b.work, Outer(slope));
  if (work < a.work) slope = Outer(slope);
  return a.seconds * std::pow(work / a.work, slope);
}

std::optional<double> InterpolateKernel(const CostQuery& query,
                                        const ProfileDb& profile) {
  const auto rows = RowsOfKernel(query, profile);
  if (!rows || rows->Within() != rows->work) return std::nullopt;
  return AlongRows(rows->points, rows->work);
}

std::optional<double> InterpolateCollective(const CostQuery& query,
                                            const ProfileDb& profile) {
  const auto payload = static_cast<double>(query.key.payload.value);
  std::vector<Point> points;
  const auto [begin, end] = profile.CollectiveRows(query.key);
  for (auto row = begin; row != end; ++row) {
    points.push_back(
        {static_cast<double>(row->first.payload.value), row->second.median_s});
  }
  if (points.empty()) return std::nullopt;
  // As LeastFrom.
  for (size_t i = points.size() - 1; i > 0; --i) {
    points[i - 1].seconds = std::min(points[i - 1].seconds, points[i].seconds);
  }
  if (payload <= points.front().work) return points.front().seconds;
  const Point& last = points.back();
  if (payload <= last.work) {
    const size_t right = SegmentOf(points, payload);
    const Point& a = points[right - 1];
    const Point& b = points[right];
    return a.seconds +
           (b.seconds - a.seconds) / (b.work - a.work) * (payload - a.work);
  }
  // Beyond the rows time grows as it last did, and at most in proportion.
  double slope = last.seconds / last.work;
  const auto below =
      std::find_if(points.rbegin(), points.rend(), [&](const Point& point) {
        return point.seconds < last.seconds && point.work * kAlike < last.work;
      });
  if (below != points.rend()) {
    slope = std::min(
        slope, (last.seconds - below->seconds) / (last.work - below->work));
  }
  return last.seconds + slope * (payload - last.work);
}

// A matrix product on a device with kernel times that has the type.
std::optional<double> ProductSeconds(const CostQuery& query) {
  const DeviceType& device = *query.device;
  if (!query.matmul || !HasKernelTimes(device)) return std::nullopt;
  MatmulMode mode = {.dtype = query.key.dtype, .products = query.products};
  // What a device does not have it computes in the next wider type.
  if (mode.products == ProductType::kFp4 && !(PeakOf(device, mode).value > 0)) {
    mode.products = ProductType::kFp8;
  }
  if (mode.products == ProductType::kFp8 && !(PeakOf(device, mode).value > 0)) {
    mode.products = ProductType::kAsValues;
  }
  if (!(PeakOf(device, mode).value > 0)) return std::nullopt;
  const double rounding = SecondsFor(
      query.rounding, device.memory_bandwidth * device.memory_efficiency);
  return query.matmul_share * (query.matmul_factor.value_or(1) *
                                   MatmulSeconds(device, *query.matmul, mode) +
                               rounding);
}

std::optional<Cost> Interpolated(const CostQuery& query,
                                 const ProfileDb* profile) {
  if (profile == nullptr) return std::nullopt;
  if (query.matmul_factor && query.factor_of_kernel) {
    if (const auto product = ProductSeconds(query)) {
      return Cost{*product, CostSource::kInterpolated};
    }
  }
  const auto seconds = query.collective ? InterpolateCollective(query, *profile)
                                        : InterpolateKernel(query, *profile);
  if (seconds) {
    return Cost{*seconds * query.share_of_measured, CostSource::kInterpolated};
  }
  if (!query.matmul_factor) return std::nullopt;
  const auto product = ProductSeconds(query);
  if (!product) return std::nullopt;
  return Cost{*product, CostSource::kInterpolated};
}

// Far from the rows the rate that they end with says more of the device than
// its stated figures: of a host's cores these are assumed. Where the model's
// kernels are fitted it is trusted more than rows of other caches and tiles.
std::optional<Cost> Extrapolated(const CostQuery& query,
                                 const ProfileDb* profile) {
  const DeviceType& device = *query.device;
  if (profile == nullptr || query.collective || HasKernelTimes(device)) {
    return std::nullopt;
  }
  const auto rows = RowsOfKernel(query, *profile);
  const double rate =
      query.op_class == OpClass::kMemory
          ? device.memory_bandwidth.value * device.memory_efficiency
          : device.Peak(query.key.dtype).value * device.compute_efficiency;
  if (!rows || !(rate > 0)) return std::nullopt;
  const auto roofline = [&](double work) {
    return work / rate + device.launch_overhead.seconds();
  };
  const double within = rows->Within();
  const double seconds =
      AlongRows(rows->points, within) * roofline(rows->work) / roofline(within);
  return Cost{seconds * query.share_of_measured, CostSource::kExtrapolated};
}

std::optional<Cost> Analytical(const CostQuery& query, const ProfileDb*) {
  if (query.collective) {
    return Cost{query.collective_seconds, CostSource::kAnalytical};
  }
  const DeviceType& device = *query.device;
  if (const auto product = ProductSeconds(query)) {
    return Cost{*product, CostSource::kAnalytical};
  }
  const FlopsPerSecond peak = device.Peak(query.key.dtype);
  if (query.attention && HasKernelTimes(device) && peak.value > 0) {
    if (query.score_passes > 0) {
      return Cost{
          UnfusedAttentionSeconds(device, *query.attention, query.key.dtype,
                                  query.score_passes, query.backward),
          CostSource::kAnalytical};
    }
    const AttentionKernel kernel =
        query.attention_kernel.value_or(DefaultAttention(device.generation));
    return Cost{AttentionSeconds(device, *query.attention, query.key.dtype,
                                 kernel, query.backward),
                CostSource::kAnalytical};
  }
  double seconds = SecondsFor(
      query.bytes, device.memory_bandwidth * device.memory_efficiency);
  // Only matrix products reach the matrix units' peak, and only they can be
  // bound by it; the others are bound by memory on every device of interest.
  if (query.op_class != OpClass::kMemory && peak.value > 0) {
    seconds = std::max(
        seconds, query.share *
                     SecondsFor(query.flops, peak * device.compute_efficiency));
  }
  return Cost{seconds + device.launch_overhead.seconds(),
              CostSource::kAnalytical};
}

}  // namespace

void SetWork(const OpDef& op, const Node* node, const OpCall& call,
             const Stack& stack, CostQuery& query) {
  query.flops = CallFlops(op, call);
  if (query.op_class == OpClass::kMatmul) query.matmul = MatmulShapeOf(call);
  if (query.op_class != OpClass::kAttention) return;
  query.attention = AttentionShapeOf(call);
  query.backward = IsAttentionBackward(op);
  const auto all = [&](char letter) { return Range{0, call.Extent(letter)}; };
  query.attention->pairs = static_cast<double>(
      SeenPairs(all(kSequenceFactor), all(kKeyFactor), MaskOf(*node)));
  if (stack.attention == StackAttention::kUnfused) {
    // Between the products forward has a softmax (2 passes) and dropout (2,
    // and a mask of one byte), backward their gradients: 2.5 and 3, as the
    // softmax's reads its result, too.
    query.score_passes = query.backward ? 5.5 : 4.5;
  }
  if (stack.attention == StackAttention::kFlash1) {
    query.attention_kernel = AttentionKernel::kFlash1;
  }
}

std::span<const CostSourceRow> CostSources() {
  static constexpr CostSourceRow kTable[] = {
      {"measured", "the profile's time of exactly this task", Measured},
      {"interpolated", "between the profile's times of other sizes",
       Interpolated},
      {"extrapolated", "by the rate of the profile's times, of far other sizes",
       Extrapolated},
      {"analytical",
       "kernels by tiles and waves or a roofline, collectives by protocol",
       Analytical},
  };
  return kTable;
}

Cost PriceOf(const CostQuery& query, const ProfileDb* profile) {
  for (const CostSourceRow& source : CostSources()) {
    if (const auto cost = source.price(query, profile)) return *cost;
  }
  TESSERA_CHECK(false) << "no cost source knows " << query.key.name;
  return {};
}

const OpDef* OperatorOf(std::string_view kernel) {
  const auto op = FindOp(kernel.substr(0, kernel.find_first_of(".+")));
  return op ? *op : nullptr;
}

std::optional<double> WorkOf(const ProfileKey& key) {
  const auto rule = IndexRule::Parse(key.rule);
  if (!rule || rule->factors.size() != key.extents.size()) return std::nullopt;
  const std::vector<DType> operands(rule->operands.size(), key.dtype);
  const std::vector<DType> results(rule->results.size(), key.dtype);
  const OpCall call = {.rule = &*rule,
                       .extents = key.extents,
                       .operand_dtypes = operands,
                       .result_dtypes = results,
                       .attributes = {}};
  if (key.name == "copy") {
    return static_cast<double>(OperandBytes(call).value);
  }
  const OpDef* op = OperatorOf(key.name);
  if (op == nullptr) return std::nullopt;
  if (op->op_class == OpClass::kMemory) {
    return static_cast<double>(CallBytes(*op, call).value);
  }
  const double flops = CallFlops(*op, call).value;
  return op->op_class == OpClass::kRoofline && flops == 0 ? call.Points()
                                                          : flops;
}

}  // namespace tessera
