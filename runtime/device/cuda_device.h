#pragma once
// An NVIDIA GPU as the device of a rank. Queues are streams.
//
// NcclWorld has streams of its own and orders them against the queue in use by
// Order.
//
// Write returns when the host memory may be used again; it does not wait for
// the queue. What goes wrong in a call that returns no Result is kept and
// returned by the next Synchronize.
//
// Errors are kUnavailable and carry CUDA's name of the error:
// "cuda:0: cudaMalloc of 4096 bytes: cudaErrorMemoryAllocation (out of
// memory)".

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "planner/lower/task_graph.h"
#include "runtime/device/cuda_arena.h"
#include "runtime/device/device.h"
#include "runtime/device/product_tuner.h"
#include "runtime/thread_pool.h"

// CUDA's own names, so that this header needs none of CUDA's.
struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace tessera {

class CublasLtMatMul;
class CudaSdpa;

using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;
using CudaGraphExec = CUgraphExec_st*;

// GPUs that this process can use; 0 where there is no driver.
// Like every other call of CUDA it makes processes forked later unable to use
// a GPU. Sets CUDA_DEVICE_MAX_CONNECTIONS to 32 unless it is set, as do the
// other functions here: streams that share one of its connections wait for each
// other, and a stream that waits for a peer may then wait for itself. Likewise
// CUDA_DEVICE_ORDER to PCI_BUS_ID, the order of the driver's other tools (and
// of `tessera discover`), where the fastest would come first.
int CudaDeviceCount();

struct GpuProperties {
  std::string name;  // "NVIDIA H200"
  Bytes memory;      // of the whole GPU
};
// Of GPU `ordinal`, without using it. REQUIRES: it is there.
Result<GpuProperties> PropertiesOfGpu(int ordinal);

class CudaDevice : public QueueDevice, public ProductTuner {
 public:
  // Use MakeCudaDevice.
  CudaDevice(int ordinal, int threads);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  // Waits for all work.
  ~CudaDevice() override;

  std::string_view name() const override { return name_; }
  // One arena per category, of large chunks that stay reserved. The account
  // counts what is asked for, as on every device.
  Result<void*> Allocate(Bytes size, MemoryCategory category) override;
  void Expect(Bytes size, MemoryCategory category) override;
  void Free(void* data) override;
  void Zero(void* data, Bytes size) override;
  void Copy(void* to, const void* from, const StridedCopy& copy) override;
  // Through pinned staging memory.
  void Write(void* device_to, const void* host_from, Bytes size) override;
  void Read(void* host_to, const void* device_from, Bytes size) override;
  Result<const Kernel*> FindKernel(std::string_view kernel) const override;
  const Kernel* FindFusedKernel(std::string_view name) const override;
  ProductTuner* product_tuner() override { return this; }
  void Launch(const Kernel& kernel, const KernelCall& call) override;
  void LaunchList(const Kernel& kernel,
                  std::span<const KernelCall> calls) override;

  ThreadPool* threads() override { return &threads_; }

  Result<int> MakeQueue(StreamRole role) override;
  void UseQueue(int queue) override;
  void Mark(int mark) override;
  void Await(int mark) override;
  Result<Duration> Between(int first, int second) override;
  void EnqueueWrite(void* device_to, const void* host_from,
                    Bytes size) override;
  void EnqueueRead(void* host_to, const void* device_from, Bytes size) override;
  Result<void> Pin(void* host_data, Bytes size) override;
  void Unpin(void* host_data) override;
  void EnqueueOnHost(std::function<Result<void>()> function) override;
  Result<void> BeginCapture() override;
  Result<int> EndCapture() override;
  void Replay(int graph) override;
  // Of NVTX, where Tessera was built with its headers.
  void BeginRange(const std::string& name) override;
  void EndRange() override;
  Result<std::shared_ptr<QueueEvent>> RecordEvent() override;
  void AwaitEvent(const std::shared_ptr<QueueEvent>& event) override;
  void Sum(std::span<const std::byte* const> sources, std::byte* to,
           int64_t count, DType dtype) override;
  Result<void> Synchronize() override;
  void WaitForAll() override;

  std::string Maker() const override;
  Result<void> ReadChoices(std::string_view choices,
                           std::string_view path) override;
  std::string Choices() const override;
  std::vector<MatMulKey> TakeUntuned() override;
  Result<MatMulChoice> Tune(const MatMulKey& key) override;
  void Adopt(const std::map<MatMulKey, MatMulChoice>& rows) override;

  // What the arenas hold of the GPU's memory, whether or not it is in use.
  Bytes reserved() const;

  // Makes this device the calling thread's current one, which NCCL wants.
  Result<void> Select() const;
  // The queue in use, and what kernels in it are given.
  CudaStream queue() const;
  CudaQueue* kernel_queue() const { return queues_[queue_in_use_].get(); }
  // A further stream, owned by the device. Streams that communicate have the
  // highest priority, so that a transfer need not wait for compute kernels to
  // leave multiprocessors free; kCompute has the lowest.
  Result<CudaStream> MakeStream(StreamRole role);

  // An event after the work that is now in `stream`. Goes back by Recycle.
  Result<CudaEvent> Record(CudaStream stream);
  void Recycle(CudaEvent event);
  // Work enqueued in `later` from now on runs after the event, or after the
  // work that is now in `earlier`.
  Result<void> RunAfter(CudaStream later, CudaEvent event);
  Result<void> Order(CudaStream earlier, CudaStream later);
  Result<bool> IsDone(CudaEvent event);
  // Waits for the event by looking at it, and calls what set_while_waiting was
  // given in between; an error of that ends the wait.
  Result<void> Wait(CudaEvent event);

  // Called again and again by every wait of this device, and now and then while
  // kernels are enqueued, but for a capture: where a peer's death would make
  // the queue wait for ever, somebody has to notice. It must not wait itself.
  // Empty: nothing.
  using WhileWaiting = std::function<Result<void>()>;
  void set_while_waiting(WhileWaiting function) {
    while_waiting_ = std::move(function);
  }

 private:
  friend Result<std::unique_ptr<CudaDevice>> MakeCudaDevice(int ordinal,
                                                            int threads);

  struct Allocation {
    Bytes size;  // as asked for
    MemoryCategory category = MemoryCategory::kActivation;
  };
  // A piece of pinned memory, free again when its event is done.
  struct Staging {
    std::byte* data = nullptr;
    CudaEvent last_use = nullptr;
  };

  Result<void> Open();
  Result<int> AddQueue(StreamRole role, int64_t workspace_bytes);
  CudaEvent EventOf(std::vector<CudaEvent>& of_marks, int mark, unsigned flags);
  // Behind so many calls of the queue in use: waits where too many are pending.
  void HoldBack(size_t calls);
  Result<void> WaitForQueue0();
  Result<void*> Reserve(int64_t bytes);
  Result<Staging*> NextStaging();
  Result<void> WriteThroughStaging(std::byte* to, const std::byte* from,
                                   int64_t bytes);
  Result<void> ReadThroughStaging(std::byte* to, const std::byte* from,
                                  int64_t bytes);
  // `code` is a cudaError_t.
  Result<void> Check(int code, std::string_view call) const;
  void Keep(const Result<void>& result);  // the first error
  void KeepHosts(const Error& error);     // by a thread of CUDA's

  const int ordinal_;
  const std::string name_;
  ThreadPool threads_;
  std::unique_ptr<CublasLtMatMul> matmul_;
  std::unique_ptr<CudaSdpa> sdpa_;
  std::vector<std::unique_ptr<CudaQueue>> queues_;
  size_t queue_in_use_ = 0;
  // By queue: calls behind the last of the events that HoldBack has recorded.
  struct Enqueued {
    size_t calls = 0;
    std::deque<CudaEvent> events;
  };
  std::vector<Enqueued> enqueued_;
  // By mark: with times; and without, for the order in a capture.
  std::vector<CudaEvent> marks_;
  std::vector<CudaEvent> captured_marks_;
  CudaStream capturing_ = nullptr;  // in which the capture began; or null
  std::vector<CudaGraphExec> graphs_;
  int lowest_priority_ = 0;
  int highest_priority_ = 0;
  std::vector<CudaStream> streams_;  // all, those of the queues among them
  std::vector<CudaEvent> events_;    // all
  std::vector<CudaEvent> free_events_;
  std::vector<void*> chunks_;
  std::vector<CudaArena> arenas_;  // by category
  std::unordered_map<void*, Allocation> in_use_;
  // With three inputs in a microbatch the host is five of these ahead before a
  // Write waits for one.
  std::array<Staging, 16> staging_;
  size_t next_staging_ = 0;
  WhileWaiting while_waiting_;
  std::optional<Error> kept_;
  std::mutex host_mutex_;  // guards what follows
  std::optional<Error> hosts_error_;
};

// GPU `ordinal` of those that CUDA_VISIBLE_DEVICES leaves visible. Its first
// use in a process takes about a second. Kernels on what it keeps in the host's
// memory run on so many threads.
Result<std::unique_ptr<CudaDevice>> MakeCudaDevice(int ordinal,
                                                   int threads = 1);

}  // namespace tessera
