#pragma once
// ProfileDb: times measured on a machine, by what was timed. The key is
// compared field by field, so a row is found only for exactly what was timed.
//
// A kernel is keyed by its name, the operator's rule and the extents that one
// rank works on: what a Task of the lowering gives a rank, and what the
// profiler runs. A collective is keyed by its kind, the ranks that take part,
// the hosts they are on and the payload as costmodel/collective defines it.
// A plain value; const methods may run concurrently.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/ir/dtype.h"
#include "planner/lower/comm_kind.h"

namespace tessera {

// Behind the name of a kernel that adds to its results instead of writing them.
inline constexpr std::string_view kAdds = ".adds";

// Fields are compared in this order, so that the rows of one family (up to
// `nodes`) are neighbours.
struct ProfileKey {
  // Of a kernel, perhaps with kAdds, "copy", or NameOf(CommKind).
  std::string name;
  DType dtype = DType::kFloat32;  // of the kernel's first float tensor; fp32
                                  // for a collective
  std::string device;             // DeviceType::name
  int ranks = 1;     // that exchange with one another; 1 for a kernel
  int nodes = 1;     // hosts that these are on
  std::string rule;  // IndexRule::ToString(); empty for a collective
  std::vector<int64_t> extents;  // local, by factor of `rule`
  Bytes payload;                 // of a collective

  auto operator<=>(const ProfileKey&) const = default;
};

struct Measurement {
  double median_s = 0;
  double spread = 0;  // (third - first quartile) / median
  int samples = 0;
  bool operator==(const Measurement&) const = default;
};

// Where and how the rows were measured.
struct ProfileOrigin {
  std::string host;       // CPU model
  std::string date;       // YYYY-MM-DD
  std::string libraries;  // "Eigen 3.4.0, tessera 0.1.0"
  int ranks_at_once = 1;  // all of them working while any was timed
  int threads = 0;        // of each of them on the host's cores; 0: not said
  bool operator==(const ProfileOrigin&) const = default;
};

struct ProfileDb {
  ProfileOrigin origin;
  std::map<ProfileKey, Measurement> rows;

  // Null when exactly this was not measured.
  const Measurement* Find(const ProfileKey& key) const;

  using Iterator = std::map<ProfileKey, Measurement>::const_iterator;
  // The rows that agree with `key` in name, dtype, device, ranks and nodes.
  std::pair<Iterator, Iterator> Family(const ProfileKey& key) const;
  // Those of them that are a collective's, by payload: without a rule, which
  // kernels have (there is a `gather` of either kind).
  std::pair<Iterator, Iterator> CollectiveRows(const ProfileKey& key) const;

  bool operator==(const ProfileDb&) const = default;
};

ProfileKey CollectiveKey(CommKind kind, std::string_view device, int ranks,
                         int nodes, Bytes payload);

// All that is wrong: an empty name, a rule that does not parse or that the
// extents do not fit, a row without a rule that is of no CommKind, times that
// are not positive or beyond 1e6 s. `where` is "rows[3].rule".
std::vector<Error> Validate(const ProfileDb& profile);

}  // namespace tessera
