#include "tests/support/placement_rows.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "planner/base/check.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/recompute.h"
#include "planner/plan/stages.h"
#include "tests/support/weight_home.h"

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

// Whether a node is split, on a factor and to a degree for which `test` holds.
template <typename Test>
bool AnySplit(const GraphIndex& index, const Plan& plan, Test test) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      const AxisSet axes = plan.ops[id.index()].axes[f];
      if (axes != 0 && test(id, f, GroupOf(plan, id).Size(axes))) return true;
    }
    return false;
  });
}

// The axes on which a weight is replicated at home and that split samples in
// some operator there.
AxisSet DataAxesOf(const GraphIndex& index, const Plan& plan, size_t weight) {
  const WeightHome home = HomeOf(index, plan, weight);
  AxisSet axes = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.ops[i].group != home.group) continue;
    axes |= AxesOf(index.graph->nodes[i], plan.ops[i], 'b');
  }
  return axes & home.layout.replicated(plan.groups[home.group.index()]);
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

// Whether a weight is stored whole on ranks that have unlike samples.
bool ReducesGradients(const GraphIndex& index, const Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (plan.weights[w].zero_axes == 0 && DataAxesOf(index, plan, w) != 0) {
      return true;
    }
  }
  return false;
}

bool HasPipeline(const GraphIndex& index, const Plan& plan,
                 std::string_view schedule) {
  return StagesOf(*index.graph, plan).count() > 1 && plan.microbatches > 1 &&
         plan.schedule == schedule;
}

// ---- The rows. The model of each is that of the index.

bool Zero1(const GraphIndex&, const Plan& plan) {
  return HasZero(plan, 1);
}
bool Zero2(const GraphIndex&, const Plan& plan) {
  return HasZero(plan, 2);
}
bool Zero3(const GraphIndex&, const Plan& plan) {
  return HasZero(plan, 3);
}

// A weight that is cut over some of the ranks with unlike samples.
bool HybridZero(const GraphIndex& index, const Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (plan.weights[w].zero_axes == 0) continue;
    if (DataAxesOf(index, plan, w) & ~plan.weights[w].zero_axes) return true;
  }
  return false;
}

bool Rooted(const GraphIndex& index, const Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (plan.weights[w].rooted & DataAxesOf(index, plan, w)) return true;
  }
  return false;
}

bool Buckets(const GraphIndex& index, const Plan& plan) {
  return plan.bucket_bytes.value > 0 && ReducesGradients(index, plan);
}
bool UnequalSamples(const GraphIndex&, const Plan& plan) {
  return std::ranges::any_of(plan.groups, [](const DeviceGroup& group) {
    return group.IsUneven(group.all_axes());
  });
}
bool NoPrefetch(const GraphIndex&, const Plan& plan) {
  return plan.prefetch == 0 && HasZero(plan, 3);
}
bool DeepPrefetch(const GraphIndex&, const Plan& plan) {
  return plan.prefetch > 1 && HasZero(plan, 3);
}

bool RecomputesLayer(const GraphIndex& index, const Plan& plan,
                     RecomputeLevel level) {
  const auto [first, last] = Layers(index);
  for (int layer = first; layer < last; ++layer) {
    if (RecomputeOf(index, plan, layer) == level) return true;
  }
  return false;
}
bool SelectiveRecompute(const GraphIndex& index, const Plan& plan) {
  return RecomputesLayer(index, plan, RecomputeLevel::kSelective);
}
bool FullRecompute(const GraphIndex& index, const Plan& plan) {
  return RecomputesLayer(index, plan, RecomputeLevel::kFull);
}
bool OperatorsRecomputed(const GraphIndex& index, const Plan& plan) {
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    if (!RecomputeOf(index, plan, static_cast<int>(b))) return true;
  }
  return false;
}

bool Tiles(const GraphIndex&, const Plan& plan) {
  return std::any_of(plan.ops.begin(), plan.ops.end(),
                     [](const OpPlacement& op) { return op.tiles > 1; });
}

bool OneMicrobatch(const GraphIndex& index, const Plan& plan) {
  return StagesOf(*index.graph, plan).count() > 1 && plan.microbatches == 1;
}
bool Gpipe(const GraphIndex& index, const Plan& plan) {
  return HasPipeline(index, plan, "gpipe");
}
bool OneForwardOneBackward(const GraphIndex& index, const Plan& plan) {
  return HasPipeline(index, plan, "1f1b");
}
bool Interleaved(const GraphIndex& index, const Plan& plan) {
  return HasPipeline(index, plan, "interleaved");
}
bool ZeroBubble(const GraphIndex& index, const Plan& plan) {
  return HasPipeline(index, plan, "zb-h1") || HasPipeline(index, plan, "zb-h2");
}

bool TableOfActions(const GraphIndex& index, const Plan& plan) {
  return HasPipeline(index, plan, "table");
}

bool UnlikeStages(const GraphIndex& index, const Plan& plan) {
  const Stages stages = StagesOf(*index.graph, plan);
  std::vector<int> blocks(stages.groups.size(), 0);
  for (int stage : stages.of_block) ++blocks[static_cast<size_t>(stage)];
  return std::adjacent_find(blocks.begin(), blocks.end(),
                            std::not_equal_to<>()) != blocks.end();
}

bool TiedAcrossStages(const GraphIndex& index, const Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (IsTiedAcrossGroups(index, plan, w)) return true;
  }
  return false;
}
bool TiedWithinStage(const GraphIndex& index, const Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    const TensorId weight = index.weights[w].tensor;
    if (index.readers[weight.index()].size() > 1 &&
        !IsTiedAcrossGroups(index, plan, w)) {
      return true;
    }
  }
  return false;
}

bool NoMultipleOfStages(const GraphIndex& index, const Plan& plan) {
  return plan.microbatches > 1 &&
         plan.microbatches % StagesOf(*index.graph, plan).count() != 0;
}

bool ColumnParallel(const GraphIndex& index, const Plan& plan) {
  return SplitsDense(index, plan, Role::kParameter);
}
bool RowParallel(const GraphIndex& index, const Plan& plan) {
  return SplitsDense(index, plan, Role::kReduction);
}
bool SplitsAttention(const GraphIndex& index, const Plan& plan,
                     std::string_view letters) {
  for (const OpDef& op : Ops()) {
    if (op.op_class == OpClass::kAttention &&
        Splits(index, plan, op.name, letters)) {
      return true;
    }
  }
  return false;
}
bool BidirectionalAttention(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "attention_bidirectional", "bsgr");
}
bool RecurrentFeatures(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "lstm_gates", "j") ||
         Splits(index, plan, "gru_gates", "j");
}
bool RelativeBiases(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "attention_relative", "bsgr");
}
// Of queries on another group than the keys.
bool MemoryFromAnotherGroup(const GraphIndex& index, const Plan& plan) {
  return std::ranges::any_of(
      index.block_edges, [&](const GraphIndex::BlockEdge& edge) {
        return index.graph->nodes[edge.consumer.index()].block >
                   index.graph->nodes[edge.producer.index()].block + 1 &&
               plan.ops[edge.producer.index()].group !=
                   plan.ops[edge.consumer.index()].group;
      });
}
bool AttentionHeads(const GraphIndex& index, const Plan& plan) {
  return SplitsAttention(index, plan, "g");
}
bool FewKeyValueHeads(const GraphIndex& index, const Plan& plan) {
  return SplitsAttention(index, plan, "r");
}
bool VocabularyEmbedding(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "embedding", "v");
}
bool VocabularyLoss(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "cross_entropy", "v");
}

// A norm split on the sequence by an axis that splits a dense layer's features
// elsewhere in the block.
bool SequenceParallel(const GraphIndex& index, const Plan& plan) {
  for (const auto& nodes : index.nodes_of_block) {
    AxisSet tensor = 0;
    AxisSet norm = 0;
    for (NodeId id : nodes) {
      const Node& node = index.graph->node(id);
      const OpPlacement& placement = plan.ops[id.index()];
      if (node.op->name.ends_with("norm")) norm |= AxesOf(node, placement, 's');
      if (node.op->op_class != OpClass::kMatmul) continue;
      for (size_t f = 0; f < node.rule.factors.size(); ++f) {
        const char letter = node.rule.factors[f].letter;
        if (letter != 'b' && letter != 's') tensor |= placement.axes[f];
      }
    }
    if ((norm & tensor) != 0) return true;
  }
  return false;
}

// The axes on `letter` of the node that makes operand `k` of `id`.
AxisSet AxesOfProducer(const GraphIndex& index, const Plan& plan, NodeId id,
                       size_t k, char letter) {
  const NodeId from = index.producer[index.graph->node(id).operands[k].index()];
  return AxesOf(index.graph->node(from), plan.ops[from.index()], letter);
}

// Attention's heads split by an axis that splits the sequence of what it reads.
bool HeadsForSequence(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    if (node.op->op_class != OpClass::kAttention) return false;
    const OpPlacement& placement = plan.ops[id.index()];
    const AxisSet heads =
        AxesOf(node, placement, 'g') | AxesOf(node, placement, 'r');
    return (heads & AxesOfProducer(index, plan, id, 2, 's')) != 0;
  });
}

// Experts split by an axis that splits the samples of the tokens they get.
bool ExpertsForSamples(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    return node.op->name == "expert_linear" &&
           (AxesOf(node, plan.ops[id.index()], 'e') &
            AxesOfProducer(index, plan, id, 0, 'b')) != 0;
  });
}

bool ContextParallel(const GraphIndex& index, const Plan& plan) {
  return SplitsAttention(index, plan, "s");
}

bool ConvolutionByOutputs(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "conv2d", "o");
}
bool ConvolutionByInputs(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "conv2d", "c");
}
bool ConvolutionByRows(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "conv2d", "y");
}
bool ConvolutionByColumns(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "conv2d", "x");
}
bool MaximumByRows(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "max_pool", "y");
}
bool SplitBatchNorm(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "tracked_batch_norm", "b");
}
// Its groups, cut or not.
bool SplitGhostBatchNorm(const GraphIndex& index, const Plan& plan) {
  return Splits(index, plan, "tracked_ghost_batch_norm", "b");
}

// Keys and values that go from rank to rank.
bool Ring(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](const Node&, NodeId id) {
    return plan.ops[id.index()].streamed != 0;
  });
}
bool Zigzag(const GraphIndex& index, const Plan& plan) {
  return plan.zigzag > 1 && ContextParallel(index, plan);
}

// A block in which axes have no roles.
bool OperatorsAlone(const GraphIndex& index, const Plan& plan) {
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    if (!RolesOf(index, plan, static_cast<int>(b))) return true;
  }
  return false;
}

bool Ragged(const GraphIndex& index, const Plan& plan) {
  const int64_t batch = index.graph->global_batch / plan.microbatches;
  return AnySplit(index, plan, [&](NodeId id, size_t f, int64_t degree) {
    return index.Extent(id, f, batch) % degree != 0;
  });
}
bool OddDegrees(const GraphIndex& index, const Plan& plan) {
  return AnySplit(index, plan, [](NodeId, size_t, int64_t degree) {
    return degree == 3 || (degree >= 5 && degree <= 7);
  });
}

bool UnlikeMeshes(const GraphIndex& index, const Plan& plan) {
  const Stages stages = StagesOf(*index.graph, plan);
  const auto& first = plan.groups[stages.groups[0][0].index()];
  return std::any_of(stages.groups.begin(), stages.groups.end(),
                     [&](const std::vector<GroupId>& groups) {
                       return !SameMesh(plan.groups[groups[0].index()], first);
                     });
}

bool SeveralGroups(const GraphIndex& index, const Plan& plan) {
  return StagesOf(*index.graph, plan).groups.size() < plan.groups.size();
}

bool Branches(const GraphIndex& index, const Plan&) {
  return AnyNode(index, [](const Node& node, NodeId) {
    return node.name.ends_with(".branches.add");
  });
}
bool Dropout(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](const Node& node, NodeId id) {
    return node.op->name == "dropout" && !GroupOf(plan, id).axes.empty();
  });
}

bool OptimizerOffDevice(const GraphIndex&, const Plan& plan) {
  return std::any_of(plan.weights.begin(), plan.weights.end(),
                     [](const WeightPlacement& weight) {
                       return weight.optimizer_tier != MemoryTier::kDevice;
                     });
}
bool ParametersOffDevice(const GraphIndex&, const Plan& plan) {
  return std::any_of(plan.weights.begin(), plan.weights.end(),
                     [](const WeightPlacement& weight) {
                       return weight.parameter_tier != MemoryTier::kDevice;
                     });
}
bool GradientsOffDevice(const GraphIndex&, const Plan& plan) {
  return std::any_of(plan.weights.begin(), plan.weights.end(),
                     [](const WeightPlacement& weight) {
                       return weight.gradient_tier != MemoryTier::kDevice;
                     });
}
bool ActivationsOffDevice(const GraphIndex&, const Plan& plan) {
  return std::any_of(plan.ops.begin(), plan.ops.end(),
                     [](const OpPlacement& op) {
                       return op.activation_tier != MemoryTier::kDevice;
                     });
}
bool FilesUsed(const GraphIndex&, const Plan& plan) {
  return Uses(plan, MemoryTier::kFile);
}

constexpr std::array kRows = {
    PlacementRow{"data parallel", ReducesGradients},
    PlacementRow{"data parallel, rooted", Rooted},
    PlacementRow{"ZeRO-1", Zero1},
    PlacementRow{"ZeRO-2", Zero2},
    PlacementRow{"ZeRO-3", Zero3},
    PlacementRow{"ZeRO on some axes", HybridZero},
    PlacementRow{"gradient buckets", Buckets},
    PlacementRow{"no prefetch", NoPrefetch},
    PlacementRow{"prefetch of several blocks", DeepPrefetch},
    PlacementRow{"selective recomputation", SelectiveRecompute},
    PlacementRow{"full recomputation", FullRecompute},
    PlacementRow{"operators recomputed on their own", OperatorsRecomputed},
    PlacementRow{"memory-centric tiling", Tiles},
    PlacementRow{"model parallel, one microbatch", OneMicrobatch},
    PlacementRow{"GPipe", Gpipe},
    PlacementRow{"1F1B", OneForwardOneBackward},
    PlacementRow{"interleaved 1F1B", Interleaved},
    PlacementRow{"ZB-H1", ZeroBubble},
    PlacementRow{"table of actions", TableOfActions},
    PlacementRow{"unlike numbers of blocks", UnlikeStages},
    PlacementRow{"unequal samples", UnequalSamples},
    PlacementRow{"tied across stages", TiedAcrossStages},
    PlacementRow{"tied within a stage", TiedWithinStage},
    PlacementRow{"microbatches no multiple of stages", NoMultipleOfStages},
    PlacementRow{"column parallel", ColumnParallel},
    PlacementRow{"row parallel", RowParallel},
    PlacementRow{"attention heads", AttentionHeads},
    PlacementRow{"attention without a causal mask", BidirectionalAttention},
    PlacementRow{"attention with learned biases", RelativeBiases},
    PlacementRow{"results that skip blocks, from another group",
                 MemoryFromAnotherGroup},
    PlacementRow{"key/value heads fewer than ranks", FewKeyValueHeads},
    PlacementRow{"vocabulary-parallel embedding", VocabularyEmbedding},
    PlacementRow{"vocabulary-parallel loss", VocabularyLoss},
    PlacementRow{"sequence parallel", SequenceParallel},
    PlacementRow{"context parallel", ContextParallel},
    PlacementRow{"context parallel, ring", Ring},
    PlacementRow{"context parallel, zigzag order", Zigzag},
    PlacementRow{"context parallel by heads", HeadsForSequence},
    PlacementRow{"expert parallel", ExpertsForSamples},
    PlacementRow{"convolution by output channels", ConvolutionByOutputs},
    PlacementRow{"convolution by input channels", ConvolutionByInputs},
    PlacementRow{"convolution by rows, with halos", ConvolutionByRows},
    PlacementRow{"convolution by columns, with halos", ConvolutionByColumns},
    PlacementRow{"maximum of windows by rows", MaximumByRows},
    PlacementRow{"batch norm over split samples", SplitBatchNorm},
    PlacementRow{"ghost batch norm over split samples", SplitGhostBatchNorm},
    PlacementRow{"features of recurrent cells", RecurrentFeatures},
    PlacementRow{"operators on their own", OperatorsAlone},
    PlacementRow{"ragged shards", Ragged},
    PlacementRow{"degrees of 3, 5, 6 or 7", OddDegrees},
    PlacementRow{"unlike meshes of stages", UnlikeMeshes},
    PlacementRow{"operators of a stage on several groups", SeveralGroups},
    PlacementRow{"parallel branches", Branches},
    PlacementRow{"dropout", Dropout},
    PlacementRow{"optimizer off the device", OptimizerOffDevice},
    PlacementRow{"parameters off the device", ParametersOffDevice},
    PlacementRow{"gradients off the device", GradientsOffDevice},
    PlacementRow{"activations off the device", ActivationsOffDevice},
    PlacementRow{"file tier", FilesUsed},
};
static_assert(kRows.size() <= 64);

// Rows of which a plan exercises at most one, whatever the model and the number
// of ranks.
constexpr std::array kSchedules = {"model parallel, one microbatch",
                                   "GPipe",
                                   "1F1B",
                                   "interleaved 1F1B",
                                   "ZB-H1",
                                   "table of actions"};
constexpr std::array kPrefetch = {"no prefetch", "prefetch of several blocks"};
constexpr std::array kTied = {"tied within a stage", "tied across stages"};
constexpr std::array<std::span<const char* const>, 3> kFamilies = {
    kSchedules, kPrefetch, kTied};

// Of models of tokens, and of images.
constexpr std::array kOfTokens = {"attention heads",
                                  "key/value heads fewer than ranks",
                                  "vocabulary-parallel embedding",
                                  "sequence parallel",
                                  "context parallel",
                                  "context parallel, ring",
                                  "context parallel, zigzag order",
                                  "context parallel by heads",
                                  "expert parallel",
                                  "tied within a stage",
                                  "tied across stages",
                                  "selective recomputation"};
constexpr std::array kOfImages = {"convolution by output channels",
                                  "convolution by input channels",
                                  "batch norm over split samples"};

// What recurrent models lack besides.
constexpr std::array kOfRecurrent = {"features of recurrent cells"};
constexpr std::array kNotOfRecurrent = {"attention with learned biases",
                                        "context parallel, zigzag order",
                                        "expert parallel"};

struct ExcludedPair {
  std::string_view a;
  std::string_view b;
};
constexpr std::array kExcluded = {
    // The random plans have one level of recomputation.
    ExcludedPair{"selective recomputation", "full recomputation"},
    // By chance alone: all that is recomputed on its own is what a selective
    // one recomputes.
    ExcludedPair{"selective recomputation",
                 "operators recomputed on their own"},
    ExcludedPair{"microbatches no multiple of stages",
                 "model parallel, one microbatch"},
    ExcludedPair{"tied within a stage", "table of actions"},
    // The weight that is tied is at both ends of the model.
    ExcludedPair{"tied within a stage", "microbatches no multiple of stages"},
    ExcludedPair{"tied within a stage", "unlike numbers of blocks"},
    ExcludedPair{"tied within a stage", "unlike meshes of stages"},
    ExcludedPair{"tied within a stage", "model parallel, one microbatch"},
    ExcludedPair{"tied within a stage", "GPipe"},
    ExcludedPair{"tied within a stage", "1F1B"},
    ExcludedPair{"tied within a stage", "interleaved 1F1B"},
    ExcludedPair{"tied within a stage", "ZB-H1"},
};

bool Has(std::span<const char* const> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

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
  const std::string_view first = kRows[a].name;
  const std::string_view second = kRows[b].name;
  for (const auto& family : kFamilies) {
    if (a != b && Has(family, first) && Has(family, second)) return false;
  }
  const auto apart = [&](const auto& some, const auto& others) {
    return (Has(some, first) && Has(others, second)) ||
           (Has(others, first) && Has(some, second));
  };
  if (apart(kOfTokens, kOfImages) || apart(kOfRecurrent, kOfImages) ||
      apart(kOfRecurrent, kNotOfRecurrent)) {
    return false;
  }
  return std::none_of(kExcluded.begin(), kExcluded.end(),
                      [&](const ExcludedPair& pair) {
                        return (first == pair.a && second == pair.b) ||
                               (first == pair.b && second == pair.a);
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
