#pragma once
// The profiler: times the runtime's own kernels, copies and collectives on the
// devices of a job into a profile.
//
// All ranks of the job call Profile together and time the same case at the same
// time, since ranks may share the host's cores, its caches and its memory: a
// time is what a rank gets while its peers work too. Behind a barrier a sample
// is the mean of several runs in a row, and of the ranks that take part; a row
// is the median of the samples, with their spread.
//
// On the host five samples are taken by the clock, each of as many runs as fill
// some milliseconds, so that it spans several time slices of the operating
// system where ranks outnumber cores.
//
// On a device with queues (a GPU) twenty samples are taken, each of up to 64
// runs between two marks on the queue. The host waits for none of them. Kernels
// do not even begin before all of a sample are enqueued, so that the time
// between them is the device's and not the host's; a collective, which may need
// the host to go on, begins at once.
//
// A run, of an exchange too, works on other buffers than those before it: as
// many take turns as fill twice the caches that the rank has at most
// (stopwatch.h: its share of the host's last-level caches, or a GPU's L2), but
// not more than 64 sets of buffers (SetsInTurn). So caches are cold where a run
// works on more than a 63rd of them; smaller ones find there what fits 64
// times. On a GPU as much is written before each sample, which touches no
// buffer twice unless its runs fill that.

#include <atomic>
#include <functional>
#include <optional>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/base/units.h"
#include "profiler/profile_cases.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

struct ProfilerOptions {
  // Cases that there is no time for are left out: those that all samples of
  // would take longer by prediction than what is left, too. Of others that do
  // fewer samples are taken.
  double time_limit_s = 60;
  // A sample's least time. By default what the time limit leaves for each,
  // within what the device needs.
  std::optional<double> sample_s;
  // Of buffers that take turns; by default the device's figure (above).
  std::optional<Bytes> rotated;
  // On the host, those that its ranks have together; by default all have those
  // of this process.
  std::optional<int> cores;
  // On a device with queues, products run for 5 ms before each sample: in a
  // step products take most of the time, and the clocks that a GPU's power then
  // allows are those that kernels have there. A case takes 0.15 s longer.
  bool under_load = false;
  // Rows that are there: not measured again unless `again`, and part of the
  // result. Those of rank 0 count.
  ProfileDb known;
  bool again = false;
  // Called on rank 0 every few seconds, and before an interruption returns,
  // with all rows there are.
  std::function<Result<void>(const ProfileDb&)> save;
  // Set on any rank: no further case is begun. May be null.
  const std::atomic<bool>* stop = nullptr;
  // Called now and then, on every rank: cases done, and all that were missing.
  std::function<void(size_t done, size_t all)> progress;
};

struct ProfilerResult {
  ProfileDb profile;     // on rank 0 with what was known
  size_t measured = 0;   // cases
  size_t left_out = 0;   // for want of time
  size_t too_large = 0;  // for the device's memory
  bool interrupted = false;
};

// Called by all ranks of `world`, on their devices, with equal cases and
// options (but for what is rank 0's). The order is that of value: first the
// kernels and exchanges that plans spend most time on, but of kernels that do
// about the same work of the same rule in other shapes one alone, and none
// where such a row is known, as interpolation does best without them; then
// these; then what no plan needs. A message on the host is behind the copy that
// its row is made with.
//
// kNotFound for a kernel that the device has not, before anything is timed;
// errors of the device and the world, and of `save`.
Result<ProfilerResult> Profile(const ProfileCases& cases, RankDevice& device,
                               CommWorld& world,
                               const ProfilerOptions& options);

}  // namespace tessera
