#include "runtime/comm/shm_world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>

#include "planner/base/file_descriptor.h"
#include "runtime/comm/deadline.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/region_world.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How long rank 0 waits for another until it says so: as these do of rank 0.
const Duration kPatience = StoreOptions().patience;

// The host as far as memory and pids can be shared: its name, this boot, and
// the namespace of its pids.
std::string HostName() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string HostIdentity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char pids[64] = {};
  if (readlink("/proc/self/ns/pid", pids, sizeof(pids) - 1) < 0) {
    pids[0] = '\0';
  }
  return Text(HostName(), " ", boot, " ", pids);
}

std::string FirstWord(const std::string& text) {
  return text.substr(0, text.find(' '));
}

// The identity of a rank's host, once the rank has come.
Result<std::string> HostOf(int rank, Store& store, const std::string& prefix,
                           Clock::time_point deadline,
                           const CommOptions& options) {
  const std::string key = Text(prefix, "host/", rank);
  const std::string who = Text("rank ", rank);
  bool late = false;
  const Clock::time_point begin = Clock::now();
  auto host = store.Get(key, std::min(kPatience, Left(deadline)), who, late);
  if (late && Left(deadline) > Duration{}) {
    if (options.waiting) options.waiting(who);
    host = store.Get(key, Left(deadline), who, late);
  }
  if (!late) return host;
  // The error names the rank by itself, and has the time of both waits.
  std::string why = host.error().message;
  const std::string in_vain = Text(" s in vain for ", who);
  if (const size_t at = why.find(in_vain); at != std::string::npos) {
    const std::chrono::duration<double> waited =
        std::chrono::round<std::chrono::milliseconds>(Clock::now() - begin);
    why = Text("waited ", waited.count(), " s in vain",
               why.substr(at + in_vain.size()));
  }
  return RankHasNotCome(rank, why);
}

// Rank 0's answer: where the memory is, or why there is none.
Result<std::string> Offer(int size, Store& store, const std::string& prefix,
                          Clock::time_point deadline,
                          const CommOptions& options, int fd, uint64_t token) {
  const std::string mine = HostIdentity();
  for (int r = 1; r < size; ++r) {
    TESSERA_TRY(const std::string theirs,
                HostOf(r, store, prefix, deadline, options));
    if (theirs == mine) continue;
    return Text("no rank ", r, " runs on '", FirstWord(theirs),
                "' and rank 0 on '", FirstWord(mine),
                "': shared memory needs all ranks on one host and in one "
                "container");
  }
  return Text("yes /proc/", getpid(), "/fd/", fd, " ", token);
}

}  // namespace

Result<std::unique_ptr<CommWorld>> MakeShmWorld(int rank, int size,
                                                Store& store,
                                                CommOptions options) {
  if (size < 1 || size > kMaxRegionRanks || rank < 0 || rank >= size) {
    return InvalidInput(Text("rank ", rank, " of ", size,
                             ": shared memory serves 1 to ", kMaxRegionRanks,
                             " ranks"));
  }
  // The n-th world of this job, by the rank's own count of its calls.
  TESSERA_TRY(const int64_t call, store.Add(Text("shm/calls/", rank), 1));
  const std::string prefix = Text("shm/", call, "/");
  // The ranks' first meeting began when they opened the store.
  const Clock::time_point deadline =
      call == 1
          ? store.deadline()
          : Clock::now() +
                std::chrono::nanoseconds(store.timeout().picoseconds / 1000);

  FileDescriptor fd;
  if (rank == 0) {
    fd = FileDescriptor(memfd_create("tessera-ranks", MFD_CLOEXEC));
    if (!fd.is_open()) {
      return Unavailable(
          Text("cannot make shared memory: ", std::strerror(errno)));
    }
  }

  const uint64_t token = std::random_device()() | uint64_t{1} << 63;
  std::shared_ptr<Region> region;
  if (rank == 0) {
    TESSERA_TRY(region, Region::Map(size, fd.get()));
    region->header().token = token;
    TESSERA_TRY(const std::string offer,
                Offer(size, store, prefix, deadline, options, fd.get(), token));
    TESSERA_RETURN_IF_ERROR(store.Set(Text(prefix, "offer"), offer));
  } else {
    TESSERA_RETURN_IF_ERROR(
        store.Set(Text(prefix, "host/", rank), HostIdentity()));
  }
  TESSERA_TRY(const std::string offer,
              store.Get(Text(prefix, "offer"), Left(deadline),
                        "rank 0 and the ranks that it waits for"));
  std::istringstream words(offer);
  std::string answer, path;
  uint64_t offered_token = 0;
  words >> answer;
  if (answer != "yes") {
    return InvalidInput(
        offer.substr(std::min(offer.size(), answer.size() + 1)));
  }
  words >> path >> offered_token;
  if (rank != 0) {
    fd = FileDescriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd.is_open()) {
      return Unavailable(Text("cannot open the shared memory of rank 0 (", path,
                              "): ", std::strerror(errno)));
    }
    TESSERA_TRY(region, Region::Map(size, fd.get()));
    if (region->header().token != offered_token) {
      return Unavailable(
          Text("the shared memory of rank 0 (", path, ") is not this job's"));
    }
  }
  auto world = std::make_unique<RegionWorld>(std::move(region), rank,
                                             std::move(options));
  TESSERA_RETURN_IF_ERROR(
      store.Barrier(Text(prefix, "mapped"), size, Left(deadline)));
  world->WatchProcesses();
  return std::unique_ptr<CommWorld>(std::move(world));
}

}  // namespace tessera
