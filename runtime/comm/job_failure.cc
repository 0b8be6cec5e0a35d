#include "runtime/comm/job_failure.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/comm/deadline.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kTellTime{5};

// A process that ends closes its connections one by one.
constexpr std::chrono::milliseconds kEndTime{100};

}  // namespace

std::string NcclPrefix(int64_t world) {
  return Text("nccl/", world, "/");
}

std::string FailuresKey(const std::string& prefix) {
  return prefix + "failures";
}

std::optional<Error> GoneRank(Store& store, int rank) {
  std::this_thread::sleep_for(kEndTime);
  store.set_timeout(Left(std::chrono::steady_clock::now() + kTellTime));
  const auto gone = store.Add(kGoneKey, 0);
  if (!gone) return gone.error();
  if (*gone == 0) return std::nullopt;
  return RankLeft(static_cast<int>(*gone - 1), rank);
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
