#include "planner/search/explain.h"

#include <algorithm>
#include <array>
#include <map>

#include "planner/base/append.h"
#include "planner/plan/describe.h"
#include "planner/plan/recompute.h"
#include "planner/plan/strategy_groups.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/used_part.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/adapt.h"
#include "planner/search/idle_in_plan.h"
#include "planner/search/sweep.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

std::string Degree(std::string_view name, int degree) {
  return std::string(name) + " " + std::to_string(degree);
}

// `strategy` with each microbatch size, and a schedule for these.
std::vector<Strategy> Sized(const SearchSpace& space,
                            const Strategy& strategy) {
  std::vector<Strategy> all = WithSamples(space, strategy);
  for (Strategy& sized : all) sized = WithSchedule(space, std::move(sized));
  return all;
}

// `strategy`, or where its copies make up no whole ZeRO groups and more than
// one with these over all and, if copies lie there, within nodes.
std::vector<Strategy> WithZeroGroups(const SearchSpace& space,
                                     const Strategy& strategy) {
  const int copies = strategy.dp * strategy.ep * strategy.cp;
  const int group = strategy.zero_group;
  const bool fits = group > 0 && copies > group && copies % group == 0;
  if (group == 0 || fits) return {strategy};
  Strategy whole = strategy;
  whole.zero_group = 0;
  Strategy node = strategy;
  node.zero_group = Strategy::kWithinNode;
  if (WithoutIdleKeys(space, node).zero != strategy.zero) return {whole};
  if (group == Strategy::kWithinNode) return {node};
  return {whole, node};  // of equal ones the first
}

// `strategy` with every way to part a degree and dp, without keys that have no
// effect then.
std::vector<Strategy> Traded(const SearchSpace& space, Strategy strategy,
                             int Strategy::*degree) {
  std::vector<Strategy> all;
  const int product = strategy.dp * strategy.*degree;
  for (int d : Divisors(product)) {
    Strategy other = strategy;
    other.*degree = d;
    other.dp = product / d;
    if (other.cp != strategy.cp)
      other.zigzag = IsBalancedByZigzag(space, other);
    if (other.etp > 0 && other.tp % other.etp != 0) other.etp = 0;
    for (Strategy with : WithZeroGroups(space, other)) {
      all.push_back(WithoutIdleKeys(space, with));
      if (other.tp == 1 || other.sp) continue;
      with.sp = true;
      all.push_back(WithoutIdleKeys(space, with));
    }
  }
  return all;
}

template <int Strategy::*kDegree>
std::vector<Strategy> Trade(const SearchSpace& space, const Strategy& s) {
  return Traded(space, s, kDegree);
}

std::vector<Strategy> OtherExperts(const SearchSpace& space,
                                   const Strategy& s) {
  std::vector<Strategy> all;
  if (!space.index.has_experts) return all;
  for (const int etp : {0, 1}) {
    if (etp == s.tp) continue;
    Strategy other = s;
    other.etp = etp;
    const auto traded = Traded(space, other, &Strategy::ep);
    all.insert(all.end(), traded.begin(), traded.end());
  }
  return all;
}

std::vector<Strategy> OtherContext(const SearchSpace& space,
                                   const Strategy& s) {
  std::vector<Strategy> all;
  for (const char* kind : {"gather", "ring", "ulysses"}) {
    Strategy of_kind = s;
    of_kind.cp_kind = kind;
    of_kind.zigzag = IsBalancedByZigzag(space, of_kind);
    const auto traded = Traded(space, of_kind, &Strategy::cp);
    all.insert(all.end(), traded.begin(), traded.end());
  }
  return all;
}

std::vector<Strategy> OtherZero(const SearchSpace& space, const Strategy& s) {
  std::vector<Strategy> all;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int group : {0, Strategy::kWithinNode}) {
      // Within nodes there must be something to cut over.
      const bool inside = space.cluster->num_nodes() > 1 &&
                          s.tp * s.cp * s.ep < space.least_devices_of_node;
      if (group != 0 && (stage == 0 || !inside)) continue;
      Strategy other = s;
      other.zero = stage;
      other.zero_group = group;
      all.push_back(other);
    }
  }
  return all;
}

std::vector<Strategy> OtherRecompute(const SearchSpace&, const Strategy& s) {
  std::vector<Strategy> all;
  for (const RecomputeRow& row : RecomputeLevels()) {
    Strategy other = s;
    other.recompute = row.level;
    other.recompute_layers = 0;
    all.push_back(other);
  }
  return all;
}

std::vector<Strategy> OtherSequence(const SearchSpace&, const Strategy& s) {
  if (s.tp == 1) return {};
  Strategy other = s;
  other.sp = !s.sp;
  return {other};
}

std::vector<Strategy> OtherSchedule(const SearchSpace&, const Strategy& s) {
  std::vector<Strategy> all;
  if (s.pp == 1) return all;
  for (const int chunks : {1, 2, 3, 4, 6, 8, 12}) {
    for (const PipelineSchedule& schedule : Schedules()) {
      if (schedule.order == nullptr ||
          !Accepts(schedule, {.stages = s.pp, .chunks = chunks})) {
        continue;
      }
      Strategy other = s;
      other.actions.clear();
      other.vp = chunks;
      other.schedule = schedule.name;
      all.push_back(other);
    }
  }
  return all;
}

std::vector<Strategy> OtherOrder(const SearchSpace&, const Strategy& s) {
  std::vector<Strategy> all;
  for (const std::vector<MeshDimension>& order : UsualOrders()) {
    Strategy other = s;
    other.order = order;
    all.push_back(other);
  }
  return all;
}

std::vector<Strategy> OtherOffload(const SearchSpace& space,
                                   const Strategy& s) {
  std::vector<Strategy> all;
  if (space.cluster->hosts.empty()) return all;
  for (const MemoryTier optimizer : {MemoryTier::kDevice, MemoryTier::kHost}) {
    for (const MemoryTier parameters :
         {MemoryTier::kDevice, MemoryTier::kHost}) {
      Strategy other = s;
      other.optimizer_tier = optimizer;
      other.parameter_tier = parameters;
      other.activation_tier = MemoryTier::kDevice;
      other.gradient_tier = MemoryTier::kDevice;
      all.push_back(other);
      if (optimizer == MemoryTier::kDevice) continue;
      other.gradient_tier = MemoryTier::kHost;
      all.push_back(other);
    }
  }
  return all;
}

std::vector<Strategy> OtherBalance(const SearchSpace& space,
                                   const Strategy& s) {
  if (!space.unlike_speeds) return {};
  Strategy other = s;
  other.by_speed = !s.by_speed;
  return {other};
}

// The dimensions of more than one rank, innermost first.
std::string OrderText(const Strategy& s) {
  std::string text;
  for (MeshDimension dimension : s.order) {
    const DimensionRow& row = RowOf(dimension);
    if (s.*row.degree > 1) AppendTo(text, ", then ", row.name);
  }
  return text.empty() ? "one rank" : text;
}

std::string ZeroText(const Strategy& s) {
  if (s.zero == 0) return "none";
  return "ZeRO-" + std::to_string(s.zero) + ZeroGroupWords(s);
}

std::string ContextText(const Strategy& s) {
  const std::string kind = s.cp_kind + (s.zigzag ? " zigzag" : "");
  return Degree("cp", s.cp) + (s.cp > 1 ? " (" + kind + "), " : ", ") +
         Degree("dp", s.dp);
}

std::string ScheduleText(const Strategy& s) {
  if (s.pp == 1) return "none";
  return s.schedule +
         (s.vp > 1 ? " of " + std::to_string(s.vp) + " chunks" : "");
}

std::string OffloadText(const Strategy& s) {
  std::string text;
  const auto add = [&](std::string_view what, MemoryTier tier) {
    if (tier == MemoryTier::kDevice) return;
    AppendTo(text, ", ",
             std::string(what) +
                 (tier == MemoryTier::kHost ? " on the host" : " in files"));
  };
  add("optimizer", s.optimizer_tier);
  add("parameters", s.parameter_tier);
  add("gradients", s.gradient_tier);
  add("activations", s.activation_tier);
  return text.empty() ? "none" : text;
}

struct DecisionRow {
  std::string_view name;
  std::string (*choice)(const Strategy& strategy);
  // Strategies with other choices, several for one where more is to be chosen
  // with it; the microbatch of each is chosen anew besides.
  std::vector<Strategy> (*others)(const SearchSpace& space,
                                  const Strategy& strategy);
};

constexpr std::array kDecisions = {
    DecisionRow{"tensor parallelism",
                [](const Strategy& s) {
                  return Degree("tp", s.tp) + ", " + Degree("dp", s.dp);
                },
                Trade<&Strategy::tp>},
    DecisionRow{"pipeline parallelism",
                [](const Strategy& s) {
                  return Degree("pp", s.pp) + ", " + Degree("dp", s.dp);
                },
                Trade<&Strategy::pp>},
    DecisionRow{"context parallelism", ContextText, OtherContext},
    DecisionRow{"expert parallelism",
                [](const Strategy& s) {
                  return Degree("ep", s.ep) +
                         (s.etp > 0 ? ", " + Degree("etp", s.etp) : "") + ", " +
                         Degree("dp", s.dp);
                },
                OtherExperts},
    DecisionRow{"microbatch",
                [](const Strategy& s) {
                  return std::to_string(s.mbs) +
                         (s.mbs == 1 ? " sample" : " samples");
                },
                Sized},
    DecisionRow{"work of unlike devices",
                [](const Strategy& s) {
                  return std::string(s.by_speed ? "by speed" : "equal");
                },
                OtherBalance},
    DecisionRow{"ZeRO", ZeroText, OtherZero},
    DecisionRow{"recomputation",
                [](const Strategy& s) {
                  return std::string(NameOf(s.recompute)) +
                         (s.recompute_layers > 0
                              ? " of " + std::to_string(s.recompute_layers) +
                                    " layers"
                              : "");
                },
                OtherRecompute},
    DecisionRow{
        "sequence parallelism",
        [](const Strategy& s) { return std::string(s.sp ? "on" : "off"); },
        OtherSequence},
    DecisionRow{"schedule", ScheduleText, OtherSchedule},
    DecisionRow{"ranks on the fabric, innermost first", OrderText, OtherOrder},
    DecisionRow{"offloading", OffloadText, OtherOffload},
};

// Pricing plans that offload takes a simulation each: only where it matters.
bool IsAsked(const DecisionRow& row, const Strategy& strategy, bool feasible) {
  return row.choice != OffloadText || !feasible ||
         OffloadText(strategy) != "none";
}

// `strategy` with each microbatch size, its own among them if that divides.
std::vector<Strategy> Resized(const SearchSpace& space,
                              const Strategy& strategy) {
  std::vector<Strategy> all = Sized(space, strategy);
  if (space.index.graph->global_batch % SamplesOf(strategy) == 0 &&
      std::ranges::find(all, strategy.mbs, &Strategy::mbs) == all.end()) {
    all.push_back(strategy);
  }
  return all;
}

// The strategies of each choice but the one that is made; none where the batch
// does not divide.
std::map<std::string, std::vector<Strategy>> ChoicesOf(
    const DecisionRow& row, const SearchSpace& space,
    const Strategy& strategy) {
  std::map<std::string, std::vector<Strategy>> choices;
  for (const Strategy& other : row.others(space, strategy)) {
    choices.try_emplace(row.choice(other));
    for (const Strategy& sized : row.others == Sized
                                     ? std::vector<Strategy>{other}
                                     : Resized(space, other)) {
      choices[row.choice(sized)].push_back(sized);
    }
  }
  choices.erase(row.choice(strategy));
  return choices;
}

// Whether another choice gives the plan that `own` gives with its microbatch:
// another word for the same is no alternative.
bool IsSamePlan(const SearchSpace& space, const DecisionRow& row,
                const Strategy& own, const Strategy& other) {
  if (own.dp * own.ep != other.dp * other.ep) return false;
  Strategy same = own;
  if (row.others != Sized && own.mbs != other.mbs) {
    same.mbs = other.mbs;
    same = WithSchedule(space, std::move(same));
    // So many microbatches do not run what was chosen.
    if (row.choice(same) != row.choice(own)) return false;
  }
  const auto plan = PlanFromStrategy(space.index, *space.cluster, same);
  return plan &&
         SameUpToNames(
             *plan,
             PlanFromStrategy(space.index, *space.cluster, other).value());
}

// What was chosen with another choice: "mbs 8, sp".
std::string WithText(const DecisionRow& row, const Strategy& own,
                     const Strategy& other) {
  std::string text;
  if (row.others != Sized && other.mbs != own.mbs) {
    text = Degree("mbs", other.mbs);
  }
  if (row.others != OtherSequence && other.sp && !own.sp) {
    AppendTo(text, ", ", "sp");
  }
  if (row.others != OtherSchedule && own.pp > 1 && other.pp > 1 &&
      ScheduleText(other) != ScheduleText(own)) {
    AppendTo(text, ", ", ScheduleText(other));
  }
  if (row.others != OtherZero && other.zero > 0 &&
      other.zero_group != own.zero_group) {
    AppendTo(text, ", ",
             other.zero_group == 0 ? "ZeRO over all" : "ZeRO within nodes");
  }
  return text;
}

}  // namespace

std::vector<Decision> DecisionsOf(
    const SearchSpace& space, const Objective& objective,
    const Strategy& strategy, int threads, const std::function<bool()>& stop,
    const std::function<void(const Decision&)>& each) {
  const auto own =
      objective.EvaluateUniform(space.index, *space.cluster, strategy);
  const bool feasible = own.has_value() && own->feasible;
  std::vector<Decision> decisions;
  for (const DecisionRow& row : kDecisions) {
    if (stop && stop()) break;
    if (!IsAsked(row, strategy, feasible)) continue;
    Decision decision = {row.name, row.choice(strategy), {}, 0};
    std::vector<Plan> plans;  // of the alternatives
    for (auto& [choice, list] : ChoicesOf(row, space, strategy)) {
      const auto swept = [&] {
        return Sweep(space, objective, list, 1, threads, stop).best;
      };
      std::vector<Candidate> best = swept();
      if (best.empty()) ++decision.invalid;
      while (!best.empty() &&
             IsSamePlan(space, row, strategy, best[0].strategy)) {
        std::erase(list, best[0].strategy);
        best = swept();
      }
      if (stop && stop()) return decisions;
      if (best.empty()) continue;
      const Strategy other = WithoutIdle(space, best[0].strategy);
      // ZeRO within nodes is ZeRO where all copies are on one.
      Plan plan = PlanFromStrategy(space.index, *space.cluster, other).value();
      const bool known = std::ranges::any_of(plans, [&](const Plan& before) {
        return SameUpToNames(before, plan);
      });
      if (known) continue;
      plans.push_back(std::move(plan));
      decision.alternatives.push_back(
          {choice, WithText(row, strategy, other), other, best[0].score});
    }
    if (decision.alternatives.empty()) continue;
    std::ranges::stable_sort(decision.alternatives,
                             [](const Alternative& a, const Alternative& b) {
                               return Better(a.score, b.score);
                             });
    decisions.push_back(std::move(decision));
    if (each) each(decisions.back());
  }
  return decisions;
}

std::optional<Strategy> NearestStrategy(const SearchSpace& space,
                                        const Plan& plan) {
  const GraphIndex& index = space.index;
  auto exact = UniformStrategy(index, *space.cluster, plan);
  if (exact.has_value()) return exact;
  Strategy strategy = RoughStrategy(index, plan);
  if (PlanFromStrategy(index, *space.cluster, strategy)) return strategy;
  // Where its degrees are none of the cluster's: stages of unlike sizes.
  return NearestOfItsKind(space, strategy);
}

std::vector<PlanDifference> NamedChanges(const SearchSpace& space,
                                         const Plan& from, const Plan& to) {
  auto changes = ChangesBetween(space.index, *space.cluster, from, to);
  if (changes.size() != 1 || changes[0].what != "details") return changes;
  if (from.actions == to.actions) return {};
  return {{"schedule", "its table of actions", "another table of actions"}};
}

std::vector<Neighbour> NeighboursOf(const SearchSpace& space,
                                    const Objective& objective,
                                    const Plan& plan, int draws, uint64_t seed,
                                    const std::function<bool()>& stop) {
  std::vector<Neighbour> neighbours;
  const Evaluation own = objective.Evaluate(plan);
  Draft draft(space, plan);
  uint64_t stream = 0;
  for (const Move& move : Moves()) {
    Rng rng(seed, stream++);
    if (move.needs == MoveNeeds::kUnlikeDevices && !space.unlike_speeds) {
      continue;
    }
    Neighbour best;
    std::vector<Plan> known;
    for (int i = 0; i < draws && !(stop && stop()); ++i) {
      if (!move.Propose(draft, rng).has_value()) continue;
      Plan proposed = draft.plan();
      draft.Undo();
      if (std::ranges::find(known, proposed) != known.end()) continue;
      known.push_back(proposed);
      Evaluation evaluation = objective.Evaluate(proposed);
      ++best.candidates;
      // What neither takes other time nor other memory tells nothing.
      if (evaluation == own) continue;
      if (!best.changes.empty() && !Better(evaluation, best.evaluation)) {
        continue;
      }
      auto changes = NamedChanges(space, plan, proposed);
      if (changes.empty()) continue;
      best.plan = std::move(proposed);
      best.evaluation = std::move(evaluation);
      best.changes = std::move(changes);
    }
    if (best.changes.empty()) continue;
    best.move = &move;
    NameAxes(space.index, best.plan);
    neighbours.push_back(std::move(best));
  }
  std::ranges::stable_sort(neighbours,
                           [](const Neighbour& a, const Neighbour& b) {
                             return Better(a.evaluation, b.evaluation);
                           });
  return neighbours;
}

namespace {

// Of layers that need not be alike.
std::string RecomputationText(const GraphIndex& index, const Plan& plan) {
  const auto [first, last] = Layers(index);
  int some = 0;
  int full = 0;
  for (int block = first; block < last; ++block) {
    const auto level = RecomputeOf(index, plan, block);
    some += level != RecomputeLevel::kNone;
    full += level == RecomputeLevel::kFull;
  }
  if (some == 0) return "";
  const std::string layers = std::to_string(last - first) + " layers";
  return ", " + std::string(full == some ? "full" : "partial") +
         " recomputation in " +
         (some == last - first ? "all " : std::to_string(some) + " of ") +
         layers;
}

// ", optimizer on the host for 28% of the parameters".
std::string PartlyOffloadedText(const GraphIndex& index, const Plan& plan) {
  constexpr std::pair<std::string_view, MemoryTier WeightPlacement::*>
      kStored[] = {{"optimizer", &WeightPlacement::optimizer_tier},
                   {"parameters", &WeightPlacement::parameter_tier},
                   {"gradients", &WeightPlacement::gradient_tier}};
  constexpr std::pair<MemoryTier, std::string_view> kPlaces[] = {
      {MemoryTier::kHost, " on the host"}, {MemoryTier::kFile, " in files"}};
  std::string text;
  for (const auto& [what, tier] : kStored) {
    for (const auto& [place, where] : kPlaces) {
      int64_t all = 0;
      int64_t there = 0;
      for (size_t w = 0; w < plan.weights.size(); ++w) {
        const int64_t elements = index.weights[w].elements;
        all += elements;
        if (plan.weights[w].*tier == place) there += elements;
      }
      if (there == 0) continue;
      text += ", " + std::string(what) + std::string(where) +
              ShareText(there, all, "parameters");
    }
  }
  if (std::ranges::any_of(plan.ops, [](const OpPlacement& op) {
        return op.activation_tier != MemoryTier::kDevice;
      })) {
    text += ", activations beside the devices";
  }
  return text;
}

}  // namespace

std::string TextbookName(const SearchSpace& space, const Plan& plan) {
  const auto exact = StrategyOnPart(space.index, *space.cluster, plan);
  const Strategy s = exact ? *exact : RoughStrategy(space.index, plan);
  const auto in_brackets = [](int n) { return " (" + std::to_string(n) + ")"; };
  // Where the ranks of a dimension lie: whether its outermost neighbour is on
  // the same node, by the strides of the ranks.
  const auto inside = [&](MeshDimension dimension) {
    int64_t stride = 1;
    for (MeshDimension d : s.order) {
      stride *= s.*RowOf(d).degree;
      if (d == dimension) break;
    }
    return space.least_devices_of_node % stride == 0;
  };
  const auto place = [&](MeshDimension dimension) -> std::string {
    if (space.cluster->num_nodes() == 1) return "";
    return inside(dimension) ? " inside the node" : " across nodes";
  };
  std::vector<std::string> parts;
  const int replicas = s.dp * s.ep;
  if (replicas > 1) {
    std::string text = s.zero > 0 ? "ZeRO-" + std::to_string(s.zero) + " " : "";
    if (s.dp_kind == DataParallelKind::kRooted) text += "rooted ";
    if (s.zero > 0 && s.zero_group != 0) text += "hybrid ";
    parts.push_back(text + "data parallelism" + in_brackets(replicas));
  } else if (s.zero > 0 && s.cp > 1) {
    parts.push_back("ZeRO-" + std::to_string(s.zero));
  }
  if (s.tp > 1) {
    parts.push_back(std::string(s.sp ? "tensor and sequence parallelism"
                                     : "tensor parallelism") +
                    in_brackets(s.tp) + place(MeshDimension::kTensor));
  }
  if (s.cp > 1) {
    parts.push_back("context parallelism" + in_brackets(s.cp) +
                    place(MeshDimension::kContext));
  }
  if (s.ep > 1) {
    parts.push_back("expert parallelism" + in_brackets(s.ep) +
                    place(MeshDimension::kExpert));
  }
  if (s.etp > 0) {
    parts.push_back("experts over tensor ranks" + in_brackets(s.tp / s.etp));
  }
  if (s.pp > 1) {
    parts.push_back("a pipeline of " + std::to_string(s.pp) + " stages");
  }
  if (parts.empty()) {
    parts.emplace_back(World(plan).devices.size() == 1
                           ? "one device, nothing split"
                           : "most layers whole on every device");
  }
  std::string text = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    text += (i == 1                  ? " with "
             : i + 1 == parts.size() ? " and "
                                     : ", ") +
            parts[i];
  }
  if (!exact || s.recompute_layers > 0) {
    text += RecomputationText(space.index, plan);
  } else if (s.recompute != RecomputeLevel::kNone) {
    text += ", " + std::string(NameOf(s.recompute)) + " recomputation";
  }
  if (!exact) {
    text += PartlyOffloadedText(space.index, plan);
  } else if (const std::string offload = OffloadText(s); offload != "none") {
    text += ", " + offload;
  }
  if (!exact) text += ", with layers or weights of its own";
  return text;
}

}  // namespace tessera
