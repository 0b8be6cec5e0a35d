#include "runtime/device/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "runtime/device/cuda_copy.h"
#include "runtime/kernels/cuda/cublaslt_matmul.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sdpa.h"

namespace tessera {
namespace {

// Two hundred chunks fill an H200 of 141 GB; a category wastes half of one on
// average.
constexpr int64_t kChunkBytes = int64_t{512} << 20;

// Of each of the two pieces of pinned memory: over PCIe 5.0 x16 (64 GB/s) a
// piece takes 65 us, an order more than its launch.
constexpr int64_t kStagingBytes = int64_t{4} << 20;

// What cuBLASLt wants on Hopper (cuBLAS 13 manual, cublasSetWorkspace); others
// of our kernels make do with less.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

// How often a wait looks before it sleeps between looks. A look takes about a
// microsecond.
constexpr int kLooksBeforeSleep = 2000;
constexpr std::chrono::microseconds kSleep{20};

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // else a later call would return it
    return 0;
  }
  return count;
}

Result<std::unique_ptr<CudaDevice>> MakeCudaDevice(int ordinal) {
  // 32 is the most there are (CUDA C++ Programming Guide 13.0, "CUDA
  // Environment Variables"). Read when CUDA starts.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  const int count = CudaDeviceCount();
  if (ordinal < 0 || ordinal >= count) {
    return Error{ErrorCode::kUnavailable,
                 "there is no GPU " + std::to_string(ordinal) +
                     "; this process sees " + std::to_string(count),
                 ""};
  }
  auto device = std::make_unique<CudaDevice>(ordinal);
  TESSERA_RETURN_IF_ERROR(device->Open());
  return device;
}

CudaDevice::CudaDevice(int ordinal)
    : ordinal_(ordinal), name_("cuda:" + std::to_string(ordinal)) {
  for (int category = 0; category < kMemoryCategories; ++category) {
    arenas_.emplace_back(kChunkBytes,
                         [this](int64_t bytes) { return Reserve(bytes); });
  }
}

// Errors here have nobody to be told to.
CudaDevice::~CudaDevice() {
  (void)Select();
  for (CudaStream stream : streams_) (void)cudaStreamSynchronize(stream);
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
  TESSERA_TRY(queue_, MakeStream(StreamRole::kCompute));
  for (Staging& staging : staging_) {
    void* data = nullptr;
    TESSERA_RETURN_IF_ERROR(
        Check(cudaMallocHost(&data, static_cast<size_t>(kStagingBytes)),
              "cudaMallocHost"));
    staging.data = static_cast<std::byte*>(data);
    TESSERA_TRY(staging.last_use, Record(queue_));
  }
  TESSERA_TRY(matmul_, CublasLtMatMul::Make());
  TESSERA_TRY(void* const workspace, Reserve(kWorkspaceBytes));
  kernel_queue_ = std::make_unique<CudaQueue>();
  kernel_queue_->stream = queue_;
  kernel_queue_->workspace = static_cast<std::byte*>(workspace);
  kernel_queue_->workspace_bytes = kWorkspaceBytes;
  kernel_queue_->matmul = matmul_.get();
  sdpa_ = MakeCudnnSdpa();
  kernel_queue_->sdpa = sdpa_.get();
  return Check(cudaDeviceGetAttribute(&kernel_queue_->multiprocessors,
                                      cudaDevAttrMultiProcessorCount, ordinal_),
               "cudaDeviceGetAttribute");
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
      cudaMemsetAsync(*data, 0xff, static_cast<size_t>(size.value), queue_),
      "cudaMemsetAsync"));
#endif
  in_use_[*data] = {size, category};
  account_.Add(category, size);
  return data;
}

void CudaDevice::Free(void* data) {
  const auto it = in_use_.find(data);
  TESSERA_CHECK(it != in_use_.end()) << "not in use: " << data;
  const Allocation& allocation = it->second;
  account_.Remove(allocation.category, allocation.size);
  arenas_[static_cast<size_t>(allocation.category)].Free(data);
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
  Keep(Check(cudaMemsetAsync(data, 0, static_cast<size_t>(size.value), queue_),
             "cudaMemsetAsync"));
}

void CudaDevice::Copy(void* to, const void* from, const StridedCopy& copy) {
  Keep(Select());
  Keep(Check(EnqueueCopy(to, from, copy, queue_), "copy"));
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

// The pieces take turns, so that the host fills one while the other travels.
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
                              cudaMemcpyHostToDevice, queue_),
              "cudaMemcpyAsync to the device"));
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventRecord(staging->last_use, queue_), "cudaEventRecord"));
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
                              cudaMemcpyDeviceToHost, queue_),
              "cudaMemcpyAsync to the host"));
    TESSERA_RETURN_IF_ERROR(
        Check(cudaEventRecord(staging->last_use, queue_), "cudaEventRecord"));
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

Result<void> CudaDevice::Synchronize() {
  TESSERA_RETURN_IF_ERROR(Select());
  TESSERA_TRY(const CudaEvent event, Record(queue_));
  Result<void> waited = Wait(event);
  Recycle(event);
  if (!kernel_queue_->error.empty()) {
    Keep(Error{ErrorCode::kUnavailable, name_ + ": " + kernel_queue_->error,
               ""});
    kernel_queue_->error.clear();
  }
  if (kept_) {
    const Error error = *kept_;
    kept_.reset();
    return error;
  }
  return waited;
}

Result<const Kernel*> CudaDevice::FindKernel(std::string_view kernel) const {
  return FindCudaKernel(kernel);
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

void CudaDevice::Keep(const Result<void>& result) {
  if (!result && !kept_) kept_ = result.error();
}

}  // namespace tessera
