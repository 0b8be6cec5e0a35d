#pragma once
// The CPU as a device with queues, as a GPU is one: every queue is a thread
// that runs what was enqueued, now and then late, so that what is not ordered
// happens in many orders.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/device/cpu_device.h"

namespace tessera {

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
  void Launch(const Kernel& kernel, const KernelCall& call) override;

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
  Result<std::shared_ptr<QueueEvent>> RecordEvent() override;
  void AwaitEvent(const std::shared_ptr<QueueEvent>& event) override;
  void Sum(std::span<const std::byte* const> sources, std::byte* to,
           int64_t count, DType dtype) override;
  Result<void> Synchronize() override;

  // Waits for what is now in the queue in use.
  void Drain();
  // How often the host waited for a queue.
  int64_t waits() const { return waits_; }

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
  };

  void Enqueue(std::function<void()> job);
  void Work(Queue& queue, uint64_t seed);

  const uint64_t seed_;
  CpuDevice memory_;
  size_t in_use_ = 0;
  int64_t waits_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<Noted> marks_;
  std::optional<Error> error_;
  bool ends_ = false;
};

// `world`, whose operations are enqueued in `device`'s queue in use. Both
// outlive it.
std::unique_ptr<CommWorld> MakeQueueWorld(CommWorld& world,
                                          QueueCpuDevice& device);

}  // namespace tessera
