// Any operator may read a weight: the gradient of one is added up over the
// microbatches and the uses, whichever operator makes it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/kernel_cases.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

using ::testing::IsSupersetOf;

constexpr int64_t kBatch = 4;

std::string Letters(const IndexRule& rule, const Indices& indices) {
  std::string text;
  for (uint8_t f : indices) text += rule.factors[f].letter;
  return text;
}

// A graph of the case's operator, whose operands are weights but for those with
// samples. Two losses are of its results: both of one node's, or each of a
// node's of its own. Nothing where the operator does not take a weight there,
// or has no gradient of it.
std::optional<Graph> GraphOf(KernelCase c, int nodes) {
  if (const auto samples = c.extents.find('b'); samples != c.extents.end()) {
    samples->second = kBatch;
  }
  const Problem problem = ForwardProblem(c);
  const IndexRule& rule = problem.rule;
  GraphBuilder builder(c.name, kBatch, 1, DType::kFloat64);
  builder.BeginBlock("block");
  std::vector<TensorId> operands;
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    const HostTensor& operand = problem.operands[i];
    const Shape& shape = operand.shape();
    const std::string name = "operand" + std::to_string(i);
    const size_t sample_dim = Letters(rule, rule.operands[i]).find('b');
    const bool has_samples = sample_dim == 0;
    if (!has_samples && sample_dim != std::string::npos) return std::nullopt;
    if (operand.dtype() == DType::kInt32) {
      if (!has_samples || shape.size() > 2) return std::nullopt;
      operands.push_back(builder.Input(name + "_ids", shape, DType::kInt32));
    } else if (has_samples) {
      operands.push_back(builder.Input(name, shape, DType::kFloat64));
    } else if (c.conditions.contains(i)) {
      std::vector<double> values;
      for (int64_t v = 0; v < operand.elements(); ++v) {
        values.push_back(operand.At(v));
      }
      operands.push_back(builder.Constant(name, shape, std::move(values)));
    } else {
      const Initializer init = c.above > 0
                                   ? Initializer{.constant = c.above + 0.5}
                                   : Initializer{.stddev = 0.5};
      operands.push_back(
          builder.Weight(name, shape, init, /*weight_decay=*/false));
    }
  }
  TensorId loss;
  std::vector<TensorId> results;
  for (int use = 0; use < 2; ++use) {
    if (use < nodes) {
      results = builder.Add(c.op, "node" + std::to_string(use), operands,
                            rule.ToString(), c.attributes);
    }
    for (size_t k = 0; k < ResultsWithGradients(problem); ++k) {
      const std::string name =
          "loss" + std::to_string(use) + "." + std::to_string(k);
      std::string letters = Letters(rule, rule.results[k]);
      Shape shape = problem.initial[k].shape();
      if (shape.empty()) return std::nullopt;  // it is rounded to fp32
      TensorId y = results[k];
      if (!letters.starts_with('b')) {
        const std::string all = "b" + letters;
        shape.insert(shape.begin(), kBatch);
        const TensorId x = builder.Input(name + ".x", shape, DType::kFloat64);
        y = builder.Add1("multiply", name + ".product", {x, y},
                         all + "," + letters + "->" + all);
        letters = all;
      }
      const TensorId targets =
          builder.Input(name + ".targets", shape, DType::kFloat64);
      const TensorId term =
          builder.Add1("mean_squared_error", name, {y, targets},
                       letters + "," + letters + "->", {{"weight", 1.0 + use}});
      loss = loss.valid()
                 ? builder.Add1("add", name + ".total", {loss, term}, ",->")
                 : term;
    }
  }
  auto forward = builder.Finish(loss);
  if (!forward) return std::nullopt;
  auto graph = Differentiate(*std::move(forward));
  if (!graph) return std::nullopt;
  return *std::move(graph);
}

// Of elements that have no samples, where the operator takes them.
KernelCase WithoutSamples(KernelCase c) {
  char other = 'z';
  while (c.rule.find(other) != std::string::npos || c.extents.contains(other)) {
    --other;
  }
  std::ranges::replace(c.rule, 'b', other);
  auto samples = c.extents.extract('b');
  samples.key() = other;
  c.extents.insert(std::move(samples));
  c.name += " without samples";
  return c;
}

Trained Train(const Graph& graph, int ranks, const std::string& strategy) {
  TrainInMemoryOptions options;
  options.steps = 2;
  const auto tasks = LowerStrategy(graph, ranks, strategy, options.training);
  if (!tasks) {
    ADD_FAILURE() << strategy << ": " << tasks.error().ToString();
    return {};
  }
  auto trained = TrainInMemory(graph, *tasks, options);
  if (!trained) {
    ADD_FAILURE() << strategy << ": " << trained.error().ToString();
    return {};
  }
  return *std::move(trained);
}

TEST(WeightGradients, AreAddedUpWhateverMakesThem) {
  std::set<std::string_view> covered;
  for (const KernelCase& given : KernelCases()) {
    for (const bool without : {false, true}) {
      if (without && given.rule.find('b') == std::string::npos) continue;
      const KernelCase c = without ? WithoutSamples(given) : given;
      const OpDef& op = *FindOp(c.op).value();
      // A batch norm's microbatches differ.
      if (op.adjoints.empty() || op.coupling.Merges('b')) continue;
      const auto graph = GraphOf(c, 1);
      if (!graph) continue;
      SCOPED_TRACE(c.name);
      for (const Node& node : graph->nodes) {
        for (TensorId id : node.results) {
          if (graph->tensor(id).kind == TensorKind::kWeightGradient) {
            covered.insert(node.op->name);
          }
        }
      }
      const Trained whole = Train(*graph, 1, "mbs=4");
      const Graph of_two = GraphOf(c, 2).value();
      EXPECT_EQ(Difference(Train(*graph, 1, "mbs=2"), whole), "");
      EXPECT_EQ(Difference(Train(of_two, 1, "mbs=4"), whole), "");
      EXPECT_EQ(Difference(Train(of_two, 2, "dp=2,mbs=1"), whole), "");
    }
  }
  // Some whose kernels add to what is there, and some whose do not.
  EXPECT_THAT(
      covered,
      IsSupersetOf({"attention_relative_dbias", "concat_dx", "conv2d_dx",
                    "embedding_dw", "gelu_dx", "gru_gates_db", "linear_dw",
                    "lstm_gates_dx", "pad_dx", "reshape_dx", "scale",
                    "slice_dx", "softmax_dx", "stack", "transpose", "unstack",
                    "where_dx", "where_dy"}));
}

}  // namespace
}  // namespace tessera
