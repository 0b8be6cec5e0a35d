#include "runtime/comm/nccl_job.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "planner/base/check.h"
#include "runtime/comm/deadline.h"
#include "runtime/comm/job_failure.h"
#include "runtime/comm/nccl_calls.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// So long a rank looks without a pause for the thread that NCCL starts for each
// operation: it takes some 10 us, and a pause, by Linux's timer slack, 70.
constexpr std::chrono::microseconds kNoPause{500};
// Between questions to the store, whose one thread all ranks ask.
constexpr std::chrono::milliseconds kStorePause{5};

// How often a waiting rank asks NCCL for errors, and the store for an abort.
constexpr std::chrono::milliseconds kHealthInterval{100};
constexpr std::chrono::milliseconds kStoreInterval{500};

// What the store is asked with nothing else done meanwhile: right after an
// answer of it, and for at most so long.
const Duration kStoreTime = Duration::FromSeconds(10);

// How long a communicator may take to close before it is cut off: peers that
// are not closing theirs, or are dead, would be waited for without end.
constexpr std::chrono::seconds kCloseTime{5};

// Peers that are told to stop as well come by themselves within this many
// seconds.
constexpr double kStopPatience = 1;

// How long rank 0 waits for others to come until it says so: as these do of
// rank 0.
const Duration kMeetingPatience = StoreOptions().patience;

// A store that does not answer for so long has no say in who tells of a stall.
constexpr std::chrono::seconds kAnswerPatience{1};

// NCCL waits for the kernels of a communicator that it aborts, and these may
// wait, on a queue or for memory, for those of another one: all are told to
// stop before any is waited for, which NCCL does in a group.
void Abort(std::span<const ncclComm_t> comms) {
  (void)ncclGroupStart();
  for (ncclComm_t comm : comms) (void)ncclCommAbort(comm);
  (void)ncclGroupEnd();
}

}  // namespace

NcclJob::NcclJob(int rank, int size, Store& store, CudaDevice& device,
                 CommOptions options)
    : rank_(rank),
      size_(size),
      store_(store),
      store_timeout_(store.timeout()),
      store_stop_(store.stop()),
      device_(device),
      options_(std::move(options)),
      limit_(Max(options_.timeout, Left(store.deadline()))) {}

Result<void> NcclJob::Open(std::function<Result<void>()> push) {
  push_ = std::move(push);
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    return InvalidInput(Text("rank ", rank_, " of ", size_));
  }
  // The n-th world of this job, by the rank's own count of its calls.
  TESSERA_TRY(const int64_t call, store_.Add(Text("nccl/calls/", rank_), 1));
  prefix_ = NcclPrefix(call);
  // How long ranks wait for each other, and what interrupts them, is from here
  // on up to CheckWait.
  store_.set_timeout(kStoreTime);
  store_.set_stop(nullptr);
  health_checked_ = store_answered_ = Clock::now();
  device_.set_while_waiting([this] { return WhileWaiting(); });
  return {};
}

Result<void> NcclJob::Meet() {
  const Clock::time_point begin = Clock::now();
  meeting_.emplace(store_, prefix_ + "came", size_);
  if (auto done = meeting_->Answer(rank_); !done) return Fail(done.error());
  bool told = rank_ != 0 || !options_.waiting;
  const auto all_came = [&]() -> Result<bool> {
    TESSERA_TRY(const bool all, meeting_->AllCame());
    const std::chrono::duration<double> waited = Clock::now() - begin;
    if (!all && !told && waited.count() > kMeetingPatience.seconds()) {
      told = true;
      options_.waiting(meeting_->Missing());
    }
    return all;
  };
  const auto met = Wait(all_came, begin, "the other ranks", kStorePause);
  meeting_.reset();
  return met;
}

void NcclJob::Close() {
  const Clock::time_point end = Clock::now() + kCloseTime;
  for (ncclComm_t comm : comms_) (void)ncclCommFinalize(comm);
  std::vector<ncclComm_t> stuck;
  std::vector<ncclComm_t> ended;
  for (ncclComm_t comm : comms_) {
    ncclResult_t state = ncclInProgress;
    while (ncclCommGetAsyncError(comm, &state) == ncclSuccess &&
           state == ncclInProgress && Clock::now() < end) {
      std::this_thread::sleep_for(kPause);
    }
    (state == ncclSuccess ? ended : stuck).push_back(comm);
  }
  // First, as to destroy frees memory and may wait for the device.
  Abort(stuck);
  for (ncclComm_t comm : ended) (void)ncclCommDestroy(comm);
  comms_.clear();
  device_.set_while_waiting(nullptr);
  store_.set_timeout(store_timeout_);
  store_.set_stop(store_stop_);
}

NcclJob::~NcclJob() {
  if (!to_free_.empty()) (void)cudaDeviceSynchronize();
  for (auto& [event, data] : to_free_) {
    device_.Recycle(event);
    device_.Free(data);
  }
  for (CudaEvent event : in_flight_.TakeAll()) device_.Recycle(event);
}

// ---- Failing ----------------------------------------------------------------

Error NcclJob::Fail(Error error) {
  if (failure_) return *failure_;
  failure_ = std::move(error);  // what follows may fail in its turn
  // NCCL fails where a rank is gone, and does not say which.
  if (failure_->code == ErrorCode::kUnavailable && !RankToldOf(*failure_)) {
    if (auto gone = GoneRank(store_, rank_)) failure_ = *std::move(gone);
  }
  failure_ = PublishFailure(store_, prefix_, rank_, *failure_);
  Abort(comms_);
  comms_.clear();
  return *failure_;
}

Error NcclJob::AtThisRank(const Error& error, std::string_view what) const {
  return error.At(Text("rank ", rank_, ", ", what));
}

// ---- Waiting ----------------------------------------------------------------

Result<void> NcclJob::Wait(const std::function<Result<bool>()>& ready,
                           Clock::time_point begin, std::string_view who,
                           std::chrono::microseconds pause) {
  for (;;) {
    const Result<bool> done = ready();
    if (!done) return Fail(done.error());
    if (*done) return {};
    TESSERA_RETURN_IF_ERROR(WhileWaiting());
    const std::chrono::duration<double> waited = Clock::now() - begin;
    TESSERA_RETURN_IF_ERROR(CheckWait(waited.count(), who));
    std::this_thread::sleep_for(pause);
  }
}

Result<void> NcclJob::WhileWaiting() {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  if (auto pushed = push_(); !pushed) return Fail(pushed.error());
  while (!to_free_.empty()) {
    const Result<bool> done = device_.IsDone(to_free_.front().first);
    if (!done) return Fail(done.error());
    if (!*done) break;
    device_.Recycle(to_free_.front().first);
    device_.Free(to_free_.front().second);
    to_free_.pop_front();
  }
  const Clock::time_point now = Clock::now();
  const auto ended = in_flight_.TakeEnded(
      [&](CudaEvent event) { return device_.IsDone(event); }, now);
  if (!ended) return Fail(ended.error());
  for (CudaEvent event : *ended) device_.Recycle(event);
  if (now - health_checked_ < kHealthInterval) return {};
  health_checked_ = now;
  return CheckHealth();
}

Result<void> NcclJob::CheckHealth() {
  for (ncclComm_t comm : comms_) {
    if (const auto well = IsBusy(comm, "communicator"); !well) {
      const std::string what = in_flight_.WhatFailed(comm);
      const Error failure = Fail(well.error());
      return what.empty() ? failure : failure.At(what);
    }
  }
  const Clock::time_point now = Clock::now();
  if (now - store_answered_ >= kStoreInterval) {
    const auto failures = PollFailures();
    if (!failures) return Fail(failures.error());
    if (*failures) TESSERA_RETURN_IF_ERROR(CheckFailures(**failures));
    const auto gone = store_.Poll(kGoneKey, 0);
    if (!gone) return Fail(gone.error());
    if (*gone && **gone > 0) {
      return AtOldest(Fail(RankLeft(static_cast<int>(**gone - 1), rank_)));
    }
  }
  const InFlight::Front oldest = in_flight_.Oldest();
  if (oldest.operation == nullptr) return {};
  const std::chrono::duration<double> waited = now - oldest.since;
  if (auto well = CheckWait(waited.count(), "its peers"); !well) {
    return well.error().At(oldest.operation->what);
  }
  return {};
}

// The store's count of them; nothing until it has answered.
Result<std::optional<int64_t>> NcclJob::PollFailures() {
  TESSERA_TRY(const auto failures, store_.Poll(FailuresKey(prefix_), 0));
  failures_asked_ = !failures.has_value();
  if (failures) store_answered_ = Clock::now();
  return failures;
}

// Waits for the count as it is from now on.
Result<void> NcclJob::AskForFailures() {
  bool stale = failures_asked_;  // the next answer is to an earlier question
  int64_t failures = 0;
  TESSERA_RETURN_IF_ERROR(Wait(
      [&]() -> Result<bool> {
        TESSERA_TRY(const auto answer, PollFailures());
        if (!answer) return false;
        failures = *answer;
        return !std::exchange(stale, false);
      },
      Clock::now(), "rank 0"));
  return CheckFailures(failures);
}

// By the store's count of them.
Result<void> NcclJob::CheckFailures(int64_t failures) {
  if (failures == 0) return {};
  return AtOldest(Fail(Unavailable("another rank failed")));
}

// A failure, at what is in flight longest.
Error NcclJob::AtOldest(const Error& failure) const {
  const InFlight::Operation* const oldest = in_flight_.Oldest().operation;
  return oldest == nullptr ? failure : failure.At(oldest->what);
}

// Of a wait that has lasted `waited` seconds.
Result<void> NcclJob::CheckWait(double waited, std::string_view who) {
  if (waited > limit_.seconds()) {
    return Fail(RankWaitedTooLong(rank_, limit_, Named(who)));
  }
  // Without a task there is no step that this rank could end first.
  const bool may_stop =
      options_.stop != nullptr && options_.stop->load() && task_.empty();
  if (may_stop && waited > kStopPatience) {
    return Fail(
        {ErrorCode::kInterrupted,
         Text("interrupted as rank ", rank_, " waited for ", Named(who)), ""});
  }
  if (waited > options_.patience.seconds()) return TellOfStall(who);
  return {};
}

// Who is waited for, by name where ranks meet.
std::string NcclJob::Named(std::string_view who) {
  return meeting_ ? meeting_->Missing() : std::string(who);
}

// Where several ranks wait the first to come to the store tells of it. Where
// that does not answer rank 0 is who stalls, and rank 1 tells.
Result<void> NcclJob::TellOfStall(std::string_view who) {
  if (!options_.stalled || stall_told_) return {};
  const auto tell = [&](std::string_view whom) {
    options_.stalled(StallText(rank_, options_.patience, limit_,
                               Text(whom, " (", TaskText(task_), ")")));
  };
  const auto tellers = store_.Poll(prefix_ + "stalls", 1);
  if (!tellers) return Fail(tellers.error());
  if (*tellers) {
    stall_told_ = true;
    if (**tellers == 1) tell(Named(who));
  } else if (!stall_asked_) {
    stall_asked_ = Clock::now();
  } else if (rank_ == 1 && Clock::now() - *stall_asked_ > kAnswerPatience) {
    stall_told_ = true;
    tell("rank 0, which does not answer");
  }
  return {};
}

Result<void> NcclJob::Flush() {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  // CheckHealth limits the time.
  while (!in_flight_.empty()) {
    TESSERA_RETURN_IF_ERROR(WhileWaiting());
    if (!in_flight_.empty()) std::this_thread::sleep_for(kPause);
  }
  // What was cut off is done as well.
  health_checked_ = {};
  TESSERA_RETURN_IF_ERROR(WhileWaiting());
  return AskForFailures();
}

// ---- Communicators ----------------------------------------------------------

// Waits for a key of the store without leaving anything else undone.
Result<std::string> NcclJob::GetWhenSet(const std::string& key,
                                        std::string_view who) {
  TESSERA_RETURN_IF_ERROR(Wait(
      [&]() -> Result<bool> {
        TESSERA_TRY(const auto set, store_.Poll(key + "/set", 0));
        return set.value_or(0) > 0;
      },
      Clock::now(), who, kStorePause));
  return store_.Get(key, Duration{}, who);
}

Result<ncclComm_t> NcclJob::Connect(const std::string& key, int rank, int size,
                                    std::string_view who, bool wait) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  ncclUniqueId id;
  if (rank == 0) {
    TESSERA_RETURN_IF_ERROR(AskForFailures());
    TESSERA_RETURN_IF_ERROR(
        NcclOk(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId"));
    TESSERA_RETURN_IF_ERROR(
        store_.Set(prefix_ + key, {id.internal, sizeof(id.internal)}));
    TESSERA_TRY([[maybe_unused]] const int64_t set,
                store_.Add(prefix_ + key + "/set", 1));
  } else {
    TESSERA_TRY(const std::string text, GetWhenSet(prefix_ + key, who));
    TESSERA_CHECK(text.size() == sizeof(id.internal)) << text.size();
    std::memcpy(id.internal, text.data(), sizeof(id.internal));
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t begun =
      ncclCommInitRankConfig(&comm, size, id, rank, &config);
  if (comm != nullptr) comms_.push_back(comm);  // also where that fails
  TESSERA_RETURN_IF_ERROR(NcclOk(begun, nullptr, "ncclCommInitRankConfig"));
  if (wait) TESSERA_RETURN_IF_ERROR(Settle(comm, who));
  return comm;
}

Result<void> NcclJob::Settle(ncclComm_t comm, std::string_view who) {
  const Clock::time_point begin = Clock::now();
  while (Clock::now() - begin < kNoPause) {
    const Result<bool> busy = IsBusy(comm, who);
    if (!busy) return Fail(busy.error());
    if (!*busy) return {};
    std::this_thread::yield();
  }
  return Wait(
      [&]() -> Result<bool> {
        TESSERA_TRY(const bool busy, IsBusy(comm, who));
        return !busy;
      },
      begin, who);
}

Result<void> NcclJob::AddInFlight(ncclComm_t comm, std::string what) {
  TESSERA_TRY(const CudaEvent done, device_.Record(device_.queue()));
  in_flight_.Add(device_.queue(), {comm, done, std::move(what)}, Clock::now());
  return WhileWaiting();
}

Result<void> NcclJob::FreeAfterQueue(void* data) {
  TESSERA_TRY(const CudaEvent event, device_.Record(device_.queue()));
  to_free_.emplace_back(event, data);
  return {};
}

}  // namespace tessera
