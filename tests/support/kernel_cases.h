#pragma once
// Calls of every operator and its adjoints on small tensors, for the tests that
// hold kernels to their contract: those of the CPU (tests/contract) and of CUDA
// (tests/kernels). An operator without a case fails there; a new one needs one
// line among the cases of its family.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/kernels/kernel.h"
#include "runtime/thread_pool.h"
#include "tests/support/host_tensor.h"

namespace tessera {

using Tensors = std::vector<HostTensor>;

// How an int32 operand is filled, along its last dimension.
struct Ints {
  enum Kind { kRandom, kIncreasing, kShuffled } kind = kRandom;
  int32_t low = 0;   // of kRandom
  int32_t high = 0;  // exclusive
};

struct KernelCase {
  std::string name;
  std::string op;
  std::string rule;  // empty: the operator's
  std::map<char, int64_t> extents;
  std::vector<Attribute> attributes = {};
  std::map<size_t, Ints> ints = {};  // by operand
  bool in_place = false;             // results are read, too
  // Operands are positive, and above this: for functions with a pole at zero.
  double above = 0;
  std::set<size_t> conditions = {};  // operands that are 0 or 1

  friend void PrintTo(const KernelCase& c, std::ostream* out) {
    *out << c.name;
  }
};

const std::vector<KernelCase>& KernelCases();
// REQUIRES: there is one of that name.
const KernelCase& KernelCaseNamed(std::string_view name);

// One call of an operator on whole tensors.
struct Problem {
  const OpDef* op = nullptr;
  IndexRule rule;
  std::vector<Attribute> attributes;
  Tensors operands;
  Tensors initial;  // the results before the call: shapes, or values in place
};

// In fp64.
Problem ForwardProblem(const KernelCase& c);
// The case's operator and all its adjoints.
std::vector<Problem> AllProblems(const KernelCase& c);
// The problem with floats of another dtype and buffers of another alignment.
Problem Converted(Problem problem, DType dtype, int64_t skew);

// Between -1 and 1, away from zero.
void FillRandom(HostTensor& tensor, Rng& rng);

using RunKernel =
    std::function<void(std::string_view kernel, const KernelCall&)>;
void RunCpuKernel(std::string_view kernel, const KernelCall& call);

struct CallOptions {
  RunKernel run = RunCpuKernel;
  bool accumulate = false;
  ThreadPool* threads = nullptr;
};

// The results. States of a coupled operator are fp64 where the first result is,
// and else fp32.
Tensors Compute(const Problem& problem, const CallOptions& options = {});

// Runs the problem on shards of one factor and puts the results together:
// shards are placed, partial sums added.
enum class Mistake {
  kNone,
  kTermsEverywhere,  // additive terms on every shard
  kLocalIndex,       // shards that take themselves for the whole
  kOwnStateOnly,     // states are not exchanged
};
Tensors ComputeSplit(const Problem& problem, int factor, int64_t parts,
                     const CallOptions& options = {},
                     Mistake mistake = Mistake::kNone);
// Of the factor.
int64_t Extent(const Problem& problem, int factor);

// "dx2" in an adjoint's signature is gradient 2 of an operand.
struct Symbol {
  bool gradient = false;
  bool of_result = false;
  size_t index = 0;
};
std::vector<Symbol> Symbols(std::string_view text);

struct AdjointProblem {
  Problem problem;
  std::vector<size_t> gradients_of;  // operand of each result
};
// How many results of the problem have gradients that its adjoints read; all
// are of one shape.
size_t ResultsWithGradients(const Problem& forward);
// That of result k, where that of the first is dy: another one for each.
HostTensor GradientOfResult(const HostTensor& dy, size_t k);
// The adjoint's call for the loss sum(dy * y0), gradients of further results
// times these added, or nothing where the node lacks
// the operand (no bias) or the adjoint passes dy through.
std::optional<AdjointProblem> Adjoint(const Problem& forward,
                                      const Tensors& results,
                                      const HostTensor& dy,
                                      const AdjointDef& adjoint);
HostTensor OutputGradient(const Problem& forward);

const OpDef& OpNamed(std::string_view name);

// The largest difference, relative to the largest value or to 1. Equal
// infinities (log-sum-exp of a query that sees nothing) do not differ.
double Difference(const Tensors& a, const Tensors& b);

}  // namespace tessera
