#pragma once
// Where the time of one task comes from: a table of sources in order of trust.
// The first one that knows the task prices it, and the cost says which it was.
//
//   measured      the profile has exactly this kernel (or collective) at
//                 exactly this size. A collective that was measured to take
//                 longer than a larger payload counts as taking as long as that
//                 (other work disturbs measurements one way alone);
//   interpolated  the profile has the same at other sizes. Matrix products of a
//                 GPU whose multiprocessors are known: the analytical time,
//                 times what the kernel's rows of like shape say
//                 (measured_products.h), or, where the profile has none of the
//                 kernel, those of any. Other kernels: straight lines through
//                 log(time) over log(work) of the nearest rows, work being
//                 operations for matrix products and attention, and bytes for
//                 the rest; rows of the same rule if there are any, else all of
//                 the kernel; rows whose work differs by less than 10 % are
//                 one, their mean; only for work in [min/4, 4*max] of what was
//                 measured (its reach), growing at most in proportion there. Of
//                 an operator of the user's own the rows that differ from the
//                 task in one extent, if there are any, and however far they
//                 reach, since nothing else is known of it.
//                 Collectives: straight lines through time over bytes, of the
//                 same ranks and hosts; above the largest, by the last slope
//                 that rises, at most in proportion; below the smallest, its
//                 time;
//   extrapolated  the profile has the kernel at sizes that are further away,
//                 and the device's times are not those of fitted kernels
//                 (kernel_time.h): the time at the end of the reach, times what
//                 the roofline of the work there and here differs by;
//   analytical    matrix products and attention on a GPU whose
//                 multiprocessors are known: tiles, waves and blocks
//                 (kernel_time.h); other kernels: a roofline
//                 (Williams et al., 2009) with the device type's stated
//                 efficiencies,
//                   max(operations / (peak * compute_efficiency),
//                       bytes / (bandwidth * memory_efficiency)) + launch;
//                 collectives: the alpha-beta model of costmodel/collective.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "costmodel/profile/profile_db.h"
#include "costmodel/source/kernel_time.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/ir/op.h"
#include "planner/ir/stack.h"

namespace tessera {

enum class CostSource : uint8_t {
  kMeasured,
  kInterpolated,
  kExtrapolated,
  kAnalytical,
};
inline constexpr int kCostSources = 4;

struct Cost {
  double seconds = 0;
  CostSource source = CostSource::kAnalytical;
};

// One task of one rank, as the sources see it.
struct CostQuery {
  ProfileKey key;
  const DeviceType* device = nullptr;  // of the rank
  // A kernel:
  OpClass op_class = OpClass::kMemory;
  Flops flops;
  Bytes bytes;  // memory traffic
  // Of these operations, and of those of a row of a profile with the key's
  // extents, what is really done.
  double share = 1;
  double share_of_measured = 1;
  // A matrix product, what its operands are rounded to and the memory traffic
  // of that.
  std::optional<MatmulShape> matmul;
  ProductType products = ProductType::kAsValues;
  Bytes rounding;
  double matmul_share = 1;  // of its time, what counts
  // By what its analytical time is to be multiplied, as products of like shape
  // that were measured say (MeasuredProducts).
  std::optional<double> matmul_factor;
  bool factor_of_kernel = false;  // by rows of just this kernel
  // An attention, forward or backward. Fused: the kernel of DefaultAttention
  // where none is named. Unfused: with so many passes over its scores.
  std::optional<AttentionShape> attention;
  bool backward = false;
  std::optional<AttentionKernel> attention_kernel;
  double score_passes = 0;
  // A collective: its time by the alpha-beta model.
  bool collective = false;
  double collective_seconds = 0;
};

struct CostSourceRow {
  std::string_view name;
  std::string_view summary;
  // Nothing when the source does not know the task. `profile` may be null.
  std::optional<Cost> (*price)(const CostQuery& query,
                               const ProfileDb* profile);
};

// Of a query of the call's class of operator, what the call has to do: its
// operations, and the shapes of a matrix product or an attention, which has a
// node and which the stack may do unfused.
void SetWork(const OpDef& op, const Node* node, const OpCall& call,
             const Stack& stack, CostQuery& query);

// In order of trust; the last one always answers.
std::span<const CostSourceRow> CostSources();

// The first answer of the table.
Cost PriceOf(const CostQuery& query, const ProfileDb* profile);

// Operations or bytes of a kernel at the key's extents: what interpolation
// scales by; points of the rule for an operator of the user's own that states
// no operations. All tensors count as the key's dtype. Nothing for a kernel
// that is not an operator's.
std::optional<double> WorkOf(const ProfileKey& key);

// The operator of a kernel: "cross_entropy" of "cross_entropy.state". Null for
// a kernel that is not an operator's.
const OpDef* OperatorOf(std::string_view kernel);

}  // namespace tessera
