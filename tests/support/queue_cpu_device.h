#pragma once
// The CPU as a device with queues, as a GPU is one: every queue is a thread
// that runs what was enqueued, now and then late, so that what is not ordered
// happens in many orders. So is every queue of a graph while it is replayed.
// What CUDA would refuse in a capture, or not do as meant, ends the program.
//
// The kernels of optimizers take lists here, as CUDA's do, and run the calls
// from the last to the first. It has CUDA's fused kernels: the CPU's kernels,
// one after the other. Kernels that take rows with gaps on CUDA do so here: the
// CPU's, on copies without.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/device/cpu_device.h"

namespace tessera {

// Of CUDA's kernel of that name.
RowsApart RowsApartOf(std::string_view kernel);

class QueueCpuDevice : public QueueDevice {
 public:
  // `seed` chooses what is late.
  explicit QueueCpuDevice(uint64_t seed);
  ~QueueCpuDevice() override;

  std::string_view name() const override { return "queue-cpu"; }
  Result<void*> Allocate(Bytes size, MemoryCategory category) override;
  void Free(void* data) override;
  void Zero(void* data, Bytes size) override;
  void Copy(void* to, const void* from, const StridedCopy& copy) override;
  void Write(void* device_to, const void* host_from, Bytes size) override;
  void Read(void* host_to, const void* device_from, Bytes size) override;
  Result<const Kernel*> FindKernel(std::string_view kernel) const override;
  const Kernel* FindFusedKernel(std::string_view name) const override;
  void Launch(const Kernel& kernel, const KernelCall& call) override;
  void LaunchList(const Kernel& kernel,
                  std::span<const KernelCall> calls) override;

  Result<int> MakeQueue(StreamRole role) override;
  void UseQueue(int queue) override { in_use_ = static_cast<size_t>(queue); }
  void Mark(int mark) override;
  void Await(int mark) override;
  Result<Duration> Between(int first, int second) override;
  void EnqueueWrite(void* device_to, const void* host_from,
                    Bytes size) override;
  void EnqueueRead(void* host_to, const void* device_from, Bytes size) override;
  Result<void> Pin(void*, Bytes) override { return {}; }
  void Unpin(void*) override {}
  void EnqueueOnHost(std::function<Result<void>()> function) override;
  Result<void> BeginCapture() override;
  Result<int> EndCapture() override;
  void Replay(int graph) override;
  void BeginRange(const std::string& name) override;
  void EndRange() override;
  Result<std::shared_ptr<QueueEvent>> RecordEvent() override;
  void AwaitEvent(const std::shared_ptr<QueueEvent>& event) override;
  void Sum(std::span<const std::byte* const> sources, std::byte* to,
           int64_t count, DType dtype) override;
  Result<void> Synchronize() override;
  void WaitForAll() override;

  // Waits for what is now in the queue in use, unless an error of `look`, which
  // is asked now and then, ends the wait.
  using Look = std::function<Result<void>()>;
  Result<void> Drain(const Look& look);
  void Drain() { static_cast<void>(Drain(nullptr)); }
  // What Synchronize asks, as on a GPU it asks the world of its rank.
  void set_while_waiting(Look look) { while_waiting_ = std::move(look); }
  // Whether no queue has work.
  bool idle();
  // How often the host waited for a queue.
  int64_t waits() const { return waits_; }
  // How many calls had tensors whose rows lie apart.
  int64_t calls_with_gaps() const { return calls_with_gaps_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Queue {
    std::deque<std::function<void()>> jobs;
    std::condition_variable woken;
    std::thread thread;
  };
  struct Noted {
    int64_t enqueued = 0;  // how often
    int64_t reached = 0;
    Clock::time_point time;
    int capture = -1;  // in which it was noted last; -1: in none
    std::condition_variable changed;
  };
  struct CapturedJob {
    size_t queue = 0;
    std::function<void()> job;  // or, where there is none, of a mark:
    int mark = 0;
    bool awaits = false;
  };
  struct Graph {
    std::vector<CapturedJob> jobs;
    std::map<size_t, size_t> queues;  // what runs in place of a queue
  };

  void Enqueue(std::function<void()> job);
  // A call that does not take part in a capture.
  void RefuseInCapture(const char* call) const;
  void EnqueueIn(size_t queue, std::function<void()> job);
  void MarkIn(size_t queue, int mark);
  void AwaitIn(size_t queue, int mark);
  void RunGraph(const Graph& graph);
  void Work(Queue& queue, uint64_t seed);

  const uint64_t seed_;
  CpuDevice memory_;
  size_t in_use_ = 0;
  int64_t waits_ = 0;
  int64_t calls_with_gaps_ = 0;
  std::vector<Kernel> kernels_;  // of the CPU, with lists
  int open_ranges_ = 0;
  Look while_waiting_;
  std::optional<Graph> captured_;  // while a capture goes on
  size_t captured_in_ = 0;         // the queue where it began
  std::deque<Graph> graphs_;
  // By the queue that graphs are replayed in and one of theirs. Those of one
  // queue are never replayed at once.
  std::map<std::pair<size_t, size_t>, size_t> stand_ins_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable drained_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::deque<Noted> marks_;
  std::optional<Error> error_;
  int64_t unfinished_ = 0;  // jobs
  bool ends_ = false;
};

// `world`, whose operations are enqueued in `device`'s queue in use, and where
// a SendInTurn waits for its receive, as over NCCL. Both outlive it. Once this
// rank has aborted, the device's Synchronize does not wait.
std::unique_ptr<CommWorld> MakeQueueWorld(CommWorld& world,
                                          QueueCpuDevice& device);

}  // namespace tessera
