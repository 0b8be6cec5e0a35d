#include "planner/ops/accumulation.h"

#include <string_view>
#include <unordered_set>

namespace tessera {

bool Accumulates(const OpDef& op) {
  static const auto* const names = new std::unordered_set<std::string_view>{
      "adafactor_norm",
      "adafactor_sums",
      "add",
      "attention",
      "attention_alibi",
      "attention_alibi_dqkv",
      "attention_bidirectional",
      "attention_bidirectional_dqkv",
      "attention_dqkv",
      "attention_relative",
      "attention_relative_dbias",
      "attention_relative_dqkv",
      "batch_norm_dx",
      "binary_cross_entropy",
      "broadcast_add",
      "conv2d_db",
      "conv2d_dw",
      "count_labels",
      "cross_entropy",
      "divide",
      "divide_dx",
      "divide_dy",
      "einsum",
      "embedding_bag_dw",
      "embedding_dw",
      "equal",
      "expert_linear",
      "expert_linear_dw",
      "expert_linear_dx",
      "gather",
      "gather_dx",
      "ghost_batch_norm_dx",
      "greater",
      "greater_equal",
      "gru_gates_db",
      "layer_norm_dw",
      "less",
      "less_equal",
      "linear",
      "linear_db",
      "linear_dw",
      "linear_dx",
      "linear_fp32",
      "log_softmax_dx",
      "maximum",
      "maximum_dx",
      "mean_squared_error",
      "minimum",
      "minimum_dx",
      "moe_balance",
      "multiply",
      "normalize_dw",
      "not_equal",
      "reduce_max_dx",
      "reduce_mean",
      "reduce_mean_dx",
      "reduce_negative",
      "reduce_sum",
      "reduce_sum_dx",
      "reduce_variance_dx",
      "rms_norm_dw",
      "scale",
      "scatter_add",
      "softmax_dx",
      "square_sum",
      "subtract",
      "sum",
      "tracked_batch_norm_dx",
      "tracked_ghost_batch_norm_dx",
      "transpose",
      "where",
      "where_dx",
      "where_dy",
  };
  return names->contains(op.name);
}

bool AddsToResult(const OpDef& op, size_t k) {
  if (op.name == "cross_entropy") return k == 0;         // the loss
  if (op.name.ends_with("batch_norm_dx")) return k > 0;  // the weights
  return true;
}

bool AddsItsGradients(const Graph& graph, const Node& node) {
  bool any = false;
  bool adds = Accumulates(*node.op);
  for (size_t k = 0; k < node.results.size(); ++k) {
    const bool of_weight =
        graph.tensor(node.results[k]).kind == TensorKind::kWeightGradient;
    any = any || of_weight;
    adds = adds && of_weight == AddsToResult(*node.op, k);
  }
  return adds || !any || OwnOpOf(*node.op) != nullptr;
}

}  // namespace tessera
