#include "planner/plan/recompute.h"

#include <algorithm>
#include <array>

#include "planner/base/table.h"

namespace tessera {
namespace {

constexpr std::array kLevels = {
    RecomputeRow{"none", "keeps all that the backward pass reads",
                 RecomputeLevel::kNone},
    RecomputeRow{"selective", "computes the attention core again",
                 RecomputeLevel::kSelective},
    RecomputeRow{"full", "keeps the residual stream between layers only",
                 RecomputeLevel::kFull},
};

bool Recomputes(const Graph& graph, NodeId node, RecomputeLevel level) {
  if (!CanRecompute(graph, node)) return false;
  return level == RecomputeLevel::kFull ||
         (level == RecomputeLevel::kSelective &&
          graph.node(node).op->op_class == OpClass::kAttention);
}

}  // namespace

std::span<const RecomputeRow> RecomputeLevels() {
  return kLevels;
}

Result<RecomputeLevel> FindRecomputeLevel(std::string_view name) {
  TESSERA_TRY(const RecomputeRow* row,
              Find("recompute level", RecomputeLevels(), name));
  return row->level;
}

std::string_view NameOf(RecomputeLevel level) {
  return kLevels[static_cast<size_t>(level)].name;
}

std::pair<int, int> Layers(const GraphIndex& index) {
  const auto blocks = static_cast<int>(index.nodes_of_block.size());
  return blocks > 2 ? std::pair(1, blocks - 1) : std::pair(0, blocks);
}

void SetRecompute(const GraphIndex& index, int block, RecomputeLevel level,
                  Plan& plan) {
  for (NodeId node : index.nodes_of_block[static_cast<size_t>(block)]) {
    plan.ops[node.index()].recompute = Recomputes(*index.graph, node, level);
  }
}

bool HasLevel(const GraphIndex& index, const Plan& plan, int block,
              RecomputeLevel level) {
  return std::ranges::all_of(index.nodes_of_block[static_cast<size_t>(block)],
                             [&](NodeId node) {
                               return plan.ops[node.index()].recompute ==
                                      Recomputes(*index.graph, node, level);
                             });
}

std::optional<RecomputeLevel> RecomputeOf(const GraphIndex& index,
                                          const Plan& plan, int block) {
  for (const RecomputeRow& row : kLevels) {
    if (HasLevel(index, plan, block, row.level)) return row.level;
  }
  return std::nullopt;
}

bool KeepsResults(const GraphIndex& index, const Plan& plan, NodeId id) {
  const Graph& graph = *index.graph;
  const Node& node = graph.node(id);
  const OpPlacement& placement = plan.ops[id.index()];
  if (node.op->once_per_step) return false;
  return std::ranges::any_of(node.results, [&](TensorId result) {
    if (result == graph.loss) return false;
    return !placement.recompute ||
           std::ranges::any_of(
               index.readers[result.index()], [&](const GraphIndex::Use& use) {
                 return graph.node(use.node).block != node.block ||
                        plan.ops[use.node.index()].group != placement.group;
               });
  });
}

}  // namespace tessera
