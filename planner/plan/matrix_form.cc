#include "planner/plan/matrix_form.h"

#include <algorithm>
#include <span>

#include "planner/base/element_count.h"
#include "planner/plan/plan.h"

namespace tessera {
namespace {

// What a dimension of a weight is to the operator that reads it.
enum class Kind : uint8_t { kShared, kOutput, kInput };

bool IsAddedToProduct(const IndexRule& rule, size_t operand) {
  return rule.terms[operand] != rule.terms[0] &&
         std::ranges::count(rule.terms, rule.terms[0]) > 1;
}

std::optional<MatrixForm> FormAt(const Node& node, size_t operand) {
  const IndexRule& rule = node.rule;
  const Indices& indices = rule.operands[operand];
  const size_t dims = indices.size();
  if (dims < 2 || IsAddedToProduct(rule, operand)) return std::nullopt;
  const MatrixForm last_two = {dims - 2, 1};
  if (node.op->windows) return last_two;
  std::vector<Kind> kinds;
  for (const uint8_t f : indices) {
    bool shared = false;  // with another operand of the product
    for (size_t k = 0; k < rule.operands.size(); ++k) {
      shared =
          shared || (k != operand && rule.terms[k] == rule.terms[operand] &&
                     Holds(rule.operands[k], f));
    }
    const bool made = std::ranges::any_of(
        rule.results, [&](const Indices& result) { return Holds(result, f); });
    kinds.push_back(!made    ? Kind::kInput
                    : shared ? Kind::kShared
                             : Kind::kOutput);
  }
  // Runs of shared, then of one kind, then of the other.
  size_t batches = 0;
  while (batches < dims && kinds[batches] == Kind::kShared) ++batches;
  size_t end = batches;
  while (end < dims && kinds[end] == kinds[batches]) ++end;
  size_t rest = end;
  while (rest < dims && kinds[rest] == kinds[end]) ++rest;
  const bool is_matrix =
      end < dims && rest == dims && kinds[end] != Kind::kShared;
  return is_matrix ? MatrixForm{batches, end - batches} : last_two;
}

int64_t Product(const Shape& shape, size_t begin, size_t end) {
  return ElementCount(std::span(shape).subspan(begin, end - begin));
}

}  // namespace

std::vector<std::optional<MatrixForm>> MatrixForms(const Graph& graph) {
  std::vector<std::optional<MatrixForm>> of_tensor(graph.tensors.size());
  std::vector<bool> known(graph.tensors.size());
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) break;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const size_t t = node.operands[k].index();
      if (graph.tensors[t].kind != TensorKind::kWeight || known[t]) continue;
      known[t] = true;
      of_tensor[t] = FormAt(node, k);
    }
  }
  std::vector<std::optional<MatrixForm>> forms;
  for (const TensorId weight : Weights(graph)) {
    forms.push_back(of_tensor[weight.index()]);
  }
  return forms;
}

int64_t FactoredElements(const Graph& graph) {
  const std::vector<TensorId> weights = Weights(graph);
  const auto forms = MatrixForms(graph);
  int64_t elements = 0;
  for (size_t w = 0; w < weights.size(); ++w) {
    const Shape& shape = graph.tensor(weights[w]).shape;
    if (!forms[w]) {
      elements += Product(shape, 0, shape.size());
      continue;
    }
    const size_t columns = forms[w]->batches + forms[w]->rows;
    elements += Product(shape, 0, forms[w]->batches) *
                (Product(shape, forms[w]->batches, columns) +
                 Product(shape, columns, shape.size()) + 1);
  }
  return elements;
}

}  // namespace tessera
