#include "runtime/comm/job_failure.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "runtime/comm/deadline.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kTellTime{5};

}  // namespace

std::string NcclPrefix(int64_t world) {
  return Text("nccl/", world, "/");
}

std::string FailuresKey(const std::string& prefix) {
  return prefix + "failures";
}

Error PublishFailure(Store& store, const std::string& prefix, int rank,
                     const Error& error) {
  const std::string key = prefix + "failure";
  const auto deadline = std::chrono::steady_clock::now() + kTellTime;
  store.set_timeout(Left(deadline));
  const auto failed = store.Add(FailuresKey(prefix), 1);
  if (!failed) return error;
  if (*failed == 1) {
    store.set_timeout(Left(deadline));
    (void)store.Set(key, PackError(RankFailed(rank, error)));
    return error;
  }
  // Get waits for an answer longer than for the value, by as much at most.
  const auto half = Duration::FromSeconds(0.5 * Left(deadline).seconds());
  store.set_timeout(half);
  const auto why =
      store.Get(key, std::min(half, Duration::FromSeconds(1)), "its reason");
  return (why ? UnpackError(*why) : std::nullopt).value_or(error);
}

}  // namespace tessera
