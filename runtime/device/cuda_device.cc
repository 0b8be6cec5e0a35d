#include "runtime/device/cuda_device.h"

#include <cuda_runtime_api.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TESSERA_HAS_NVTX
#endif

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "runtime/device/cuda_copy.h"
#include "runtime/kernels/cuda/cublaslt_matmul.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/rank_sum.h"
#include "runtime/kernels/cuda/sdpa.h"

namespace tessera {
namespace {

// Some 260 chunks fill an H200 of 141 GB; a category wastes half of one on
// average.
constexpr int64_t kChunkBytes = int64_t{512} << 20;

// Of each piece of pinned memory: over PCIe 5.0 x16 (64 GB/s) a piece takes 16
// us, some times its launch.
constexpr int64_t kStagingBytes = int64_t{1} << 20;

// What cuBLASLt wants on Hopper (cuBLAS 13 manual, cublasSetWorkspace), and
// behind it room for the operands of a product: the terms of the gradients of
// a router's logits, 48 bytes a token with 8 experts (linear.cu). Others of our
// kernels make do with less.
constexpr int64_t kMatMulBytes = int64_t{32} << 20;
constexpr int64_t kWorkspaceBytes = kMatMulBytes + (int64_t{16} << 20);

// Beside computation run sums and casts, which need none, and reductions.
constexpr int64_t kFurtherWorkspaceBytes = int64_t{1} << 20;

// CUDA holds a launch back, and with it the host's thread, once a thousand are
// pending in a queue (profiler/stopwatch.cc): where a peer is waited for, what
// looks after peers has to be called. So the device itself waits with so many
// times so many calls in a queue and as many again, 288: each may be three
// launches. Marks and what awaits them lie in the queue, too.
constexpr size_t kCallsToAnEvent = 32;
constexpr size_t kMostEvents = 8;

// How often a wait looks before it sleeps between looks. A look takes about a
// microsecond.
constexpr int kLooksBeforeSleep = 2000;
constexpr std::chrono::microseconds kSleep{20};

// Before the first call of CUDA in the process, which reads it when it starts.
// 32 is the most there are (CUDA C++ Programming Guide 13.0, "CUDA Environment
// Variables").
void SetVariables() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", /*overwrite=*/0);
}

struct SharedEvent : public QueueEvent {
  ~SharedEvent() override { (void)cudaEventDestroy(event); }
  CudaEvent event = nullptr;
};

}  // namespace

int CudaDeviceCount() {
  SetVariables();
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // else a later call would return it
    return 0;
  }
  return count;
}

Result<GpuProperties> PropertiesOfGpu(int ordinal) {
  SetVariables();
  cudaDeviceProp properties = {};
  const cudaError_t code = cudaGetDeviceProperties(&properties, ordinal);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return Error{ErrorCode::kUnavailable,
                 "cudaGetDeviceProperties of GPU " + std::to_string(ordinal) +
                     ": " + cudaGetErrorString(code),
                 ""};
  }
  return GpuProperties{properties.name,
                       {static_cast<int64_t>(properties.totalGlobalMem)}};
}

Result<std::unique_ptr<CudaDevice>> MakeCudaDevice(int ordinal, int threads) {
  const int count = CudaDeviceCount();
  if (ordinal < 0 || ordinal >= count) {
    return Error{ErrorCode::kUnavailable,
                 "there is no GPU " + std::to_string(ordinal) +
                     "; this process sees " + std::to_string(count),
                 ""};
  }
  auto device = std::make_unique<CudaDevice>(ordinal, threads);
  TESSERA_RETURN_IF_ERROR(device->Open());
  return device;
}

CudaDevice::CudaDevice(int ordinal, int threads)
    : ordinal_(ordinal),
      name_("cuda:" + std::to_string(ordinal)),
      threads_(threads) {
  for (int category = 0; category < kMemoryCategories; ++category) {
    arenas_.emplace_back(kChunkBytes,
                         [this](int64_t bytes) { return Reserve(bytes); });
  }
}

// Errors here have nobody to be told to.
CudaDevice::~CudaDevice() {
  CudaDevice::WaitForAll();
  for (CudaGraphExec graph : graphs_) (void)cudaGraphExecDestroy(graph);
  for (CudaEvent event : events_) (void)cudaEventDestroy(event);
  for (CudaStream stream : streams_) (void)cudaStreamDestroy(stream);
  for (const Staging& staging : staging_) {
    if (staging.data != nullptr) (void)cudaFreeHost(staging.data);
  }
  for (void* chunk : chunks_) (void)cudaFree(chunk);
}

Result<void> CudaDevice::Open() {
  TESSERA_RETURN_IF_ERROR(Select());
  TESSERA_RETURN_IF_ERROR(Check(
      cudaDeviceGetStreamPriorityRange(&lowest_priority_, &highest_priority_),
      "cudaDeviceGetStreamPriorityRange"));
  TESSERA_TRY(matmul_, CublasLtMatMul::Make());
  sdpa_ = MakeCudnnSdpa();
  TESSERA_RETURN_IF_ERROR(AddQueue(StreamRole::kCompute, kWorkspaceBytes));
  for (Staging& staging : staging_) {
    void* data = nullptr;
    TESSERA_RETURN_IF_ERROR(
        Check(cudaMallocHost(&data, static_cast<size_t>(kStagingBytes)),
              "cudaMallocHost"));
    staging.data = static_cast<std::byte*>(data);
    TESSERA_TRY(staging.last_use, Record(queue()));
  }
  return {};
}

// ---- Memory -----------------------------------------------------------------

Result<void*> CudaDevice::Reserve(int64_t bytes) {
  void* chunk = nullptr;
  auto done = Check(cudaMalloc(&chunk, static_cast<size_t>(bytes)),
                    "cudaMalloc of " + std::to_string(bytes) + " bytes");
  if (!done) {
    (void)cudaGetLastError();  // it is told; the device is still well
    return done.error();
  }
  chunks_.push_back(chunk);
  return chunk;
}

Result<void*> CudaDevice::Allocate(Bytes size, MemoryCategory category) {
  TESSERA_RETURN_IF_ERROR(Select());
  auto data = arenas_[static_cast<size_t>(category)].Allocate(size.value);
  if (!data) {
    return Error{ErrorCode::kUnavailable,
                 "no memory for " + std::to_string(size.value) + " bytes of " +
                     std::string(NameOf(category)) + ": " +
                     data.error().message,
                 ""};
  }
#ifndef NDEBUG
  // Not a number in every floating-point type.
  Keep(Check(
      cudaMemsetAsync(*data, 0xff, static_cast<size_t>(size.value), queue()),
      "cudaMemsetAsync"));
#endif
  in_use_[*data] = {size, category};
  account_.Add(category, size);
  return data;
}

// Where there is no more, the allocations themselves say so.
void CudaDevice::Expect(Bytes size, MemoryCategory category) {
  static_assert(kAlignment == CudaArena::kAlignment);
  if (!Select()) return;
  (void)arenas_[static_cast<size_t>(category)].Expect(size.value);
}

void CudaDevice::Free(void* data) {
  const auto it = in_use_.find(data);
  TESSERA_CHECK(it != in_use_.end()) << "not in use: " << data;
  const Allocation& allocation = it->second;
  account_.Remove(allocation.category, allocation.size);
  arenas_[static_cast<size_t>(allocation.category)].Free(data,
                                                         allocation.size.value);
  in_use_.erase(it);
}

Bytes CudaDevice::reserved() const {
  Bytes sum;
  for (const CudaArena& arena : arenas_) sum += {arena.reserved_bytes()};
  return sum;
}

void CudaDevice::Zero(void* data, Bytes size) {
  if (size.value == 0) return;
  Keep(Select());
  Keep(Check(cudaMemsetAsync(data, 0, static_cast<size_t>(size.value), queue()),
             "cudaMemsetAsync"));
  HoldBack(1);
}

void CudaDevice::Copy(void* to, const void* from, const StridedCopy& copy) {
  Keep(Select());
  Keep(Check(EnqueueCopy(to, from, copy, queue()), "copy"));
  HoldBack(1);
}

void CudaDevice::Write(void* device_to, const void* host_from, Bytes size) {
  Keep(WriteThroughStaging(static_cast<std::byte*>(device_to),
                           static_cast<const std::byte*>(host_from),
                           size.value));
}

void CudaDevice::Read(void* host_to, const void* device_from, Bytes size) {
  Keep(ReadThroughStaging(static_cast<std::byte*>(host_to),
                          static_cast<const std::byte*>(device_from),
                          size.value));
}

// The pieces take turns, so that the host fills one while others travel, or
// wait for what is before them in the queue.
Result<CudaDevice::Staging*> CudaDevice::NextStaging() {
  Staging& staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  TESSERA_RETURN_IF_ERROR(Wait(staging.last_use));
  return &staging;
}

Result<void> CudaDevice::WriteThroughStaging(std::byte* to,
                                             const std::byte* from,
                                             int64_t bytes) {
  TESSERA_RETURN_IF_ERROR(Select());
  for (int64_t begin = 0; begin < bytes; begin += kStagingBytes) {
    const auto piece =
        static_cast<size_t>(std::min(bytes - begin, kStagingBytes));
    TESSERA_TRY(Staging* const staging, NextStaging());
    std::memcpy(staging->data, from + begin, piece);
    TESSERA_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(to + begin, staging->data, piece,
                              cudaMemcpyHostToDevice, queue()),
              "cudaMemcpyAsync to the device"));
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventRecord(staging->last_use, queue()), "cudaEventRecord"));
  }
  return {};
}

// One piece is under way while the one before is copied out.
Result<void> CudaDevice::ReadThroughStaging(std::byte* to,
                                            const std::byte* from,
                                            int64_t bytes) {
  TESSERA_RETURN_IF_ERROR(Select());
  struct {
    Staging* staging = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0;
  } under_way;
  const auto finish = [&]() -> Result<void> {
    if (under_way.staging == nullptr) return {};
    TESSERA_RETURN_IF_ERROR(Wait(under_way.staging->last_use));
    std::memcpy(under_way.to, under_way.staging->data, under_way.bytes);
    return {};
  };
  for (int64_t begin = 0; begin < bytes; begin += kStagingBytes) {
    const auto piece =
        static_cast<size_t>(std::min(bytes - begin, kStagingBytes));
    TESSERA_TRY(Staging* const staging, NextStaging());
    TESSERA_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(staging->data, from + begin, piece,
                              cudaMemcpyDeviceToHost, queue()),
              "cudaMemcpyAsync to the host"));
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventRecord(staging->last_use, queue()), "cudaEventRecord"));
    TESSERA_RETURN_IF_ERROR(finish());
    under_way = {staging, to + begin, piece};
  }
  return finish();
}

// ---- Streams and events -----------------------------------------------------

Result<void> CudaDevice::Select() const {
  return Check(cudaSetDevice(ordinal_), "cudaSetDevice");
}

Result<CudaStream> CudaDevice::MakeStream(StreamRole role) {
  TESSERA_RETURN_IF_ERROR(Select());
  CudaStream stream = nullptr;
  const int priority =
      role == StreamRole::kCompute ? lowest_priority_ : highest_priority_;
  TESSERA_RETURN_IF_ERROR(Check(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
      "cudaStreamCreateWithPriority"));
  streams_.push_back(stream);
  return stream;
}

Result<CudaEvent> CudaDevice::Record(CudaStream stream) {
  if (free_events_.empty()) {
    CudaEvent made = nullptr;
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming),
              "cudaEventCreateWithFlags"));
    events_.push_back(made);
    free_events_.push_back(made);
  }
  CudaEvent event = free_events_.back();
  TESSERA_RETURN_IF_ERROR(
      Check(cudaEventRecord(event, stream), "cudaEventRecord"));
  free_events_.pop_back();
  return event;
}

void CudaDevice::Recycle(CudaEvent event) {
  free_events_.push_back(event);
}

Result<void> CudaDevice::RunAfter(CudaStream later, CudaEvent event) {
  return Check(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

// The wait takes what the event stands for at this moment, so the event may be
// recorded anew at once.
Result<void> CudaDevice::Order(CudaStream earlier, CudaStream later) {
  TESSERA_TRY(const CudaEvent event, Record(earlier));
  Result<void> done = RunAfter(later, event);
  Recycle(event);
  return done;
}

Result<bool> CudaDevice::IsDone(CudaEvent event) {
  const cudaError_t code = cudaEventQuery(event);
  if (code == cudaErrorNotReady) return false;
  TESSERA_RETURN_IF_ERROR(Check(code, "cudaEventQuery"));
  return true;
}

Result<void> CudaDevice::Wait(CudaEvent event) {
  for (int looks = 0;; ++looks) {
    TESSERA_TRY(const bool done, IsDone(event));
    if (done) return {};
    if (while_waiting_) {
      if (auto well = while_waiting_(); !well) return well;
    }
    if (looks >= kLooksBeforeSleep) {
      looks = kLooksBeforeSleep;
      std::this_thread::sleep_for(kSleep);
    }
  }
}

// ---- Queues -----------------------------------------------------------------

Result<int> CudaDevice::AddQueue(StreamRole role, int64_t workspace_bytes) {
  auto queue = std::make_unique<CudaQueue>();
  TESSERA_TRY(queue->stream, MakeStream(role));
  TESSERA_TRY(void* const workspace, Reserve(workspace_bytes));
  queue->workspace = static_cast<std::byte*>(workspace);
  queue->workspace_bytes = workspace_bytes;
  queue->matmul_bytes = std::min(workspace_bytes, kMatMulBytes);
  queue->matmul = matmul_.get();
  queue->sdpa = sdpa_.get();
  TESSERA_RETURN_IF_ERROR(
      Check(cudaDeviceGetAttribute(&queue->multiprocessors,
                                   cudaDevAttrMultiProcessorCount, ordinal_),
            "cudaDeviceGetAttribute"));
  queues_.push_back(std::move(queue));
  enqueued_.emplace_back();
  return static_cast<int>(queues_.size()) - 1;
}

Result<int> CudaDevice::MakeQueue(StreamRole role) {
  return AddQueue(role, kFurtherWorkspaceBytes);
}

void CudaDevice::UseQueue(int queue) {
  queue_in_use_ = static_cast<size_t>(queue);
}

CudaStream CudaDevice::queue() const {
  return kernel_queue()->stream;
}

CudaEvent CudaDevice::EventOf(std::vector<CudaEvent>& of_marks, int mark,
                              unsigned flags) {
  const auto m = static_cast<size_t>(mark);
  while (of_marks.size() <= m) {
    CudaEvent made = nullptr;
    Keep(Check(cudaEventCreateWithFlags(&made, flags),
               "cudaEventCreateWithFlags"));
    events_.push_back(made);
    of_marks.push_back(made);
  }
  return of_marks[m];
}

// In a capture an event is a dependency between its streams, and no node of the
// graph: a node for each mark made the replays of small kernels slower than
// their launches.
void CudaDevice::Mark(int mark) {
  CudaEvent const event =
      capturing_ == nullptr
          ? EventOf(marks_, mark, cudaEventDefault)
          : EventOf(captured_marks_, mark, cudaEventDisableTiming);
  Keep(Check(cudaEventRecord(event, queue()), "cudaEventRecord"));
  HoldBack(1);
}

void CudaDevice::Await(int mark) {
  const auto& marks = capturing_ == nullptr ? marks_ : captured_marks_;
  Keep(RunAfter(queue(), marks[static_cast<size_t>(mark)]));
  HoldBack(1);
}

Result<Duration> CudaDevice::Between(int first, int second) {
  float milliseconds = 0;
  TESSERA_RETURN_IF_ERROR(Check(
      cudaEventElapsedTime(&milliseconds, marks_[static_cast<size_t>(first)],
                           marks_[static_cast<size_t>(second)]),
      "cudaEventElapsedTime"));
  return Duration::FromSeconds(static_cast<double>(milliseconds) * 1e-3);
}

void CudaDevice::Launch(const Kernel& kernel, const KernelCall& call) {
  KernelCall here = call;
  here.queue = kernel_queue();
  kernel.run(here);
  HoldBack(1);
}

void CudaDevice::LaunchList(const Kernel& kernel,
                            std::span<const KernelCall> calls) {
  std::vector<KernelCall> here(calls.begin(), calls.end());
  for (KernelCall& call : here) call.queue = kernel_queue();
  kernel.run_list(here);
  HoldBack(calls.size());
}

void CudaDevice::HoldBack(size_t calls) {
  if (capturing_ != nullptr) return;
  Enqueued& enqueued = enqueued_[queue_in_use_];
  enqueued.calls += calls;
  if (enqueued.calls < kCallsToAnEvent) return;
  enqueued.calls = 0;
  const auto last = Record(queue());
  if (!last) return Keep(last.error());
  std::deque<CudaEvent>& events = enqueued.events;
  events.push_back(*last);
  const auto take = [&] {
    Recycle(events.front());
    events.pop_front();
  };
  while (!events.empty()) {
    const Result<bool> done = IsDone(events.front());
    if (!done) return Keep(done.error());
    if (!*done) break;
    take();
  }
  if (events.size() > kMostEvents) {
    Keep(Wait(events.front()));
    take();
  } else if (while_waiting_) {
    Keep(while_waiting_());
  }
}

void CudaDevice::EnqueueWrite(void* device_to, const void* host_from,
                              Bytes size) {
  Keep(Check(
      cudaMemcpyAsync(device_to, host_from, static_cast<size_t>(size.value),
                      cudaMemcpyHostToDevice, queue()),
      "cudaMemcpyAsync to the device"));
  HoldBack(1);
}

void CudaDevice::EnqueueRead(void* host_to, const void* device_from,
                             Bytes size) {
  Keep(Check(
      cudaMemcpyAsync(host_to, device_from, static_cast<size_t>(size.value),
                      cudaMemcpyDeviceToHost, queue()),
      "cudaMemcpyAsync to the host"));
  HoldBack(1);
}

Result<void> CudaDevice::Pin(void* host_data, Bytes size) {
  return Check(cudaHostRegister(host_data, static_cast<size_t>(size.value),
                                cudaHostRegisterDefault),
               "cudaHostRegister of " + std::to_string(size.value) + " bytes");
}

void CudaDevice::Unpin(void* host_data) {
  Keep(Check(cudaHostUnregister(host_data), "cudaHostUnregister"));
}

void CudaDevice::EnqueueOnHost(std::function<Result<void>()> function) {
  struct Call {
    CudaDevice* device;
    std::function<Result<void>()> function;
  };
  auto call = std::make_unique<Call>(Call{this, std::move(function)});
  const auto run = [](void* data) {
    const std::unique_ptr<Call> owned(static_cast<Call*>(data));
    if (auto done = owned->function(); !done) {
      owned->device->KeepHosts(done.error());
    }
  };
  auto enqueued =
      Check(cudaLaunchHostFunc(queue(), run, call.get()), "cudaLaunchHostFunc");
  if (enqueued) call.release();  // NOLINT: `run` owns it
  Keep(enqueued);
}

// ---- Graphs -----------------------------------------------------------------

// Ranks of one process capture beside each other, each on a thread of its own.
Result<void> CudaDevice::BeginCapture() {
  TESSERA_RETURN_IF_ERROR(Select());
  TESSERA_RETURN_IF_ERROR(
      Check(cudaStreamBeginCapture(queue(), cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture"));
  capturing_ = queue();
  return {};
}

Result<int> CudaDevice::EndCapture() {
  cudaGraph_t graph = nullptr;
  auto done =
      Check(cudaStreamEndCapture(std::exchange(capturing_, nullptr), &graph),
            "cudaStreamEndCapture");
  // The first call that could not be captured tells more.
  if (kept_) done = *std::exchange(kept_, std::nullopt);
  CudaGraphExec made = nullptr;
  if (done) {
    // Each task has the priority of its own queue, as without graphs.
    done = Check(cudaGraphInstantiate(&made, graph,
                                      cudaGraphInstantiateFlagUseNodePriority),
                 "cudaGraphInstantiate");
  }
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  if (!done) {
    (void)cudaGetLastError();  // it is told
    return done.error();
  }
  graphs_.push_back(made);
  // A capture may take long, and holds the host back nowhere.
  if (while_waiting_) Keep(while_waiting_());
  return static_cast<int>(graphs_.size()) - 1;
}

void CudaDevice::Replay(int graph) {
  Keep(Check(cudaGraphLaunch(graphs_[static_cast<size_t>(graph)], queue()),
             "cudaGraphLaunch"));
  HoldBack(1);
}

#ifdef TESSERA_HAS_NVTX
void CudaDevice::BeginRange(const std::string& name) {
  nvtxRangePushA(name.c_str());
}
void CudaDevice::EndRange() {
  nvtxRangePop();
}
#else
void CudaDevice::BeginRange(const std::string&) {}
void CudaDevice::EndRange() {}
#endif

// ---- Ranks on one GPU -------------------------------------------------------

Result<std::shared_ptr<QueueEvent>> CudaDevice::RecordEvent() {
  auto event = std::make_shared<SharedEvent>();
  TESSERA_RETURN_IF_ERROR(
      Check(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming),
            "cudaEventCreateWithFlags"));
  TESSERA_RETURN_IF_ERROR(
      Check(cudaEventRecord(event->event, queue()), "cudaEventRecord"));
  return std::shared_ptr<QueueEvent>(std::move(event));
}

// The wait takes what the event stands for at this moment.
void CudaDevice::AwaitEvent(const std::shared_ptr<QueueEvent>& event) {
  Keep(RunAfter(queue(), static_cast<const SharedEvent&>(*event).event));
}

void CudaDevice::Sum(std::span<const std::byte* const> sources, std::byte* to,
                     int64_t count, DType dtype) {
  EnqueueRankSum(sources, to, count, dtype, *kernel_queue());
  HoldBack(1);
}

Result<void> CudaDevice::WaitForQueue0() {
  TESSERA_RETURN_IF_ERROR(Select());
  TESSERA_TRY(const CudaEvent event, Record(queues_[0]->stream));
  const Result<void> waited = Wait(event);
  Recycle(event);
  return waited;
}

Result<void> CudaDevice::Synchronize() {
  // Behind an error of the work every call fails: what was kept says where it
  // was.
  const Result<void> waited = WaitForQueue0();
  for (const auto& queue : queues_) {
    if (queue->error.empty()) continue;
    Keep(Error{ErrorCode::kUnavailable, name_ + ": " + queue->error, ""});
    queue->error.clear();
  }
  {
    const std::lock_guard lock(host_mutex_);
    if (hosts_error_) Keep(*hosts_error_);
    hosts_error_.reset();
  }
  if (kept_) {
    const Error error = *kept_;
    kept_.reset();
    return error;
  }
  return waited;
}

// Errors of the work are those of its failure, which is told.
void CudaDevice::WaitForAll() {
  (void)Select();
  for (CudaStream stream : streams_) (void)cudaStreamSynchronize(stream);
}

Result<const Kernel*> CudaDevice::FindKernel(std::string_view kernel) const {
  return FindCudaKernel(kernel);
}

const Kernel* CudaDevice::FindFusedKernel(std::string_view name) const {
  const auto kernels = CudaFusedKernels();
  const auto it = std::ranges::find(kernels, name, &Kernel::name);
  return it == kernels.end() ? nullptr : &*it;
}

// ---- Algorithms of products -------------------------------------------------

std::string CudaDevice::Maker() const {
  const MatMulChoices& choices = matmul_->choices();
  return choices.device + ", cuBLASLt " + std::to_string(choices.version);
}

Result<void> CudaDevice::ReadChoices(std::string_view choices,
                                     std::string_view path) {
  TESSERA_TRY(const MatMulChoices parsed, ParseMatMulChoices(choices, path));
  auto adopted = matmul_->Adopt(parsed);
  if (!adopted) return adopted.error().At(std::string(path));
  return {};
}

std::string CudaDevice::Choices() const {
  return FormatMatMulChoices(matmul_->choices());
}

std::vector<MatMulKey> CudaDevice::TakeUntuned() {
  return matmul_->TakeUntuned();
}

Result<MatMulChoice> CudaDevice::Tune(const MatMulKey& key) {
  // As many as part `matmul` of tools/gpu_check.sh times.
  constexpr int kCandidates = 16;
  TESSERA_RETURN_IF_ERROR(Select());
  TESSERA_RETURN_IF_ERROR(matmul_->Tune(key, kCandidates, *queues_[0]));
  return matmul_->choices().rows.at(key);
}

void CudaDevice::Adopt(const std::map<MatMulKey, MatMulChoice>& rows) {
  MatMulChoices choices = matmul_->choices();
  choices.rows = rows;
  TESSERA_CHECK(matmul_->Adopt(choices).has_value());
}

// ---- Errors -----------------------------------------------------------------

Result<void> CudaDevice::Check(int code, std::string_view call) const {
  const auto error = static_cast<cudaError_t>(code);
  if (error == cudaSuccess) return {};
  return Error{ErrorCode::kUnavailable,
               name_ + ": " + std::string(call) + ": " +
                   cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                   ")",
               ""};
}

void CudaDevice::KeepHosts(const Error& error) {
  const std::lock_guard lock(host_mutex_);
  if (!hosts_error_) hosts_error_ = error;
}

void CudaDevice::Keep(const Result<void>& result) {
  if (!result && !kept_) kept_ = result.error();
}

}  // namespace tessera
