#pragma once
// IndexRule: the loop extents (factors) of an operator in einsum notation, and
// with them how the operator may be split.
//
//   "bsi,oi+o->bso"     linear: x[b,s,i] times w[o,i], plus bias[o]
//   "bsh!,h->bsh,bs"    RMS norm: h cannot be split; two results
//   "bs->"              a scalar result
//
// One letter is one factor, and one tensor dimension: a dimension that holds
// several factors, such as (g r d), is several dimensions. Operands are
// separated by ',' (a product) or '+' (an additive term: where a reduction
// factor is split, a term that lacks it is added at coordinate 0 only).
// '!' behind a letter marks a factor that cannot be split.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// What SOAP (Jia et al., SysML 2019) calls the dimensions of an operator; the
// fourth letter, operator, is the choice of its device group.
enum class Role : uint8_t {
  kSample,     // 'b': independent samples of the batch
  kAttribute,  // of the first operand and a result: length, height, heads
  kParameter,  // of a result but not of the first operand: splits the weight
  kReduction,  // of no result: a split leaves a partial sum
};

struct Factor {
  char letter = 0;
  Role role = Role::kAttribute;
  bool splittable = true;
  bool operator==(const Factor&) const = default;
};

// At most this many factors in a rule and dimensions in a tensor.
inline constexpr int kMaxFactors = 10;
inline constexpr int kMaxDims = 6;

// The factors that index one operand or result, dimension by dimension.
using Indices = std::vector<uint8_t>;

struct IndexRule {
  std::vector<Factor> factors;    // in order of first appearance
  std::vector<Indices> operands;  // each entry indexes `factors`
  std::vector<Indices> results;
  std::vector<uint8_t> terms;  // term number of each operand

  static Result<IndexRule> Parse(std::string_view text);
  std::string ToString() const;

  // Index into `factors`, or -1.
  int FactorOf(char letter) const;
  bool operator==(const IndexRule&) const = default;
};

// True when `indices` holds factor `f`.
bool Holds(const Indices& indices, int f);

// The extent of each factor, read off the operands' and results' shapes, or
// an error that names the factor and the two extents that disagree.
Result<std::vector<int64_t>> Extents(
    const IndexRule& rule, std::span<const std::vector<int64_t>> operand_shapes,
    std::span<const std::vector<int64_t>> result_shapes);

}  // namespace tessera
