#pragma once
// One rank's part in a job over NCCL, which its communicators and messages
// share: waits that leave nothing else undone and end where a rank fails, what
// is in flight, and NCCL's communicators.

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "runtime/comm/communicator.h"
#include "runtime/comm/in_flight.h"
#include "runtime/comm/roll_call.h"
#include "runtime/comm/store.h"
#include "runtime/device/cuda_device.h"

namespace tessera {

class NcclJob {
 public:
  using Clock = std::chrono::steady_clock;

  // Between looks at what another rank or a thread of NCCL has to do first.
  static constexpr std::chrono::microseconds kPause{20};

  NcclJob(int rank, int size, Store& store, CudaDevice& device,
          CommOptions options);
  // REQUIRES: Close was called.
  ~NcclJob();

  // The first call; from then on this rank waits for others for as long as they
  // may start apart, if that is longer than for an operation, until EndStart.
  // `push` is called in every wait and does not wait itself.
  Result<void> Open(std::function<Result<void>()> push);
  // Waits until all ranks have called it. Rank 0 tells who has not
  // (CommOptions::waiting), and so do a stall, an interrupt and the error of
  // one that never does.
  Result<void> Meet();
  // All ranks have come.
  void EndStart() { limit_ = options_.timeout; }
  // Closes the communicators, those of a job that is well with their peers.
  // Then nothing uses this rank's buffers: the work is done or was cut off.
  // The store has the timeout and the stop again that it had before Open.
  void Close();

  int rank() const { return rank_; }
  int size() const { return size_; }
  CudaDevice& device() { return device_; }
  const std::string& task() const { return task_; }
  void set_task(std::string_view task) {
    task_ = task.substr(0, 95);  // as CommWorld says
  }

  // ---- Failing ----

  Result<void> CheckUsable() const {
    if (failure_) return *failure_;
    return {};
  }
  bool failed() const { return failure_.has_value(); }
  // Publishes `error` as the job's, unless there is one already, and cuts this
  // rank's communicators off: the GPU would wait for peers without end. The
  // job's error.
  Error Fail(Error error);
  Error AtThisRank(const Error& error, std::string_view what) const;

  // ---- Waiting ----

  // Waits until ready() returns true, which is asked every `pause`. `who` is
  // waited for, since `begin`.
  Result<void> Wait(const std::function<Result<bool>()>& ready,
                    Clock::time_point begin, std::string_view who,
                    std::chrono::microseconds pause = kPause);
  // What is to be done in every wait. It does not wait itself.
  Result<void> WhileWaiting();
  // Waits for all that is in flight. A failure that cut it off is known then.
  Result<void> Flush();

  // ---- Communicators, and what they do ----

  // A communicator of `size` ranks, `who` but for this one, that meet at `key`.
  // Without `wait` it may still be connecting. It belongs to this job.
  Result<ncclComm_t> Connect(const std::string& key, int rank, int size,
                             std::string_view who, bool wait);
  // Waits until NCCL has enqueued what it was given.
  Result<void> Settle(ncclComm_t comm, std::string_view who);
  // An operation of `comm` is now in the queue in use.
  Result<void> AddInFlight(ncclComm_t comm, std::string what);

  // Frees `data` when the queue in use no longer needs it: other queues may be
  // handed it at once.
  Result<void> FreeAfterQueue(void* data);

 private:
  Result<void> CheckHealth();
  Result<std::optional<int64_t>> PollFailures();
  Result<void> AskForFailures();
  Result<void> CheckFailures(int64_t failures);
  Error AtOldest(const Error& failure) const;
  Result<void> CheckWait(double waited, std::string_view who);
  Result<void> TellOfStall(std::string_view who);
  std::string Named(std::string_view who);
  Result<std::string> GetWhenSet(const std::string& key, std::string_view who);

  const int rank_;
  const int size_;
  Store& store_;
  const Duration store_timeout_;  // as it came
  const std::atomic<bool>* const store_stop_;
  CudaDevice& device_;
  const CommOptions options_;
  Duration limit_;      // of a wait
  std::string prefix_;  // of this world's keys in the store
  std::string task_;
  std::function<Result<void>()> push_;
  std::optional<Error> failure_;
  std::optional<RollCall> meeting_;  // in Meet
  bool stall_told_ = false;          // by this rank, or it left that to another
  std::optional<Clock::time_point> stall_asked_;  // without an answer at once

  std::vector<ncclComm_t> comms_;  // all
  InFlight in_flight_;
  Clock::time_point health_checked_;
  Clock::time_point store_answered_;
  bool failures_asked_ = false;  // PollFailures has no answer yet
  // Memory that a queue still reads.
  std::deque<std::pair<CudaEvent, void*>> to_free_;
};

}  // namespace tessera
