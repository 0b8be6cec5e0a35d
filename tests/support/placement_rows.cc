#include "tests/support/placement_rows.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "planner/base/check.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

const DeviceGroup& GroupOf(const Plan& plan, NodeId id) {
  return plan.groups[plan.ops[id.index()].group.index()];
}

// Whether a forward node passes `test`.
template <typename Test>
bool AnyNode(const GraphIndex& index, Test test) {
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    if (test(index.graph->nodes[i], NodeId(static_cast<int64_t>(i)))) {
      return true;
    }
  }
  return false;
}

// The axes that split the factor `letter` of a node; 0 where it has none.
AxisSet AxesOf(const Node& node, const OpPlacement& placement, char letter) {
  const int f = node.rule.FactorOf(letter);
  return f < 0 ? 0 : placement.axes[static_cast<size_t>(f)];
}

bool Splits(const GraphIndex& index, const Plan& plan, std::string_view op,
            std::string_view letters) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    if (node.op->name != op) return false;
    return std::any_of(letters.begin(), letters.end(), [&](char letter) {
      return AxesOf(node, plan.ops[id.index()], letter) != 0;
    });
  });
}

// The axes of a group that split samples in some operator of it.
AxisSet DataAxes(const GraphIndex& index, const Plan& plan, GroupId group) {
  AxisSet axes = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.ops[i].group != group) continue;
    axes |= AxesOf(index.graph->nodes[i], plan.ops[i], 'b');
  }
  return axes;
}

// Whether a dense layer with a weight is split on a factor of that role.
bool SplitsDense(const GraphIndex& index, const Plan& plan, Role role) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    if (node.op->name != "linear") return false;
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      if (node.rule.factors[f].role == role &&
          plan.ops[id.index()].axes[f] != 0) {
        return true;
      }
    }
    return false;
  });
}

bool HasZero(const Plan& plan, int stage) {
  return std::any_of(plan.weights.begin(), plan.weights.end(),
                     [&](const WeightPlacement& weight) {
                       return weight.zero_stage == stage &&
                              weight.zero_axes != 0;
                     });
}

bool HasPipeline(const GraphIndex& index, const Plan& plan,
                 std::string_view schedule) {
  return StagesOf(*index.graph, plan).count() > 1 && plan.microbatches > 1 &&
         plan.schedule == schedule;
}

std::vector<int> BlocksByStage(const GraphIndex& index, const Plan& plan) {
  const Stages stages = StagesOf(*index.graph, plan);
  std::vector<int> blocks(stages.groups.size(), 0);
  for (int stage : stages.of_block) ++blocks[static_cast<size_t>(stage)];
  return blocks;
}

constexpr std::array
    kRows =
        {
            PlacementRow{
                "data parallel",
                [](const GraphIndex& index, const Plan& plan) {
                  for (size_t w = 0; w < plan.weights.size(); ++w) {
                    const WeightHome home =
                        HomeOf(*index.graph, plan, index.weights[w].tensor);
                    const AxisSet data =
                        DataAxes(index, plan, home.group) &
                        home.layout.replicated(plan.groups[home.group.index()]);
                    if (plan.weights[w].zero_axes == 0 && data != 0) {
                      return true;
                    }
                  }
                  return false;
                }},
            PlacementRow{"ZeRO-1",
                         [](const GraphIndex&, const Plan& plan) {
                           return HasZero(plan, 1);
                         }},
            PlacementRow{"ZeRO-2",
                         [](const GraphIndex&, const Plan& plan) {
                           return HasZero(plan, 2);
                         }},
            PlacementRow{"ZeRO-3",
                         [](const GraphIndex&, const Plan& plan) {
                           return HasZero(plan, 3);
                         }},
            PlacementRow{
                "ZeRO on some axes",
                [](const GraphIndex& index, const Plan& plan) {
                  for (size_t w = 0; w < plan.weights.size(); ++w) {
                    const AxisSet zero = plan.weights[w].zero_axes;
                    if (zero == 0) continue;
                    const WeightHome home =
                        HomeOf(*index.graph, plan, index.weights[w].tensor);
                    const AxisSet whole = home.layout.replicated(
                                              plan.groups[home.group.index()]) &
                                          ~zero;
                    if ((whole & DataAxes(index, plan, home.group)) != 0) {
                      return true;
                    }
                  }
                  return false;
                }},
            PlacementRow{"model parallel, one microbatch",
                         [](const GraphIndex& index, const Plan& plan) {
                           return StagesOf(*index.graph, plan).count() > 1 &&
                                  plan.microbatches == 1;
                         }},
            PlacementRow{"GPipe",
                         [](const GraphIndex& index, const Plan& plan) {
                           return HasPipeline(index, plan, "gpipe");
                         }},
            PlacementRow{"1F1B",
                         [](const GraphIndex& index, const Plan& plan) {
                           return HasPipeline(index, plan, "1f1b");
                         }},
            PlacementRow{"interleaved 1F1B",
                         [](const GraphIndex& index, const Plan& plan) {
                           return HasPipeline(index, plan, "interleaved");
                         }},
            PlacementRow{"ZB-H1",
                         [](const GraphIndex& index, const Plan& plan) {
                           return HasPipeline(index, plan, "zb-h1");
                         }},
            PlacementRow{"table of actions",
                         [](const GraphIndex&, const Plan& plan) {
                           return HasPipeline(plan, "table");
                         }},
            PlacementRow{"unlike numbers of blocks",
                         [](const GraphIndex& index, const Plan& plan) {
                           const std::vector<int> blocks =
                               BlocksByStage(index, plan);
                           return std::adjacent_find(
                                      blocks.begin(), blocks.end(),
                                      std::not_equal_to<>()) != blocks.end();
                         }},
            PlacementRow{"tied across stages",
                         [](const GraphIndex& index, const Plan& plan) {
                           for (size_t w = 0; w < plan.weights.size(); ++w) {
                             if (IsTiedAcrossGroups(index, plan, w))
                               return true;
                           }
                           return false;
                         }},
            PlacementRow{"tied within a stage",
                         [](const GraphIndex& index, const Plan& plan) {
                           for (size_t w = 0; w < plan.weights.size(); ++w) {
                             const TensorId weight = index.weights[w].tensor;
                             if (index.readers[weight.index()].size() > 1 &&
                                 !IsTiedAcrossGroups(index, plan, w)) {
                               return true;
                             }
                           }
                           return false;
                         }},
            PlacementRow{
                "microbatches no multiple of stages",
                [](const GraphIndex& index, const Plan& plan) {
                  return plan.microbatches > 1 &&
                         plan.microbatches %
                                 StagesOf(*index.graph, plan).count() !=
                             0;
                }},
            PlacementRow{"column parallel",
                         [](const GraphIndex& index, const Plan& plan) {
                           return SplitsDense(index, plan, Role::kParameter);
                         }},
            PlacementRow{"row parallel",
                         [](const GraphIndex& index, const Plan& plan) {
                           return SplitsDense(index, plan, Role::kReduction);
                         }},
            PlacementRow{"attention heads",
                         [](const GraphIndex& index, const Plan& plan) {
                           return Splits(index, plan, "attention", "g");
                         }},
            PlacementRow{"key/value heads fewer than ranks",
                         [](const GraphIndex& index, const Plan& plan) {
                           return Splits(index, plan, "attention", "r");
                         }},
            PlacementRow{"vocabulary-parallel embedding",
                         [](const GraphIndex& index, const Plan& plan) {
                           return Splits(index, plan, "embedding", "v");
                         }},
            PlacementRow{"vocabulary-parallel loss",
                         [](const GraphIndex& index, const Plan& plan) {
                           return Splits(index, plan, "cross_entropy", "v");
                         }},
            PlacementRow{
                "sequence parallel",
                [](const GraphIndex& index, const Plan& plan) {
                  // A norm split on the sequence by an axis that splits
                  // attention's heads or a weight elsewhere in the block.
                  for (const auto& nodes : index.nodes_of_block) {
                    AxisSet tensor = 0;
                    AxisSet norm = 0;
                    for (NodeId id : nodes) {
                      const Node& node = index.graph->node(id);
                      const OpPlacement& placement = plan.ops[id.index()];
                      if (node.op->name.ends_with("norm")) {
                        norm |= AxesOf(node, placement, 's');
                      }
                      if (node.op->op_class != OpClass::kMatmul) continue;
                      for (size_t f = 0; f < node.rule.factors.size(); ++f) {
                        const char letter = node.rule.factors[f].letter;
                        if (letter != 'b' && letter != 's') {
                          tensor |= placement.axes[f];
                        }
                      }
                    }
                    if ((norm & tensor) != 0) return true;
                  }
                  return false;
                }},
            PlacementRow{"context parallel",
                         [](const GraphIndex& index, const Plan& plan) {
                           return Splits(index, plan, "attention", "s");
                         }},
            PlacementRow{"operators on their own",
                         [](const GraphIndex& index, const Plan& plan) {
                           for (size_t b = 0; b < index.nodes_of_block.size();
                                ++b) {
                             if (!RolesOf(index, plan, static_cast<int>(b))) {
                               return true;
                             }
                           }
                           return false;
                         }},
            PlacementRow{
                "ragged shards",
                [](const GraphIndex& index, const Plan& plan) {
                  const int64_t batch =
                      index.graph->global_batch / plan.microbatches;
                  return AnyNode(index, [&](const Node& node, NodeId id) {
                    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
                      const AxisSet axes = plan.ops[id.index()].axes[f];
                      if (index.Extent(id, f, batch) %
                              GroupOf(plan, id).Size(axes) !=
                          0) {
                        return true;
                      }
                    }
                    return false;
                  });
                }},
            PlacementRow{
                "degrees of 3, 5, 6 or 7",
                [](const GraphIndex& index, const Plan& plan) {
                  return AnyNode(index, [&](const Node& node, NodeId id) {
                    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
                      const int64_t degree =
                          GroupOf(plan, id).Size(plan.ops[id.index()].axes[f]);
                      if (degree == 3 || (degree >= 5 && degree <= 7)) {
                        return true;
                      }
                    }
                    return false;
                  });
                }},
            PlacementRow{"unlike meshes of stages",
                         [](const GraphIndex&, const Plan& plan) {
                           return std::any_of(
                               plan.groups.begin(), plan.groups.end(),
                               [&](const DeviceGroup& group) {
                                 return !SameMesh(group, plan.groups[0]);
                               });
                         }},
            PlacementRow{"operators of a stage on several groups",
                         [](const GraphIndex& index, const Plan& plan) {
                           return StagesOf(*index.graph, plan).groups.size() <
                                  plan.groups.size();
                         }},
            PlacementRow{"parallel branches",
                         [](const GraphIndex& index, const Plan&) {
                           return AnyNode(index, [&](const Node& node, NodeId) {
                             return node.name.ends_with(".branches.add");
                           });
                         }},
            PlacementRow{"dropout",
                         [](const GraphIndex& index, const Plan& plan) {
                           return AnyNode(
                               index, [&](const Node& node, NodeId id) {
                                 return node.op->name == "dropout" &&
                                        !GroupOf(plan, id).axes.empty();
                               });
                         }},
};
static_assert(kRows.size() <= 64);

// Pairs that exclude each other, whatever the model and the number of ranks.
struct ExcludedPair {
  std::string_view a;
  std::string_view b;
};
constexpr std::array kExcluded = {
    // A plan has one schedule, which means something with microbatches only.
    ExcludedPair{"GPipe", "1F1B"},
    ExcludedPair{"GPipe", "interleaved 1F1B"},
    ExcludedPair{"GPipe", "ZB-H1"},
    ExcludedPair{"1F1B", "interleaved 1F1B"},
    ExcludedPair{"1F1B", "ZB-H1"},
    ExcludedPair{"interleaved 1F1B", "ZB-H1"},
    ExcludedPair{"GPipe", "table of actions"},
    ExcludedPair{"1F1B", "table of actions"},
    ExcludedPair{"interleaved 1F1B", "table of actions"},
    ExcludedPair{"ZB-H1", "table of actions"},
    ExcludedPair{"table of actions", "model parallel, one microbatch"},
    ExcludedPair{"GPipe", "model parallel, one microbatch"},
    ExcludedPair{"1F1B", "model parallel, one microbatch"},
    ExcludedPair{"interleaved 1F1B", "model parallel, one microbatch"},
    ExcludedPair{"ZB-H1", "model parallel, one microbatch"},
    ExcludedPair{"microbatches no multiple of stages",
                 "model parallel, one microbatch"},
    // There is one weight that is tied.
    ExcludedPair{"tied within a stage", "tied across stages"},
};

}  // namespace

std::span<const PlacementRow> PlacementRows() {
  return kRows;
}

RowSet RowsOf(const GraphIndex& index, const Plan& plan) {
  RowSet rows = 0;
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].exercised(index, plan)) rows |= RowSet{1} << i;
  }
  return rows;
}

bool IsLegalPair(size_t a, size_t b) {
  return std::none_of(
      kExcluded.begin(), kExcluded.end(), [&](const ExcludedPair& pair) {
        return (kRows[a].name == pair.a && kRows[b].name == pair.b) ||
               (kRows[a].name == pair.b && kRows[b].name == pair.a);
      });
}

Coverage::Coverage()
    : pairs_(kRows.size(), std::vector<int64_t>(kRows.size(), 0)) {}

void Coverage::Add(RowSet rows) {
  for (size_t a = 0; a < kRows.size(); ++a) {
    for (size_t b = 0; b < kRows.size(); ++b) {
      if ((rows >> a & 1) != 0 && (rows >> b & 1) != 0) ++pairs_[a][b];
    }
  }
}

int64_t Coverage::Rarest(RowSet rows) const {
  int64_t rarest = std::numeric_limits<int64_t>::max();
  for (size_t a = 0; a < kRows.size(); ++a) {
    if ((rows >> a & 1) == 0) continue;
    for (size_t b = a; b < kRows.size(); ++b) {
      if ((rows >> b & 1) != 0) rarest = std::min(rarest, pairs_[a][b]);
    }
  }
  return rarest;
}

std::string Coverage::ToString(int64_t least) const {
  std::string text;
  char line[160];
  for (size_t i = 0; i < kRows.size(); ++i) {
    std::snprintf(line, sizeof(line), "%8lld  %s\n",
                  static_cast<long long>(row(i)),
                  std::string(kRows[i].name).c_str());
    text += line;
  }
  int64_t legal = 0;
  int64_t few = 0;
  std::string rare;
  for (size_t a = 0; a < kRows.size(); ++a) {
    for (size_t b = a + 1; b < kRows.size(); ++b) {
      if (!IsLegalPair(a, b)) {
        TESSERA_CHECK(pair(a, b) == 0)
            << kRows[a].name << ", " << kRows[b].name;
        continue;
      }
      ++legal;
      if (pair(a, b) >= least) continue;
      ++few;
      std::snprintf(line, sizeof(line), "%8lld  %s + %s\n",
                    static_cast<long long>(pair(a, b)),
                    std::string(kRows[a].name).c_str(),
                    std::string(kRows[b].name).c_str());
      rare += line;
    }
  }
  std::snprintf(line, sizeof(line),
                "%lld of %lld legal pairs in fewer than %lld plans\n",
                static_cast<long long>(few), static_cast<long long>(legal),
                static_cast<long long>(least));
  return text + line + rare;
}

}  // namespace tessera
