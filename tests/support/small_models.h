#pragma once
// Small graphs, and an objective that needs no cost model.

#include <cstdint>
#include <string>

#include "planner/ir/graph.h"
#include "planner/plan/axis_roles.h"
#include "planner/search/objective.h"

namespace tessera::testing {

// The builder's graph with the mean cross-entropy of `logits`, differentiated.
inline Graph FinishWithLoss(GraphBuilder& builder, TensorId logits,
                            TensorId labels) {
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  const TensorId loss =
      builder.Add1("cross_entropy", "loss", {logits, labels, count});
  auto graph = builder.Finish(loss);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  auto differentiated = Differentiate(*std::move(graph));
  TESSERA_CHECK(differentiated.has_value())
      << differentiated.error().ToString();
  return *std::move(differentiated);
}

// embed | head: a lookup, a dense layer and the loss; four nodes, two weights,
// or where they are `tied` one. The sequence has one token, so that it cannot
// be split.
inline Graph TwoLayerGraph(int64_t batch, int64_t hidden, int64_t vocabulary,
                           bool tied = false) {
  GraphBuilder builder("two-layer", batch, 1, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {batch, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {batch, 1}, DType::kInt32);
  const TensorId table =
      builder.Weight("table", {vocabulary, hidden}, {.stddev = 1}, true);
  const TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  builder.BeginBlock("head");
  const TensorId matrix = tied ? table
                               : builder.Weight("matrix", {vocabulary, hidden},
                                                {.stddev = 1}, true);
  const TensorId logits =
      builder.Add1("linear", "linear", {x, matrix}, "bsi,vi->bsv");
  return FinishWithLoss(builder, logits, labels);
}

// embed | h.0 … | head: `layer(builder, name, x)` makes each residual layer.
template <typename Layer>
Graph StackedGraph(std::string name, int layers, int64_t batch, int64_t seq,
                   int64_t hidden, int64_t vocabulary, Layer layer) {
  GraphBuilder builder(std::move(name), batch, seq, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {batch, seq}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {batch, seq}, DType::kInt32);
  const TensorId table =
      builder.Weight("table", {vocabulary, hidden}, {.stddev = 1}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  for (int i = 0; i < layers; ++i) {
    const std::string h = "h." + std::to_string(i);
    builder.BeginBlock(h);
    const TensorId scale =
        builder.Weight(h + ".scale", {hidden}, {.constant = 1}, false);
    const TensorId y = builder.Add("rms_norm", h + ".norm", {x, scale}, "",
                                   {{"epsilon", 1e-5}})[0];
    x = builder.Add1("add", h + ".add", {x, layer(builder, h, y)},
                     "bsh,bsh->bsh");
  }
  builder.BeginBlock("head");
  const TensorId matrix =
      builder.Weight("matrix", {vocabulary, hidden}, {.stddev = 1}, true);
  const TensorId logits =
      builder.Add1("linear", "head", {x, matrix}, "bsi,vi->bsv");
  return FinishWithLoss(builder, logits, labels);
}

// Pre-norm MLP layers, without attention.
inline Graph MlpGraph(int layers, int64_t batch, int64_t seq, int64_t hidden,
                      int64_t inner, int64_t vocabulary) {
  const auto mlp = [&](GraphBuilder& builder, const std::string& h,
                       TensorId y) {
    const TensorId up =
        builder.Weight(h + ".up.w", {inner, hidden}, {.stddev = 1}, true);
    const TensorId down =
        builder.Weight(h + ".down.w", {hidden, inner}, {.stddev = 1}, true);
    y = builder.Add1("linear", h + ".up", {y, up}, "bsi,fi->bsf");
    y = builder.Add1("silu", h + ".act", {y}, "bsf->bsf");
    return builder.Add1("linear", h + ".down", {y, down}, "bsf,of->bso");
  };
  return StackedGraph("mlp", layers, batch, seq, hidden, vocabulary, mlp);
}

// Attention instead of MLPs, with `heads` heads of one key/value head each.
inline Graph AttentionGraph(int layers, int64_t batch, int64_t seq,
                            int64_t hidden, int64_t heads, int64_t vocabulary) {
  TensorId positions;
  const auto attention = [&](GraphBuilder& builder, const std::string& h,
                             TensorId x) {
    if (!positions.valid()) {
      positions = builder.Input("positions", {batch, seq}, DType::kInt32);
    }
    const auto project = [&](const std::string& name, Shape shape,
                             const char* rule) {
      const TensorId weight =
          builder.Weight(name + ".w", std::move(shape), {.stddev = 1}, true);
      return builder.Add1("linear", name, {x, weight}, rule);
    };
    const int64_t size = hidden / heads;
    const TensorId q =
        project(h + ".q", {heads, 1, size, hidden}, "bsi,grdi->bsgrd");
    const TensorId k =
        project(h + ".k", {heads, size, hidden}, "bsi,gdi->bsgd");
    const TensorId v =
        project(h + ".v", {heads, size, hidden}, "bsi,gei->bsge");
    x = builder.Add("attention", h + ".attention",
                    {q, k, v, positions, positions}, "",
                    {{"scale", 1}, {"window", 0}})[0];
    return project(h + ".out", {hidden, heads, 1, size}, "bsgre,ogre->bso");
  };
  return StackedGraph("attention", layers, batch, seq, hidden, vocabulary,
                      attention);
}

// Experts instead of MLPs; a token takes one and none is dropped.
inline Graph MoeGraph(int layers, int64_t batch, int64_t seq, int64_t hidden,
                      int64_t inner, int64_t experts, int64_t vocabulary) {
  const auto moe = [&](GraphBuilder& builder, const std::string& h,
                       TensorId y) {
    const auto capacity = static_cast<double>(seq);
    const TensorId router =
        builder.Weight(h + ".router.w", {experts, hidden}, {.stddev = 1}, true);
    const TensorId up = builder.Weight(h + ".up.w", {experts, inner, hidden},
                                       {.stddev = 1}, true);
    const TensorId down = builder.Weight(
        h + ".down.w", {experts, hidden, inner}, {.stddev = 1}, true);
    const TensorId logits =
        builder.Add1("linear_fp32", h + ".router", {y, router}, "bsi,ei->bse");
    const auto routes = builder.Add("moe_gate", h + ".gate", {logits}, "",
                                    {{"capacity", capacity},
                                     {"group_best", 1},
                                     {"groups", 1},
                                     {"renormalise", 0},
                                     {"scale", 1},
                                     {"sigmoid", 0},
                                     {"top_groups", 1},
                                     {"top_k", 1}});
    y = builder.Add1(
        "moe_dispatch", h + ".dispatch", {y, routes[1]}, "",
        {{"capacity", capacity}, {"experts", static_cast<double>(experts)}});
    y = builder.Add1("expert_linear", h + ".up", {y, up}, "", {{"top_k", 1}});
    y = builder.Add1("silu", h + ".act", {y}, "ebsf->ebsf");
    y = builder.Add1("expert_linear", h + ".down", {y, down}, "",
                     {{"top_k", 1}});
    y = builder.Add1("moe_collect", h + ".collect", {y, routes[1]});
    return builder.Add1("moe_combine", h + ".combine", {y, routes[0]});
  };
  return StackedGraph("moe", layers, batch, seq, hidden, vocabulary, moe);
}

// embed | h | head: a layer of two branches beside each other, with a residual.
inline Graph BranchesGraph(int64_t batch, int64_t seq, int64_t hidden,
                           int64_t inner, int64_t vocabulary) {
  GraphBuilder builder("branches", batch, seq, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {batch, seq}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {batch, seq}, DType::kInt32);
  const TensorId table =
      builder.Weight("table", {vocabulary, hidden}, {.stddev = 1}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  builder.BeginBlock("h");
  const auto dense = [&](const std::string& name, TensorId from, int64_t out,
                         int64_t in, std::string_view rule) {
    const TensorId weight =
        builder.Weight(name + ".w", {out, in}, {.stddev = 1}, true);
    return builder.Add1("linear", name, {from, weight}, rule);
  };
  TensorId a = dense("h.left.up", x, inner, hidden, "bsi,fi->bsf");
  a = builder.Add1("silu", "h.left.act", {a}, "bsf->bsf");
  a = dense("h.left.down", a, hidden, inner, "bsf,of->bso");
  const TensorId b = dense("h.right", x, hidden, hidden, "bsi,oi->bso");
  TensorId y = builder.Add1("add", "h.join", {a, b}, "bsh,bsh->bsh");
  x = builder.Add1("add", "h.add", {x, y}, "bsh,bsh->bsh");
  builder.BeginBlock("head");
  const TensorId logits = dense("logits", x, vocabulary, hidden, "bsi,vi->bsv");
  return FinishWithLoss(builder, logits, labels);
}

// All of a plan that the search can change, as a key.
inline std::string StateOf(const Plan& plan) {
  const auto tier = [](MemoryTier t) {
    return "@" + std::to_string(static_cast<int>(t));
  };
  std::string text = plan.schedule + "|" + std::to_string(plan.microbatches);
  for (const DeviceGroup& group : plan.groups) {
    text += "|";
    for (DeviceId device : group.devices) {
      text += std::to_string(device.value) + ",";
    }
    for (const MeshAxis& axis : group.axes) {
      text += "x" + std::to_string(axis.size);
      for (int share : axis.shares) text += ":" + std::to_string(share);
    }
  }
  for (const std::vector<Action>& order : plan.actions) {
    text += "|";
    for (const Action& action : order) text += ToString(action, 2);
  }
  for (const OpPlacement& op : plan.ops) {
    text +=
        "|" + std::to_string(op.chunk) + "." + std::to_string(op.group.value);
    for (AxisSet axes : op.axes) text += "," + std::to_string(axes);
    if (op.recompute) text += "r";
    text += "t" + std::to_string(op.tiles);
    if (op.streamed != 0) text += "s" + std::to_string(op.streamed);
    if (op.rooted != 0) text += "o" + std::to_string(op.rooted);
    text += tier(op.activation_tier);
  }
  for (const WeightPlacement& weight : plan.weights) {
    text += std::to_string(weight.zero_stage) + "," +
            std::to_string(weight.zero_axes) + tier(weight.parameter_tier) +
            tier(weight.optimizer_tier) + tier(weight.gradient_tier) +
            (weight.rooted != 0 ? "o" + std::to_string(weight.rooted) : "") +
            ";";
  }
  return text + "|" + std::to_string(plan.bucket_bytes.value) + "|" +
         std::to_string(plan.prefetch) + "|" + std::to_string(plan.zigzag);
}

// A rugged objective: compute that shrinks with the split, a price for each
// tensor whose reader wants another split than its producer leaves, for each
// microbatch, for gradients, and for the pipeline's bubble. Plans of more than
// `memory` weight elements on a device do not fit.
class ToyObjective : public Objective {
 public:
  explicit ToyObjective(const Graph& graph, int64_t memory = INT64_MAX)
      : index_(graph), memory_(memory) {}

  Evaluation Evaluate(const Plan& plan) const override {
    const Graph& graph = *index_.graph;
    int64_t time = 0;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      const Node& node = graph.nodes[i];
      const OpPlacement& op = plan.ops[i];
      const DeviceGroup& group = plan.groups[op.group.index()];
      int64_t degree = 1;
      for (AxisSet axes : op.axes) degree *= group.Size(axes);
      const bool heavy = node.op->op_class != OpClass::kMemory;
      time += (heavy ? 1'000'000 : 100'000) / degree;
      for (size_t k = 0; k < node.operands.size(); ++k) {
        const NodeId from = index_.producer[node.operands[k].index()];
        if (!from.valid()) continue;
        const OpPlacement& producer = plan.ops[from.index()];
        const Node& source = graph.node(from);
        size_t result = 0;
        while (source.results[result] != node.operands[k]) ++result;
        const DeviceGroup& source_group = plan.groups[producer.group.index()];
        if (!(ResultLayout(graph, source, producer, source_group, result) ==
              OperandLayout(graph, node, op, group, k)) ||
            producer.group != op.group) {
          time += 150'000;
        }
      }
    }
    int64_t elements = 0;
    for (size_t w = 0; w < plan.weights.size(); ++w) {
      const auto& home = index_.weights[w].home;
      const OpPlacement& op = plan.ops[home.node.index()];
      const DeviceGroup& group = plan.groups[op.group.index()];
      const Layout layout =
          OperandLayout(graph, graph.node(home.node), op, group, home.operand);
      const AxisSet replicated = layout.replicated(group);
      const int64_t shard = LargestElements(
          layout, group, graph.tensor(index_.weights[w].tensor).shape);
      time += 20'000 * (group.Size(replicated) - 1);
      const int64_t shards = group.Size(plan.weights[w].zero_axes);
      time += plan.weights[w].zero_stage * 3'000 - 2'000 * (shards - 1);
      elements += shard + 3 * shard / shards;
    }
    const auto stages = static_cast<int64_t>(plan.groups.size());
    time += 10'000 * plan.microbatches +
            time * (stages - 1) / (2 * plan.microbatches);
    if (plan.schedule == "gpipe") time += 5'000 * plan.microbatches;
    Evaluation evaluation;
    evaluation.step_time = {std::max<int64_t>(1, time)};
    evaluation.overflow = {std::max<int64_t>(0, elements - memory_)};
    if (evaluation.overflow.value > 0) evaluation.violations = {"memory"};
    return evaluation;
  }

 private:
  GraphIndex index_;
  int64_t memory_;
};

}  // namespace tessera::testing
