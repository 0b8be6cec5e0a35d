// The contract of every kernel, over a table of cases: gradients match finite
// differences, shards of every split give the unsplit result, fp32 agrees with
// fp64, 16-bit data is computed in fp32 and rounded once, accumulation adds,
// and no bit depends on the alignment of buffers. An operator without a case
// fails; a new one needs one line in Cases().

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "planner/base/rng.h"
#include "runtime/kernels/kernel.h"
#include "runtime/thread_pool.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

using Tensors = std::vector<HostTensor>;
using RunKernel = std::function<void(const KernelCall&)>;

// How an int32 operand is filled, along its last dimension.
struct Ints {
  enum Kind { kRandom, kIncreasing, kShuffled } kind = kRandom;
  int32_t low = 0;   // of kRandom
  int32_t high = 0;  // exclusive
};

struct Case {
  std::string name;
  std::string op;
  std::string rule;  // empty: the operator's
  std::map<char, int64_t> extents;
  std::vector<Attribute> attributes = {};
  std::map<size_t, Ints> ints = {};  // by operand
  bool in_place = false;             // results are read, too
};

constexpr Ints kIncreasing = {Ints::kIncreasing};
constexpr Ints kShuffled = {Ints::kShuffled};

Ints Below(int32_t high) {
  return {Ints::kRandom, 0, high};
}

Case Elementwise(std::string op, int operands = 1) {
  Case result = {op, op, "bsf", {{'b', 3}, {'s', 5}, {'f', 29}}};
  for (int i = 1; i < operands; ++i) result.rule += ",bsf";
  result.rule += "->bsf";
  return result;
}

Case AttentionCase(std::string name, std::map<char, int64_t> extents,
                   double window, Ints queries, Ints keys) {
  return {"attention_" + name,
          "attention",
          "",
          std::move(extents),
          {{"scale", 0.6}, {"window", window}},
          {{3, queries}, {4, keys}}};
}

Case GateCase(const std::string& name, double capacity, double renormalise) {
  return {"moe_gate_" + name,
          "moe_gate",
          "",
          {{'b', 3}, {'s', 7}, {'e', 5}, {'k', 3}},
          {{"capacity", capacity}, {"renormalise", renormalise}, {"top_k", 3}}};
}

const std::vector<Case>& Cases() {
  static const auto* const cases = new std::vector<Case>{
      {"embedding",
       "embedding",
       "",
       {{'b', 3}, {'s', 5}, {'v', 7}, {'h', 3}},
       {},
       {{0, Below(7)}}},
      {"linear_bias",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 3}, {'i', 5}, {'o', 7}}},
      {"linear_no_bias",
       "linear",
       "bsi,oi->bso",
       {{'b', 3}, {'s', 5}, {'i', 7}, {'o', 3}}},
      {"linear_to_heads",
       "linear",
       "bsi,grdi+grd->bsgrd",
       {{'b', 2}, {'s', 3}, {'i', 5}, {'g', 2}, {'r', 3}, {'d', 3}}},
      {"linear_from_heads",
       "linear",
       "bsgre,ogre+o->bso",
       {{'b', 3}, {'s', 2}, {'o', 5}, {'g', 2}, {'r', 3}, {'e', 3}}},
      // Beyond Eigen's threshold for blocked products.
      {"linear_large",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 11}, {'i', 37}, {'o', 41}}},
      // Vectors, which Eigen multiplies by other code.
      {"linear_one_row",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 1}, {'s', 1}, {'i', 37}, {'o', 41}}},
      {"linear_one_column",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 11}, {'i', 37}, {'o', 1}}},
      {"layer_norm",
       "layer_norm",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-5}}},
      {"layer_norm_wide",
       "layer_norm",
       "",
       {{'b', 3}, {'s', 3}, {'h', 133}},
       {{"epsilon", 1e-5}}},
      {"rms_norm",
       "rms_norm",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-6}}},
      {"rms_norm_of_heads",
       "rms_norm",
       "bsgrd!,d->bsgrd,bsgr",
       {{'b', 3}, {'s', 3}, {'g', 2}, {'r', 3}, {'d', 5}},
       {{"epsilon", 1e-6}}},
      {"row_mean", "row_mean", "", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"row_std",
       "row_std",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-5}}},
      {"normalize", "normalize", "", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"rotary_queries",
       "rotary",
       "bsgrd!,bs->bsgrd",
       {{'b', 3}, {'s', 5}, {'g', 2}, {'r', 3}, {'d', 6}},
       {{"fraction", 1}, {"theta", 10000}},
       {{1, kIncreasing}}},
      {"rotary_keys_in_part",
       "rotary",
       "bsgd!,bs->bsgd",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'d', 8}},
       {{"fraction", 0.5}, {"theta", 100}},
       {{1, kShuffled}}},
      AttentionCase("causal",
                    {{'b', 3},
                     {'s', 5},
                     {'g', 3},
                     {'r', 1},
                     {'d', 4},
                     {'t', 5},
                     {'e', 4}},
                    0, kIncreasing, kIncreasing),
      AttentionCase("grouped",
                    {{'b', 2},
                     {'s', 7},
                     {'g', 2},
                     {'r', 3},
                     {'d', 3},
                     {'t', 7},
                     {'e', 5}},
                    0, kShuffled, kShuffled),
      AttentionCase("window",
                    {{'b', 2},
                     {'s', 7},
                     {'g', 2},
                     {'r', 2},
                     {'d', 3},
                     {'t', 7},
                     {'e', 3}},
                    3, kIncreasing, kIncreasing),
      AttentionCase("one_query",
                    {{'b', 2},
                     {'s', 1},
                     {'g', 2},
                     {'r', 1},
                     {'d', 5},
                     {'t', 70},
                     {'e', 3}},
                    0, Below(70), kIncreasing),
      // Some queries see no key at all.
      AttentionCase("blind",
                    {{'b', 3},
                     {'s', 5},
                     {'g', 2},
                     {'r', 3},
                     {'d', 3},
                     {'t', 7},
                     {'e', 3}},
                    2, Below(9), Below(9)),
      // Several tiles each way, ragged; most of them are skipped.
      AttentionCase("tiles",
                    {{'b', 1},
                     {'s', 150},
                     {'g', 1},
                     {'r', 2},
                     {'d', 5},
                     {'t', 203},
                     {'e', 3}},
                    0, kIncreasing, kIncreasing),
      AttentionCase("tiles_window",
                    {{'b', 1},
                     {'s', 203},
                     {'g', 2},
                     {'r', 1},
                     {'d', 5},
                     {'t', 203},
                     {'e', 3}},
                    70, kIncreasing, kIncreasing),
      AttentionCase("tiles_shuffled",
                    {{'b', 1},
                     {'s', 150},
                     {'g', 1},
                     {'r', 2},
                     {'d', 5},
                     {'t', 150},
                     {'e', 3}},
                    40, kShuffled, kShuffled),
      Elementwise("gelu"),
      Elementwise("gelu_erf"),
      Elementwise("silu"),
      Elementwise("multiply", 2),
      Elementwise("add", 2),
      Elementwise("sum", 3),
      {"dropout",
       "dropout",
       "bsh->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"probability", 0.4}, {"salt", 11}}},
      {"count_labels",
       "count_labels",
       "",
       {{'b', 3}, {'s', 5}},
       {},
       {{0, {Ints::kRandom, -2, 7}}}},
      {"cross_entropy",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 5}, {'v', 7}},
       {},
       {{1, {Ints::kRandom, -2, 7}}}},
      {"cross_entropy_wide",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 3}, {'v', 301}},
       {},
       {{1, {Ints::kRandom, 0, 301}}}},
      {"linear_fp32",
       "linear_fp32",
       "bsi,ei->bse",
       {{'b', 3}, {'s', 5}, {'i', 7}, {'e', 3}}},
      GateCase("drops", 2, 1),
      GateCase("dropless", 7, 1),
      GateCase("as_they_are", 3, 0),
      {"moe_balance",
       "moe_balance",
       "",
       {{'b', 3}, {'s', 7}, {'e', 5}},
       {{"coefficient", 0.3}, {"top_k", 2}}},
      // Some slots are taken twice, some choices were dropped.
      {"moe_dispatch",
       "moe_dispatch",
       "",
       {{'b', 3}, {'t', 5}, {'h', 7}, {'k', 2}, {'e', 4}, {'s', 3}},
       {{"capacity", 3}, {"experts", 4}},
       {{1, {Ints::kRandom, -3, 12}}}},
      {"moe_dispatch_wide",
       "moe_dispatch",
       "",
       {{'b', 1}, {'t', 5}, {'h', 133}, {'k', 1}, {'e', 3}, {'s', 2}},
       {{"capacity", 2}, {"experts", 3}},
       {{1, {Ints::kRandom, -1, 6}}}},
      {"moe_collect",
       "moe_collect",
       "",
       {{'b', 3}, {'t', 3}, {'h', 7}, {'k', 2}, {'e', 4}, {'s', 5}},
       {},
       {{1, {Ints::kRandom, -3, 12}}}},
      {"moe_combine",
       "moe_combine",
       "",
       {{'b', 3}, {'s', 5}, {'k', 3}, {'h', 7}}},
      {"moe_combine_wide",
       "moe_combine",
       "",
       {{'b', 1}, {'s', 3}, {'k', 2}, {'h', 133}}},
      {"expert_linear",
       "expert_linear",
       "",
       {{'e', 4}, {'b', 3}, {'s', 3}, {'i', 5}, {'o', 7}},
       {{"top_k", 2}}},
      {"expert_linear_one_row",
       "expert_linear",
       "",
       {{'e', 3}, {'b', 1}, {'s', 1}, {'i', 37}, {'o', 41}},
       {{"top_k", 1}}},
      {"adamw",
       "adamw",
       "",
       {{'n', 301}},
       {{"beta1", 0.9},
        {"beta2", 0.95},
        {"epsilon", 1e-8},
        {"lr", 0.01},
        {"weight_decay", 0.1}},
       {},
       /*in_place=*/true},
      {"sgd", "sgd", "", {{'n', 301}}, {{"lr", 0.1}}, {}, /*in_place=*/true},
      {"cast", "cast", "", {{'n', 301}}},
      {"square_sum", "square_sum", "", {{'n', 301}}},
      {"clip_coefficient", "clip_coefficient", "", {}, {{"clip", 0.5}}},
  };
  return *cases;
}

// One call of an operator on whole tensors.
struct Problem {
  const OpDef* op = nullptr;
  IndexRule rule;
  std::vector<Attribute> attributes;
  Tensors operands;
  Tensors initial;  // the results before the call: shapes, or values in place
};

const OpDef& OpNamed(std::string_view name) {
  return *FindOp(name).value();
}

Shape ShapeOf(const IndexRule& rule, const Indices& indices,
              const std::map<char, int64_t>& extents) {
  Shape shape;
  for (uint8_t f : indices) {
    shape.push_back(extents.at(rule.factors[f].letter));
  }
  return shape;
}

// Between -1 and 1, away from zero.
void FillRandom(HostTensor& tensor, Rng& rng) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const double magnitude = 0.1 + 0.9 * rng.Uniform01();
    tensor.Set(i, rng.Below(2) == 0 ? magnitude : -magnitude);
  }
}

void FillInts(HostTensor& tensor, const Ints& ints, Rng& rng) {
  const int64_t width = tensor.shape().back();
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    if (ints.kind == Ints::kRandom) {
      const auto range = static_cast<uint32_t>(ints.high - ints.low);
      tensor.Set(i, ints.low + static_cast<int32_t>(rng.Below(range)));
      continue;
    }
    const int64_t column = i % width;
    tensor.Set(i, static_cast<double>(column));
    if (ints.kind == Ints::kShuffled) {
      const int64_t other = i - rng.Below(static_cast<uint32_t>(column) + 1);
      const double swapped = tensor.At(other);
      tensor.Set(other, tensor.At(i));
      tensor.Set(i, swapped);
    }
  }
}

Problem ForwardProblem(const Case& c) {
  Rng rng(7);
  Problem problem;
  problem.op = &OpNamed(c.op);
  problem.rule =
      IndexRule::Parse(c.rule.empty() ? problem.op->rule : c.rule).value();
  problem.attributes = c.attributes;
  for (size_t i = 0; i < problem.rule.operands.size(); ++i) {
    const Shape shape =
        ShapeOf(problem.rule, problem.rule.operands[i], c.extents);
    const auto ints = c.ints.find(i);
    if (ints != c.ints.end()) {
      problem.operands.emplace_back(shape, DType::kInt32);
      FillInts(problem.operands.back(), ints->second, rng);
    } else {
      problem.operands.emplace_back(shape, DType::kFloat64);
      FillRandom(problem.operands.back(), rng);
      if (shape.empty()) problem.operands.back().Set(0, 3);  // count, norm
    }
  }
  const std::vector<size_t>& integers = problem.op->integer_results;
  for (const Indices& indices : problem.rule.results) {
    const bool is_integer = std::find(integers.begin(), integers.end(),
                                      problem.initial.size()) != integers.end();
    problem.initial.emplace_back(ShapeOf(problem.rule, indices, c.extents),
                                 is_integer ? DType::kInt32 : DType::kFloat64);
    if (!c.in_place) continue;
    HostTensor& result = problem.initial.back();
    FillRandom(result, rng);
    for (int64_t i = 0; i < result.elements(); ++i) {  // v is not negative
      result.Set(i, std::abs(result.At(i)));
    }
  }
  return problem;
}

void Call(const Problem& problem, const RunKernel& run,
          const std::vector<LocalTensor>& operands, Tensors& results,
          bool accumulate = false, ThreadPool* threads = nullptr) {
  std::vector<LocalTensor> local;
  for (const HostTensor& result : results) local.push_back(result.Local());
  run({.rule = &problem.rule,
       .attributes = problem.attributes,
       .operands = operands,
       .results = local,
       .accumulate = accumulate,
       .seed = 5,
       .step = 3,
       .threads = threads});
}

RunKernel KernelNamed(std::string_view name) {
  return FindCpuKernel(name).value()->run;
}

std::vector<LocalTensor> Locals(const Tensors& tensors) {
  std::vector<LocalTensor> locals;
  for (const HostTensor& tensor : tensors) locals.push_back(tensor.Local());
  return locals;
}

HostTensor StateOf(const Problem& problem,
                   const std::vector<LocalTensor>& operands, DType dtype,
                   ThreadPool* threads = nullptr) {
  Shape shape = operands[1].shape;
  shape.push_back(problem.op->coupling.state_width);
  Tensors state = {HostTensor(shape, dtype)};
  Call(problem, KernelNamed(std::string(problem.op->name) + ".state"), operands,
       state, /*accumulate=*/false, threads);
  return state[0];
}

Tensors Compute(const Problem& problem, bool accumulate = false,
                ThreadPool* threads = nullptr) {
  Tensors results = problem.initial;
  std::vector<LocalTensor> operands = Locals(problem.operands);
  HostTensor state;
  if (problem.op->coupling.factor != 0) {
    const bool doubles = problem.initial[0].dtype() == DType::kFloat64;
    state =
        StateOf(problem, operands, doubles ? DType::kFloat64 : DType::kFloat32);
    operands.push_back(state.Local());
  }
  Call(problem, KernelNamed(problem.op->name), operands, results, accumulate,
       threads);
  return results;
}

// The problem with floats of another dtype and buffers of another alignment.
Problem Converted(Problem problem, DType dtype, int64_t skew) {
  for (HostTensor& tensor : problem.operands) tensor = tensor.As(dtype, skew);
  for (HostTensor& tensor : problem.initial) tensor = tensor.As(dtype, skew);
  return problem;
}

// ---- Adjoints ---------------------------------------------------------------

// "dx2" is gradient 2 of an operand.
struct Symbol {
  bool gradient = false;
  bool of_result = false;
  size_t index = 0;
};

std::vector<Symbol> Symbols(std::string_view text) {
  std::vector<Symbol> symbols(1);
  for (char c : text) {
    if (c == ',') {
      symbols.emplace_back();
    } else if (c == 'd') {
      symbols.back().gradient = true;
    } else if (c == 'x' || c == 'y') {
      symbols.back().of_result = c == 'y';
    } else {
      symbols.back().index = static_cast<size_t>(c - '0');
    }
  }
  return symbols;
}

struct AdjointProblem {
  Problem problem;
  std::vector<size_t> gradients_of;  // operand of each result
};

// The adjoint's call for the loss sum(dy * y0), or nothing where the node lacks
// the operand (no bias) or the adjoint passes dy through.
std::optional<AdjointProblem> Adjoint(const Problem& forward,
                                      const Tensors& results,
                                      const HostTensor& dy,
                                      const AdjointDef& adjoint) {
  if (adjoint.op.empty()) return std::nullopt;
  const size_t arrow = adjoint.signature.find("->");
  AdjointProblem backward;
  Problem& problem = backward.problem;
  problem.op = &OpNamed(adjoint.op);
  problem.attributes = forward.attributes;
  problem.rule.factors = forward.rule.factors;
  for (const Symbol& s : Symbols(adjoint.signature.substr(arrow + 2))) {
    if (s.index >= forward.operands.size()) return std::nullopt;
    backward.gradients_of.push_back(s.index);
    problem.rule.results.push_back(forward.rule.operands[s.index]);
    problem.initial.emplace_back(forward.operands[s.index].shape(), dy.dtype());
  }
  for (const Symbol& s : Symbols(adjoint.signature.substr(0, arrow))) {
    problem.rule.operands.push_back(s.of_result
                                        ? forward.rule.results[s.index]
                                        : forward.rule.operands[s.index]);
    problem.rule.terms.push_back(0);
    problem.operands.push_back(s.gradient    ? dy
                               : s.of_result ? results[s.index]
                                             : forward.operands[s.index]);
  }
  return backward;
}

HostTensor OutputGradient(const Problem& forward) {
  Rng rng(13);
  HostTensor dy(forward.initial[0].shape(), DType::kFloat64);
  FillRandom(dy, rng);
  if (dy.shape().empty()) dy.Set(0, 1);  // the loss itself
  return dy;
}

// The case's operator and all its adjoints, as calls.
std::vector<Problem> AllProblems(const Case& c) {
  const Problem forward = ForwardProblem(c);
  std::vector<Problem> problems = {forward};
  if (forward.op->adjoints.empty()) return problems;
  const Tensors results = Compute(forward);
  const HostTensor dy = OutputGradient(forward);
  for (const AdjointDef& adjoint : forward.op->adjoints) {
    auto backward = Adjoint(forward, results, dy, adjoint);
    if (backward) problems.push_back(std::move(backward->problem));
  }
  return problems;
}

// ---- Splitting --------------------------------------------------------------

enum class Mistake {
  kNone,
  kTermsEverywhere,  // additive terms on every shard
  kLocalIndex,       // shards that take themselves for the whole
  kUnmaskedIds,      // ids out of range are looked up all the same
  kOwnStateOnly,     // states are not exchanged
};

// Looks up every id somewhere in its shard.
void UnmaskedEmbedding(const KernelCall& call) {
  LocalTensor table = call.operands[1];
  HostTensor ids(call.operands[0].shape, DType::kInt32);
  for (int64_t i = 0; i < ids.elements(); ++i) {
    const int64_t id = call.operands[0].as<int32_t>()[i];
    ids.Set(i, static_cast<double>(table.offset[0] + id % table.shape[0]));
  }
  const std::vector<LocalTensor> operands = {ids.Local(), table};
  KernelCall unmasked = call;
  unmasked.operands = operands;
  KernelNamed("embedding")(unmasked);
}

int64_t Extent(const Problem& problem, int factor) {
  const auto find = [&](const std::vector<Indices>& sides,
                        const Tensors& tensors) -> int64_t {
    for (size_t i = 0; i < sides.size(); ++i) {
      for (size_t dim = 0; dim < sides[i].size(); ++dim) {
        if (sides[i][dim] == factor) return tensors[i].shape()[dim];
      }
    }
    return 0;
  };
  const int64_t extent = find(problem.rule.operands, problem.operands);
  return extent > 0 ? extent : find(problem.rule.results, problem.initial);
}

// Shard `part` of `parts` of a tensor along the factor, or all of it.
HostTensor Shard(const HostTensor& whole, const Indices& indices, int factor,
                 int64_t part, int64_t parts) {
  for (size_t dim = 0; dim < indices.size(); ++dim) {
    if (indices[dim] != factor) continue;
    const int64_t n = whole.shape()[dim];
    return whole.Part(dim, part * n / parts, (part + 1) * n / parts);
  }
  return whole;
}

// Runs the problem on shards of one factor and puts the results together:
// shards are placed, partial sums added.
Tensors ComputeSplit(const Problem& problem, int factor, int64_t parts,
                     Mistake mistake = Mistake::kNone) {
  const IndexRule& rule = problem.rule;
  const bool reduction =
      std::none_of(rule.results.begin(), rule.results.end(),
                   [&](const Indices& r) { return Holds(r, factor); });
  const bool coupled =
      rule.factors[factor].letter == problem.op->coupling.factor;
  std::vector<Tensors> operands(parts);
  std::vector<std::vector<LocalTensor>> locals(parts);
  for (int64_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < problem.operands.size(); ++i) {
      operands[part].push_back(
          Shard(problem.operands[i], rule.operands[i], factor, part, parts));
      if (mistake == Mistake::kLocalIndex) operands[part].back().ForgetPlace();
      locals[part].push_back(operands[part].back().Local());
      if (reduction && part > 0 && rule.terms[i] > 0 &&
          !Holds(rule.operands[i], factor) &&
          mistake != Mistake::kTermsEverywhere) {
        locals[part].back().data = nullptr;
      }
    }
  }
  // The states of all shards of a coupled factor, in rank order.
  std::vector<HostTensor> states(parts);
  if (problem.op->coupling.factor != 0) {
    std::vector<double> gathered;
    for (int64_t part = 0; part < parts; ++part) {
      states[part] = StateOf(problem, locals[part], DType::kFloat64);
      const std::vector<double> values = states[part].Values();
      gathered.insert(gathered.end(), values.begin(), values.end());
    }
    Shape shape = states[0].shape();
    shape.insert(shape.begin(), parts);
    for (int64_t part = 0; part < parts; ++part) {
      if (coupled && mistake != Mistake::kOwnStateOnly) {
        states[part] = HostTensor(shape, DType::kFloat64, gathered);
      }
      locals[part].push_back(states[part].Local());
    }
  }

  Tensors whole;
  for (const HostTensor& initial : problem.initial) {
    whole.emplace_back(initial.shape(), initial.dtype());
  }
  for (int64_t part = 0; part < parts; ++part) {
    Tensors results;
    for (size_t k = 0; k < rule.results.size(); ++k) {
      results.push_back(
          Shard(problem.initial[k], rule.results[k], factor, part, parts));
    }
    const RunKernel run = mistake == Mistake::kUnmaskedIds
                              ? RunKernel(UnmaskedEmbedding)
                              : KernelNamed(problem.op->name);
    Call(problem, run, locals[part], results);
    for (size_t k = 0; k < results.size(); ++k) {
      if (coupled && !Holds(rule.results[k], factor)) {
        whole[k] = results[k];  // whole on every shard
      } else {
        whole[k].Add(results[k]);
      }
    }
  }
  return whole;
}

// The largest difference, relative to the largest value. Equal infinities
// (log-sum-exp of a query that sees nothing) do not differ.
double Difference(const Tensors& a, const Tensors& b) {
  double worst = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    double largest = 1;
    double difference = 0;
    for (int64_t i = 0; i < a[k].elements(); ++i) {
      const double x = a[k].At(i);
      const double y = b[k].At(i);
      if (x == y) continue;
      if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
      difference = std::max(difference, std::abs(x - y));
      largest = std::max(largest, std::abs(x));
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

// ---- The contract -----------------------------------------------------------

class KernelContract : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(, KernelContract, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// Sum of dy * y0.
double Loss(const Problem& problem, const HostTensor& dy) {
  const HostTensor y = Compute(problem)[0];
  double loss = 0;
  for (int64_t i = 0; i < y.elements(); ++i) loss += dy.At(i) * y.At(i);
  return loss;
}

// (loss(x + h u) - loss(x - h u)) / 2h for operand x. In fp64 with h = 1e-5
// both the truncation, O(h^2), and the rounding, O(1e-16 / h), are near 1e-10.
double Slope(const Problem& problem, const HostTensor& dy, size_t operand,
             const std::vector<double>& direction) {
  constexpr double kStep = 1e-5;
  double loss[2];
  for (int side = 0; side < 2; ++side) {
    Problem moved = problem;
    HostTensor& x = moved.operands[operand];
    for (int64_t i = 0; i < x.elements(); ++i) {
      x.Set(i, x.At(i) + (side == 0 ? -kStep : kStep) *
                             direction[static_cast<size_t>(i)]);
    }
    loss[side] = Loss(moved, dy);
  }
  return (loss[1] - loss[0]) / (2 * kStep);
}

void ExpectGradient(const Problem& problem, const HostTensor& dy,
                    size_t operand, const HostTensor& gradient) {
  const auto n = static_cast<size_t>(gradient.elements());
  constexpr size_t kEveryElement = 300;
  if (n <= kEveryElement) {
    for (size_t i = 0; i < n; ++i) {
      std::vector<double> direction(n);
      direction[i] = 1;
      const double expected = Slope(problem, dy, operand, direction);
      EXPECT_NEAR(gradient.At(static_cast<int64_t>(i)), expected,
                  1e-8 * (1 + std::abs(expected)))
          << "operand " << operand << " element " << i;
    }
    return;
  }
  Rng rng(17);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::vector<double> direction(n);
    double expected = 0;
    for (size_t i = 0; i < n; ++i) {
      direction[i] = 2 * rng.Uniform01() - 1;
      expected += direction[i] * gradient.At(static_cast<int64_t>(i));
    }
    const double slope = Slope(problem, dy, operand, direction);
    EXPECT_NEAR(expected, slope, 1e-7 * (1 + std::abs(slope)))
        << "operand " << operand;
  }
}

TEST_P(KernelContract, GradientsMatchFiniteDifferences) {
  const Problem problem = ForwardProblem(GetParam());
  if (problem.op->adjoints.empty()) return;
  const Tensors results = Compute(problem);
  const HostTensor dy = OutputGradient(problem);
  std::set<size_t> covered;
  for (const AdjointDef& adjoint : problem.op->adjoints) {
    if (adjoint.op.empty()) {
      const size_t operand =
          Symbols(adjoint.signature.substr(adjoint.signature.find('>') + 1))[0]
              .index;
      ExpectGradient(problem, dy, operand, dy);
      covered.insert(operand);
      continue;
    }
    const auto backward = Adjoint(problem, results, dy, adjoint);
    if (!backward) continue;
    const Tensors gradients = Compute(backward->problem);
    for (size_t k = 0; k < gradients.size(); ++k) {
      ExpectGradient(problem, dy, backward->gradients_of[k], gradients[k]);
      covered.insert(backward->gradients_of[k]);
    }
  }
  for (size_t i = 0; i < problem.operands.size(); ++i) {
    const HostTensor& operand = problem.operands[i];
    const bool differentiable =
        IsFloat(operand.dtype()) && !operand.shape().empty();
    EXPECT_EQ(covered.count(i), differentiable ? 1u : 0u) << "operand " << i;
  }
}

TEST_P(KernelContract, ShardsOfEverySplitGiveTheWhole) {
  for (const Problem& problem : AllProblems(GetParam())) {
    const Tensors whole = Compute(problem);
    for (size_t f = 0; f < problem.rule.factors.size(); ++f) {
      const int factor = static_cast<int>(f);
      if (!problem.rule.factors[f].splittable) continue;
      for (int64_t parts : {2, 3}) {
        if (Extent(problem, factor) < parts) continue;
        EXPECT_LE(Difference(whole, ComputeSplit(problem, factor, parts)),
                  1e-12)
            << problem.op->name << " split " << parts << " ways on "
            << problem.rule.factors[f].letter;
      }
    }
  }
}

TEST_P(KernelContract, Fp32AgreesWithFp64) {
  for (const Problem& problem : AllProblems(GetParam())) {
    const Tensors single = Compute(Converted(problem, DType::kFloat32, 0));
    // Rounding of 2^-24 = 6e-8, some hundreds of times, in a random walk.
    EXPECT_LE(Difference(Compute(problem), single), 5e-6) << problem.op->name;
  }
}

// On the same 16-bit values: what fp64 gives, but for the error of fp32 and
// half a unit in the last of 8 or 11 bits.
TEST_P(KernelContract, SixteenBitResultsAreRoundedOnce) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const double half_unit = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    for (const Problem& problem : AllProblems(GetParam())) {
      const Problem stored = Converted(problem, dtype, 0);
      const Tensors exact = Compute(Converted(stored, DType::kFloat64, 0));
      EXPECT_LE(Difference(exact, Compute(stored)), half_unit + 5e-6)
          << problem.op->name << " " << NameOf(dtype);
    }
  }
}

// As gradients of weights are.
TEST_P(KernelContract, Fp32ResultsOf16BitOperandsAreNotRounded) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Problem& problem : AllProblems(GetParam())) {
      Problem stored = problem;
      for (HostTensor& tensor : stored.operands) tensor = tensor.As(dtype);
      for (HostTensor& tensor : stored.initial) {
        tensor = tensor.As(DType::kFloat32);
      }
      const Tensors results = Compute(stored);
      const Tensors expected = Compute(Converted(stored, DType::kFloat32, 0));
      for (size_t k = 0; k < results.size(); ++k) {
        EXPECT_TRUE(results[k].SameBits(expected[k]))
            << problem.op->name << " result " << k << " " << NameOf(dtype);
      }
    }
  }
}

TEST_P(KernelContract, BitsDoNotDependOnAlignment) {
  for (const Problem& problem : AllProblems(GetParam())) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                        DType::kFloat16}) {
      const Tensors aligned = Compute(Converted(problem, dtype, 0));
      for (int64_t skew : {1, 3, 5}) {
        const Tensors skewed = Compute(Converted(problem, dtype, skew));
        for (size_t k = 0; k < aligned.size(); ++k) {
          EXPECT_TRUE(aligned[k].SameBits(skewed[k]))
              << problem.op->name << " result " << k << " " << NameOf(dtype)
              << " skew " << skew;
        }
      }
    }
  }
}

// The case with so many samples, or elements, that threads share the work.
Case Enlarged(Case c) {
  for (char factor : {'b', 'n'}) {
    const auto it = c.extents.find(factor);
    if (it == c.extents.end()) continue;
    const int64_t elements = ForwardProblem(c).operands[0].elements();
    it->second *= 1 + 70000 / elements;
  }
  return c;
}

TEST_P(KernelContract, BitsDoNotDependOnThreads) {
  for (const Problem& problem : AllProblems(Enlarged(GetParam()))) {
    const Problem single = Converted(problem, DType::kFloat32, 0);
    const Tensors expected = Compute(single);
    for (int count : {2, 3}) {
      ThreadPool threads(count);
      const Tensors actual = Compute(single, /*accumulate=*/false, &threads);
      for (size_t k = 0; k < actual.size(); ++k) {
        EXPECT_TRUE(actual[k].SameBits(expected[k]))
            << problem.op->name << " result " << k << ", " << count
            << " threads";
      }
    }
  }
}

TEST_P(KernelContract, AccumulationAdds) {
  for (const Problem& problem : AllProblems(GetParam())) {
    if (!FindCpuKernel(problem.op->name).value()->accumulates) continue;
    // Merges (tests/unit/runtime/kernels_test.cc).
    if (problem.op->name == "attention") continue;
    const Tensors fresh = Compute(problem);
    Problem again = problem;
    for (HostTensor& result : again.initial) {
      for (int64_t i = 0; i < result.elements(); ++i) result.Set(i, 1);
    }
    const Tensors sums = Compute(again, /*accumulate=*/true);
    for (size_t k = 0; k < sums.size(); ++k) {
      // The log-sum-exp is a statistic, not a sum.
      const double base = problem.op->name == "cross_entropy" && k > 0 ? 0 : 1;
      for (int64_t i = 0; i < sums[k].elements(); ++i) {
        EXPECT_NEAR(sums[k].At(i), base + fresh[k].At(i), 1e-12)
            << problem.op->name << " result " << k << " element " << i;
      }
    }
  }
}

// f(a + b) = f(a) + f(b) in each set of operands that OpDef::linear declares.
TEST_P(KernelContract, LinearWhereDeclared) {
  const std::vector<Problem> problems = AllProblems(GetParam());
  for (size_t p = 0; p < problems.size(); ++p) {
    for (const std::vector<size_t>& set : problems[p].op->linear) {
      Problem a = problems[p];
      if (set.back() >= a.operands.size()) continue;
      const auto in_set = [&](size_t i) {
        return std::find(set.begin(), set.end(), i) != set.end();
      };
      for (size_t i = 0; i < a.operands.size(); ++i) {
        if (in_set(i) || a.rule.terms[i] == a.rule.terms[set[0]]) continue;
        for (int64_t e = 0; e < a.operands[i].elements(); ++e) {
          a.operands[i].Set(e, 0);
        }
      }
      Problem b = a;
      Problem sum = a;
      Rng rng(17);
      for (size_t i : set) {
        FillRandom(b.operands[i], rng);
        for (int64_t e = 0; e < sum.operands[i].elements(); ++e) {
          sum.operands[i].Set(e, a.operands[i].At(e) + b.operands[i].At(e));
        }
      }
      const Tensors of_a = Compute(a);
      const Tensors of_b = Compute(b);
      const Tensors of_sum = Compute(sum);
      const size_t results = p == 0 ? 1 : of_sum.size();
      for (size_t k = 0; k < results; ++k) {
        for (int64_t e = 0; e < of_sum[k].elements(); ++e) {
          ASSERT_NEAR(of_sum[k].At(e), of_a[k].At(e) + of_b[k].At(e), 1e-9)
              << a.op->name << " result " << k << " element " << e;
        }
      }
    }
  }
}

// ---- The tables -------------------------------------------------------------

TEST(KernelTable, EveryOperatorHasItsKernels) {
  std::set<std::string> wanted;
  for (const OpDef& op : Ops()) {
    wanted.insert(std::string(op.name));
    if (op.coupling.factor != 0) wanted.insert(std::string(op.name) + ".state");
  }
  std::multiset<std::string> found;
  for (const Kernel& kernel : CpuKernels()) {
    found.insert(std::string(kernel.name));
  }
  EXPECT_THAT(found, ::testing::ElementsAreArray(wanted));
}

TEST(KernelTable, EveryOperatorHasACase) {
  std::set<std::string_view> tested;
  for (const Case& c : Cases()) {
    tested.insert(c.op);
    for (const AdjointDef& adjoint : OpNamed(c.op).adjoints) {
      tested.insert(adjoint.op);
    }
  }
  for (const OpDef& op : Ops()) {
    EXPECT_EQ(tested.count(op.name), 1u)
        << op.name << ": add a line to Cases()";
  }
}

TEST(KernelTable, UnknownNameIsAnError) {
  const auto kernel = FindCpuKernel("layer_nrom");
  ASSERT_FALSE(kernel.has_value());
  EXPECT_THAT(kernel.error().message,
              ::testing::HasSubstr("did you mean 'layer_norm'"));
}

// ---- Mistakes that the splitting contract must catch ------------------------

const Case& CaseNamed(std::string_view name) {
  for (const Case& c : Cases()) {
    if (c.name == name) return c;
  }
  TESSERA_CHECK(false) << name;
  return Cases()[0];
}

void ExpectCaught(std::string_view name, char letter, Mistake mistake) {
  const Problem problem = ForwardProblem(CaseNamed(name));
  const int factor = problem.rule.FactorOf(letter);
  const Tensors whole = Compute(problem);
  for (int64_t parts : {2, 3}) {
    EXPECT_LE(Difference(whole, ComputeSplit(problem, factor, parts)), 1e-12);
    EXPECT_GT(Difference(whole, ComputeSplit(problem, factor, parts, mistake)),
              0.01)
        << parts << " parts";
  }
}

TEST(PlantedMistake, BiasOnEveryShard) {
  ExpectCaught("linear_bias", 'i', Mistake::kTermsEverywhere);
}

TEST(PlantedMistake, LocalDropoutIndex) {
  for (char factor : {'b', 's', 'h'}) {
    ExpectCaught("dropout", factor, Mistake::kLocalIndex);
  }
}

TEST(PlantedMistake, UnmaskedEmbedding) {
  ExpectCaught("embedding", 'v', Mistake::kUnmaskedIds);
}

TEST(PlantedMistake, LocalVocabulary) {
  ExpectCaught("embedding", 'v', Mistake::kLocalIndex);
  ExpectCaught("cross_entropy", 'v', Mistake::kLocalIndex);
}

// Experts, places, tokens of another shard are taken for its own.
TEST(PlantedMistake, LocalSlots) {
  ExpectCaught("moe_collect", 'e', Mistake::kLocalIndex);
  ExpectCaught("moe_collect", 't', Mistake::kLocalIndex);
}

TEST(PlantedMistake, MeanOfShardMeans) {
  ExpectCaught("moe_balance", 'b', Mistake::kLocalIndex);
}

TEST(PlantedMistake, UnmergedStates) {
  ExpectCaught("cross_entropy", 'v', Mistake::kOwnStateOnly);
}

}  // namespace
}  // namespace tessera
