#pragma once
// OpDef: all the planner knows of an operator kind, in one declaration. From
// its index rule follow shapes, legal splits, layouts, FLOPs, bytes and the
// rules of its adjoints; ops.def lists the operators, planner/ops/ has a file
// for each. Immutable, owned by the table, alive for the whole process.

#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/units.h"
#include "planner/ir/dtype.h"
#include "planner/ir/index_rule.h"

namespace tessera {

// Named numbers of a node ("epsilon", "theta"), sorted by name.
struct Attribute {
  std::string name;
  double value = 0;
  bool operator==(const Attribute&) const = default;
};

// A named number that each node of an operator has, and what it may be.
struct AttributeDef {
  std::string_view name;
  double least = std::numeric_limits<double>::lowest();
  double most = std::numeric_limits<double>::max();
  bool whole = false;
  bool list = false;  // it may be absent or occur several times, in order
};

// One adjoint of an operator: which backward operator computes which
// gradients, and exactly what it reads. `signature` is
// "dy0,x1->dx0" over: xN operand N, yN result N, dyN gradient of result N,
// dxN gradient of operand N. An adjoint with an empty `op` passes dy through
// unchanged. Operands and results that a node lacks (no bias, fewer branches)
// are left out, with their gradients, and adjoints that would make none.
struct AdjointDef {
  std::string_view op;
  std::string_view signature;
};

// The most steps of a sequence that one operator takes apart or puts together.
inline constexpr size_t kMostSteps = 256;

// One call of an operator on one rank, as the cost functions see it.
struct OpCall {
  const IndexRule* rule = nullptr;
  std::span<const int64_t> extents;  // local extent of each factor
  std::span<const DType> operand_dtypes;
  std::span<const DType> result_dtypes;
  std::span<const Attribute> attributes;

  // Product of the extents of all factors.
  double Points() const;
  // Extent of a factor. REQUIRES: the rule has it.
  int64_t Extent(char letter) const;
  // REQUIRES: the attribute exists.
  double attribute(std::string_view name) const;
};

// Factors over which an operator keeps a state that is merged between shards (a
// softmax's axis, a batch norm's samples and pixels). The operator then runs as
// two kernels, "NAME.state" and "NAME": the first writes `state_width` fp32
// numbers for each point of `state_indices`, the states of all shards are
// gathered in rank order, and the second reads them behind its operands.
struct Coupling {
  std::string_view factors;  // empty: the operator has none
  // Factors of the state, such as "bs": those of them that the rule has.
  std::string_view state_indices;
  int state_width = 0;
  // The attribute that says in how many consecutive groups of equal size the
  // samples of a microbatch are merged ('b', one of `factors`); empty: in one.
  // The state has a dimension of groups before `state_indices`. A split that
  // cuts no group has nothing to exchange.
  std::string_view groups = {};

  bool exists() const { return !factors.empty(); }
  bool Merges(char factor) const {
    return factors.find(factor) != std::string_view::npos;
  }
};

// How an operator's time is bounded, for the analytical cost source.
enum class OpClass : uint8_t {
  kMatmul,     // runs on matrix units
  kAttention,  // matrix units, with a softmax between the two products
  kMemory,     // bounded by memory traffic
  kRoofline,   // memory traffic or FLOPs at the device's peak, what is longer
};

// What a forward node's own rule must look like, for an operator that has no
// default or takes others besides it: kernels rely on the order of the indices.
struct RuleForm {
  std::string_view text;                        // for the error message
  bool (*accepts)(const IndexRule&) = nullptr;  // null: any
};

// A factor whose extent no operand gives: a node's attribute does.
struct FactorSize {
  char factor = 0;
  std::string_view attribute;
};

// Which results a call can add to what they hold (KernelCall::accumulate), so
// that a gradient of a weight grows over microbatches and uses. What others
// make is written anew, and added by a `sum` behind it.
enum class Accumulation : uint8_t {
  kNone,
  kAll,
  kFirst,        // the loss, not the statistics behind it
  kBehindFirst,  // gradients of weights, not that of the input
};

struct OpDef {
  std::string_view name;
  std::string_view summary;
  // The default index rule; empty when each node gives its own (linear,
  // elementwise), which must then have the operator's form.
  std::string_view rule = {};
  // Besides the default: the same for samples that are no sequences.
  std::string_view rule_of_samples = {};
  RuleForm form = {};
  OpClass op_class = OpClass::kMemory;
  std::vector<AdjointDef> adjoints = {};
  // Floating-point operations of a call (m*n*k counts 2*m*n*k). Null: as many
  // as `flops_per_point` says.
  Flops (*flops)(const OpCall&) = nullptr;
  double flops_per_point = 0;
  // Memory traffic of a call; null for the sum of all operands and results.
  Bytes (*bytes)(const OpCall&) = nullptr;
  // The attributes that a node must have; it may have no others, and one of
  // each that is no list.
  std::vector<AttributeDef> attributes = {};
  // What is wrong with a node's extents and attributes beyond its rule and the
  // ranges of its attributes; empty for nothing. Null: nothing can be.
  std::string (*problem)(const OpCall&) = nullptr;
  // Which operands are int32 (ids, labels, positions); the others are floats.
  std::vector<size_t> integer_operands = {};
  // Which results are int32.
  std::vector<size_t> integer_results = {};
  // The first result is of at least fp32, like the statistics behind it.
  bool wide = false;
  std::vector<FactorSize> sizes = {};
  Coupling coupling = {};
  // Factors whose shards exchange what they must within the operator: their
  // sums are whole. Its time has the exchange in it.
  std::string_view exchanged = {};
  // A factor whose blocks the operator can take one after another, in any
  // order: its kernel accumulates, and merges the results over the blocks of
  // several calls. (An adjoint's results are sums over them.) 0: none.
  char streamed = 0;
  // Reads an image (factors h and w) by windows at places (y and x), or is a
  // gradient of what does: where places are split, the image is, too
  // (planner/plan/windows.h).
  bool windows = false;
  // Runs once a step over the whole batch, before the first microbatch.
  bool once_per_step = false;
  // The sets of operands in which the first result, or all results of an
  // adjoint, is linear while the others stay as they are: a product in each
  // operand alone, a sum in all together. (Operands of another term of the
  // rule, a bias, count as zero.) Nothing else may read a partial sum.
  std::vector<std::vector<size_t>> linear = {};
  Accumulation accumulation = Accumulation::kNone;
};

// Whether a call that accumulates adds to result k.
bool AddsToResult(const OpDef& op, size_t k);

// Whether an operator is linear in several operands at once, and these are all
// of a node's: partial sums of all of them pass through it as one. Where an
// operator is linear in a single operand nothing is won, so that lowering
// resolves the sum in front of it.
bool AddsPartialSums(const OpDef& op, size_t operands);

// All of Tessera's operators, in the order of ops.def.
std::span<const OpDef> Ops();

// An operator that a user describes in a graph file (proto/graph.proto,
// Operator): planned and priced, but nothing runs it. Results behind the first
// are kept for its gradients, and no other node reads them.
struct OwnOp {
  std::string name;
  std::string summary;
  std::string rule;  // which each of its nodes has
  // For each point of the rule, forward and for each operand's gradient.
  double flops_per_point = 0;
  double backward_flops_per_point = 0;
  // The gradients are computed from the result besides the operands.
  bool backward_reads_result = false;
  std::vector<size_t> integer_operands = {};
  // One operator, NAME_d, makes the gradients of all operands.
  bool one_backward = false;
  // Factors whose shards exchange what they must within a call.
  std::string exchanged = {};
  // Operands that no gradient reads.
  std::vector<size_t> forward_operands = {};
  bool operator==(const OwnOp&) const = default;
};

// Defines it for the whole process, with an operator NAME_dN for the gradient
// of each operand N, or NAME_d; once more the same is the same. Errors name the
// field of OwnOp that is wrong. Thread-safe.
Result<const OpDef*> DefineOp(const OwnOp& own);

// The description of an operator that DefineOp made, or of that whose gradient
// it is; null for Tessera's.
const OwnOp* OwnOpOf(const OpDef& op);

// An operator of Tessera's or, behind them, of DefineOp. Thread-safe.
Result<const OpDef*> FindOp(std::string_view name);

// FLOPs that are proportional to the number of points.
template <int kPerPoint>
Flops FlopsPerPoint(const OpCall& call) {
  return {kPerPoint * call.Points()};
}

// Rules with `kOperands` operands and one result, all of the same indices.
template <size_t kOperands>
bool IsElementwise(const IndexRule& rule) {
  if (rule.operands.size() != kOperands || rule.results.size() != 1) {
    return false;
  }
  for (const Indices& operand : rule.operands) {
    if (operand != rule.results[0]) return false;
  }
  return true;
}
inline constexpr RuleForm kUnaryForm = {
    "one operand, with the indices of the result", IsElementwise<1>};
inline constexpr RuleForm kBinaryForm = {
    "two operands, both with the indices of the result", IsElementwise<2>};

// What is wrong with an attribute of a node of `op`: an unknown name, a value
// out of its range. Empty for nothing.
std::string AttributeProblem(const OpDef& op, const Attribute& attribute);

Flops CallFlops(const OpDef& op, const OpCall& call);

// Memory traffic of all operands and results of a call.
Bytes OperandBytes(const OpCall& call);
Bytes CallBytes(const OpDef& op, const OpCall& call);

}  // namespace tessera
