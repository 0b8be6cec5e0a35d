// Gives the data axes a root that computes the loss and steps for all, or takes
// it away. Only of plans that run the whole batch at once in one group, as the
// users of a root have it. Symmetric: there is one such plan to go to, and back
// is the same.

#include "planner/plan/rooted.h"

#include "planner/search/move.h"

namespace tessera {
namespace {

// The axes that split samples and nothing else.
AxisSet DataAxes(const GraphIndex& index, const Plan& plan) {
  AxisSet samples = 0;
  AxisSet others = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const int sample = index.SampleFactor(NodeId(i));
    for (int f = 0; f < kMaxFactors; ++f) {
      (f == sample ? samples : others) |=
          plan.ops[i].axes[static_cast<size_t>(f)];
    }
  }
  return samples & ~others;
}

std::optional<Plan> WithRoot(const GraphIndex& index, Plan plan) {
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.zero_stage > 0) return std::nullopt;
  }
  const AxisSet data = DataAxes(index, plan);
  if (data == 0) return std::nullopt;
  SetRooted(index, {data}, plan);
  return plan;
}

std::optional<double> Edit(Draft& draft, Rng&) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  if (plan.groups.size() > 1 || plan.microbatches > 1) return std::nullopt;
  const bool has_root = UsesRoot(plan);
  const auto toggled = [&](const Plan& from, bool root) {
    return root ? std::optional(WithoutRoot(space.index, from))
                : WithRoot(space.index, from);
  };
  auto candidate = toggled(plan, has_root);
  if (!candidate.has_value() || toggled(*candidate, !has_root) != plan) {
    return std::nullopt;
  }
  draft.Replace(*std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kRooted;
const Move kRooted = {
    "rooted", "a root that computes the loss and steps for all, or none", 1,
    Edit};

}  // namespace tessera
