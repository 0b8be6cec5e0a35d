#pragma once
// RankDevice: the memory and the kernels of one rank. Implementations:
// CpuDevice (cpu_device.h) and CudaDevice (cuda_device.h).
//
// All work of a device (copies, zeroing, kernels) runs in one queue, in the
// order of the calls; Synchronize waits for it. Pointers are the device's own:
// only Read and Write reach them from the host. A device belongs to one thread
// at a time, unless it is concurrent(). One that works behind the host's back
// has further queues (QueueDevice).

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/layout.h"
#include "runtime/device/memory_account.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// A copy of runs of `run_bytes` bytes: one for each point of a grid of
// extents[0, dims), the last innermost, whose first bytes lie at these strides
// (in bytes) on either side. Extents are at least 1.
struct StridedCopy {
  int64_t run_bytes = 0;
  int dims = 0;
  std::array<int64_t, kMaxDims> extents = {};
  std::array<int64_t, kMaxDims> from_strides = {};
  std::array<int64_t, kMaxDims> to_strides = {};
};

class ProductTuner;  // runtime/device/product_tuner.h
class QueueDevice;

// A place that a queue has come to. Whoever enqueued a wait for it may drop it.
class QueueEvent {
 public:
  virtual ~QueueEvent() = default;
};

class RankDevice {
 public:
  virtual ~RankDevice() = default;

  // "cpu"; for messages.
  virtual std::string_view name() const = 0;

  // Whether several threads may call this device and its kernels at once; each
  // thread's calls then have ended when they return.
  virtual bool concurrent() const = 0;

  // Memory for `size` bytes (at least one), aligned to 64 bytes, with unknown
  // contents. kUnavailable when there is no more. Freed memory is kept for
  // later allocations, so that steps after the first ask the system for none.
  virtual Result<void*> Allocate(Bytes size, MemoryCategory category) = 0;
  // Announces allocations of this category that take so much together, each
  // rounded up to kAlignment: they then need no more than that.
  static constexpr int64_t kAlignment = 256;
  virtual void Expect(Bytes size, MemoryCategory category) {
    (void)size, (void)category;
  }
  // REQUIRES: `data` came from Allocate and has not been freed.
  virtual void Free(void* data) = 0;

  virtual void Zero(void* data, Bytes size) = 0;
  // The two sides do not overlap.
  virtual void Copy(void* to, const void* from, const StridedCopy& copy) = 0;
  // To and from host memory, which is the caller's again when they return.
  virtual void Write(void* device_to, const void* host_from, Bytes size) = 0;
  virtual void Read(void* host_to, const void* device_from, Bytes size) = 0;

  // kNotFound for an unknown kernel.
  virtual Result<const Kernel*> FindKernel(std::string_view kernel) const = 0;

  // Runs a kernel of this device. The call's spans and what they point to need
  // not outlive Launch.
  virtual void Launch(const Kernel& kernel, const KernelCall& call) {
    kernel.run(call);
  }
  // Runs calls as Kernel::run_list has them, which the kernel has.
  virtual void LaunchList(const Kernel& kernel,
                          std::span<const KernelCall> calls) {
    kernel.run_list(calls);
  }
  // Its kernel for one of the FusedKernels; null where it has none.
  virtual const Kernel* FindFusedKernel(std::string_view name) const {
    (void)name;
    return nullptr;
  }
  // Whether executors that are made from now on take them; at first they do.
  void set_fuses(bool yes) { fuses_ = yes; }
  bool fuses() const { return fuses_; }
  // Null for a device whose products have one algorithm.
  virtual ProductTuner* product_tuner() { return nullptr; }
  // On which kernels run, of a GPU those on the host; null for one.
  virtual ThreadPool* threads() { return nullptr; }

  // This device, if calls return before their work has run; else null.
  virtual QueueDevice* queues() { return nullptr; }

  virtual Result<void> Synchronize() = 0;

  const MemoryAccount& account() const { return account_; }

 protected:
  MemoryAccount account_;

 private:
  bool fuses_ = true;
};

// A device whose calls enqueue their work and return: Allocate, Free, Zero,
// Copy, Write and Launch do not wait for what was enqueued before; Read waits.
// Calls go to the queue in use, at first queue 0; the work of one queue runs in
// its order, that of several beside each other. Memory that was freed is handed
// out again at once: who uses several queues allocates nothing within a step.
class QueueDevice : public RankDevice {
 public:
  bool concurrent() const override { return false; }
  QueueDevice* queues() override { return this; }

  // The number of a further queue, for work of this role.
  virtual Result<int> MakeQueue(StreamRole role) = 0;
  virtual void UseQueue(int queue) = 0;

  // Marks are numbered by the caller, from 0, as few as there are. Mark notes
  // the place that the queue in use has come to; Await lets it wait for where a
  // mark was noted last.
  virtual void Mark(int mark) = 0;
  virtual void Await(int mark) = 0;
  // From one mark to another, after Synchronize.
  virtual Result<Duration> Between(int first, int second) = 0;

  // The host's memory is read or written when the queue comes to it; it was
  // passed to Pin, as a whole or in part, so that the copy needs no other.
  virtual void EnqueueWrite(void* device_to, const void* host_from,
                            Bytes size) = 0;
  virtual void EnqueueRead(void* host_to, const void* device_from,
                           Bytes size) = 0;
  virtual Result<void> Pin(void* host_data, Bytes size) = 0;
  virtual void Unpin(void* host_data) = 0;

  // The function runs on a thread of the host when the queue comes to it, and
  // the queue goes on when it returns. It makes no call of the device. Its
  // error is returned by Synchronize.
  virtual void EnqueueOnHost(std::function<Result<void>()> function) = 0;

  // Captures what is enqueued from now on, from the queue in use and by this
  // thread, instead of running it. EndCapture makes it a graph and says its
  // number, or what could not be captured; Replay then enqueues all of it as
  // one piece of work of the queue in use: it begins when what is before it in
  // that queue has ended, and what is behind it waits for its end. Graphs last
  // as long as the device. Memory that they use stays where it is.
  //
  // In a capture only Zero, Copy, Launch, LaunchList, EnqueueWrite, EnqueueRead
  // and Sum are called, and UseQueue, Mark, Await, BeginRange and EndRange.
  // Another queue takes part once it awaits a mark of the capture, and before
  // the end the first queue awaits a mark behind its last work. Only such marks
  // are awaited, and only there; they have no times.
  virtual Result<void> BeginCapture() = 0;
  virtual Result<int> EndCapture() = 0;
  virtual void Replay(int graph) = 0;

  // Names what this thread enqueues until EndRange, for profilers.
  virtual void BeginRange(const std::string& name) = 0;
  virtual void EndRange() = 0;

  // For devices that share their memory: the ranks of a process on one GPU.
  // RecordEvent notes the place that the queue in use has come to; AwaitEvent
  // lets the queue in use wait for an event of this device or another of its
  // kind.
  virtual Result<std::shared_ptr<QueueEvent>> RecordEvent() = 0;
  virtual void AwaitEvent(const std::shared_ptr<QueueEvent>& event) = 0;
  // The sum in the order of `sources`, at most kMostSources, which may be in
  // the memory of several such devices: SumInOrder (runtime/comm/reduce.h), bit
  // for bit. `to` may be one of the sources.
  static constexpr int kMostSources = 64;
  virtual void Sum(std::span<const std::byte* const> sources, std::byte* to,
                   int64_t count, DType dtype) = 0;

  // Waits for queue 0 alone, and returns the first error of all. Where peers
  // have failed it may return before the work has ended.
  Result<void> Synchronize() override = 0;
  // Waits until no queue has work, whatever became of it and of the peers,
  // whose part in it was cut off (CommWorld::Abort) where they have failed.
  virtual void WaitForAll() = 0;
};

}  // namespace tessera
