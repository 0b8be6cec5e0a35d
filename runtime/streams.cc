#include "runtime/streams.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "planner/base/check.h"
#include "planner/base/start_thread.h"

namespace tessera {
namespace {

class StreamRun {
 public:
  StreamRun(const std::vector<StreamJob>& jobs, const HeldBytes& budget,
            const StreamHooks& hooks)
      : jobs_(jobs), budget_(budget), hooks_(hooks), ended_(jobs.size()) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto stream = static_cast<size_t>(jobs[i].stream);
      if (stream >= streams_.size()) streams_.resize(stream + 1);
      streams_[stream].jobs.push_back(static_cast<int>(i));
    }
  }

  Result<void> Run() {
    Work();
    for (std::thread& worker : workers_) worker.join();
    if (error_) return *error_;
    return {};
  }

 private:
  struct Stream {
    std::vector<int> jobs;
    size_t next = 0;
    bool busy = false;
  };

  void Work() {
    std::unique_lock lock(mutex_);
    int stream = 0;  // of the last job
    while (!error_ && left() > 0) {
      stream = TakeReady(stream);
      if (error_) break;
      if (stream < 0) {
        ++idle_;
        wake_.wait(lock);
        --idle_;
        stream = 0;
        continue;
      }
      Stream& mine = streams_[static_cast<size_t>(stream)];
      const int job = mine.jobs[mine.next];
      lock.unlock();
      Result<void> result = hooks_.run(job);
      lock.lock();
      if (!result) {
        Fail(result.error());
        break;
      }
      held_ = held_ - hooks_.finish(job);
      ended_[static_cast<size_t>(job)] = true;
      ++ended_count_;
      ++mine.next;
      mine.busy = false;
    }
    wake_.notify_all();
  }

  size_t left() const { return jobs_.size() - ended_count_; }

  // Takes a ready stream, `preferred` if it is, and sees to workers for the
  // other ready ones. -1: none is ready.
  int TakeReady(int preferred) {
    int taken = -1;
    size_t others = 0;
    for (size_t s = 0; s < streams_.size() && !error_; ++s) {
      if (!IsReady(streams_[s])) continue;
      if (taken < 0 || static_cast<int>(s) == preferred) {
        taken = static_cast<int>(s);
      }
      ++others;
    }
    if (taken < 0) return -1;
    --others;
    streams_[static_cast<size_t>(taken)].busy = true;
    for (size_t i = 0; i < std::min(others, idle_); ++i) wake_.notify_one();
    for (size_t i = idle_; i < others && workers_.size() + 1 < streams_.size();
         ++i) {
      auto worker = StartThread([this] { Work(); });
      // A stream that waits for a peer may need another one to go on.
      if (!worker) {
        Fail(worker.error());
        break;
      }
      workers_.push_back(*std::move(worker));
    }
    return taken;
  }

  bool IsReady(const Stream& stream) {
    if (stream.busy || stream.next == stream.jobs.size()) return false;
    const int job = stream.jobs[stream.next];
    for (int dep : jobs_[static_cast<size_t>(job)].deps) {
      if (!ended_[static_cast<size_t>(dep)]) return false;
    }
    while (admitted_ <= job) {
      HeldBytes held = held_;
      held += jobs_[static_cast<size_t>(admitted_)].takes;
      if (!held.FitsInto(budget_)) {
        // Where nothing before it is left, it must fit.
        TESSERA_CHECK(ended_count_ < static_cast<size_t>(admitted_))
            << "job " << admitted_ << " does not fit into "
            << budget_.device.value << " bytes of device and "
            << budget_.host.value << " of host memory";
        return false;
      }
      if (auto done = hooks_.admit(admitted_); !done) {
        Fail(done.error());
        return false;
      }
      held_ = held;
      ++admitted_;
    }
    return true;
  }

  void Fail(const Error& error) {
    if (error_) return;
    error_ = error;
    hooks_.fail(error);
  }

  const std::vector<StreamJob>& jobs_;
  const HeldBytes budget_;
  const StreamHooks& hooks_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::vector<Stream> streams_;
  std::vector<bool> ended_;
  size_t ended_count_ = 0;
  int admitted_ = 0;  // jobs [0, admitted_) are
  HeldBytes held_;
  size_t idle_ = 0;
  std::optional<Error> error_;
  std::vector<std::thread> workers_;  // besides the caller
};

}  // namespace

Result<void> RunStreams(const std::vector<StreamJob>& jobs,
                        const HeldBytes& budget, const StreamHooks& hooks) {
  return StreamRun(jobs, budget, hooks).Run();
}

HeldBytes SequentialPeak(const std::vector<StreamJob>& jobs,
                         const std::vector<HeldBytes>& gives) {
  HeldBytes held;
  HeldBytes peak;
  for (size_t i = 0; i < jobs.size(); ++i) {
    held += jobs[i].takes;
    peak = {Max(peak.device, held.device), Max(peak.host, held.host)};
    held = held - gives[i];
  }
  return peak;
}

}  // namespace tessera
