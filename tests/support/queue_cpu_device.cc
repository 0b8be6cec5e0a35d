#include "tests/support/queue_cpu_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "planner/base/rng.h"
#include "planner/base/table.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/reduce.h"

namespace tessera {
namespace {

// One job in so many is late, by as long as many small jobs take.
constexpr uint32_t kLateOneIn = 16;
constexpr std::chrono::microseconds kLate{50};

// Kernels that take lists on CUDA. They are called one by one.
constexpr std::string_view kListed[] = {
    "adamw", "momentum", "sgd", "cast", "square_sum", "stochastic_cast"};
void RunAll(std::span<const KernelCall>) {
  TESSERA_CHECK(false) << "run past LaunchList";
}

// A call that outlives its caller's.
struct CopiedCall {
  explicit CopiedCall(const KernelCall& of)
      : attributes(of.attributes.begin(), of.attributes.end()),
        operands(of.operands.begin(), of.operands.end()),
        results(of.results.begin(), of.results.end()),
        call(of) {
    call.attributes = attributes;
    call.operands = operands;
    call.results = results;
  }
  CopiedCall(const CopiedCall&) = delete;
  CopiedCall& operator=(const CopiedCall&) = delete;

  std::vector<Attribute> attributes;
  std::vector<LocalTensor> operands;
  std::vector<LocalTensor> results;
  KernelCall call;
};

// Once reached, for ever.
struct CpuEvent : public QueueEvent {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
};

}  // namespace

RowsApart RowsApartOf(std::string_view kernel) {
  if (kernel == "linear_dw" || kernel == "linear_db") {
    return RowsApart::kFirstOperand;
  }
  const bool results =
      kernel.ends_with("_dqkv") || kernel.starts_with("multiply+silu_dx") ||
      (kernel.starts_with("rotary") && kernel.ends_with("_dx"));
  return results ? RowsApart::kResults : RowsApart::kNone;
}

QueueCpuDevice::QueueCpuDevice(uint64_t seed) : seed_(seed) {
  TESSERA_CHECK(MakeQueue(StreamRole::kCompute).has_value());
  for (const Kernel& kernel : CpuKernels()) {
    kernels_.push_back(kernel);
    if (std::ranges::count(kListed, kernel.name) > 0) {
      kernels_.back().run_list = RunAll;
    }
    kernels_.back().rows_apart = RowsApartOf(kernel.name);
  }
}

QueueCpuDevice::~QueueCpuDevice() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  for (const auto& queue : queues_) {
    queue->woken.notify_one();
    queue->thread.join();
  }
}

Result<int> QueueCpuDevice::MakeQueue(StreamRole) {
  const std::lock_guard lock(mutex_);
  queues_.push_back(std::make_unique<Queue>());
  Queue& queue = *queues_.back();
  const uint64_t seed = Mix64(seed_ + queues_.size());
  queue.thread = std::thread([this, &queue, seed] { Work(queue, seed); });
  return static_cast<int>(queues_.size()) - 1;
}

void QueueCpuDevice::Work(Queue& queue, uint64_t seed) {
  Rng rng(seed);
  std::unique_lock lock(mutex_);
  for (;;) {
    queue.woken.wait(lock, [&] { return ends_ || !queue.jobs.empty(); });
    if (queue.jobs.empty()) return;
    const std::function<void()> job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    lock.unlock();
    if (rng.Below(kLateOneIn) == 0) std::this_thread::sleep_for(kLate);
    job();
    lock.lock();
    if (--unfinished_ == 0) drained_.notify_all();
  }
}

void QueueCpuDevice::Enqueue(std::function<void()> job) {
  if (!captured_) return EnqueueIn(in_use_, std::move(job));
  TESSERA_CHECK(captured_->queues.contains(in_use_))
      << "queue " << in_use_ << " takes no part in the capture";
  captured_->jobs.push_back({in_use_, std::move(job)});
}

void QueueCpuDevice::EnqueueIn(size_t queue, std::function<void()> job) {
  Queue* of = nullptr;
  {
    const std::lock_guard lock(mutex_);
    of = queues_[queue].get();
    of->jobs.push_back(std::move(job));
    ++unfinished_;
  }
  of->woken.notify_one();
}

void QueueCpuDevice::RefuseInCapture(const char* call) const {
  TESSERA_CHECK(!captured_) << call << " in a capture";
}

// ---- Memory and kernels

Result<void*> QueueCpuDevice::Allocate(Bytes size, MemoryCategory category) {
  RefuseInCapture("Allocate");
  TESSERA_TRY(void* const data, memory_.Allocate(size, category));
  account_.Add(category, size);
  return data;
}

// What is enqueued may use it still, and nobody else does before the end.
void QueueCpuDevice::Free(void* data) {
  Drain();
  memory_.Free(data);
}

void QueueCpuDevice::Zero(void* data, Bytes size) {
  Enqueue([=, this] { memory_.Zero(data, size); });
}

void QueueCpuDevice::Copy(void* to, const void* from, const StridedCopy& copy) {
  Enqueue([=, this] { memory_.Copy(to, from, copy); });
}

void QueueCpuDevice::Write(void* device_to, const void* host_from, Bytes size) {
  RefuseInCapture("Write");
  const auto* const from = static_cast<const std::byte*>(host_from);
  Enqueue([device_to, bytes = std::vector<std::byte>(from, from + size.value)] {
    if (!bytes.empty()) std::memcpy(device_to, bytes.data(), bytes.size());
  });
}

void QueueCpuDevice::Read(void* host_to, const void* device_from, Bytes size) {
  RefuseInCapture("Read");
  EnqueueRead(host_to, device_from, size);
  Drain();
}

void QueueCpuDevice::EnqueueWrite(void* device_to, const void* host_from,
                                  Bytes size) {
  Enqueue([=, this] { memory_.Write(device_to, host_from, size); });
}

void QueueCpuDevice::EnqueueRead(void* host_to, const void* device_from,
                                 Bytes size) {
  Enqueue([=, this] { memory_.Read(host_to, device_from, size); });
}

Result<const Kernel*> QueueCpuDevice::FindKernel(
    std::string_view kernel) const {
  return Find("kernel", std::span<const Kernel>(kernels_), kernel);
}

namespace {

void RunPart(std::string_view kernel, KernelCall call,
             std::span<const LocalTensor> operands,
             std::span<const LocalTensor> results) {
  call.operands = operands;
  call.results = results;
  FindCpuKernel(kernel).value()->run(call);
}

// ---- The fused kernels, by their parts

void LinearGelu(const KernelCall& call) {
  RunPart("linear", call, call.operands, call.results.first(1));
  RunPart("gelu", call, call.results.first(1), call.results.subspan(1));
}

void LinearDxGelu(const KernelCall& call) {
  RunPart("linear_dx", call, call.operands.first(2), call.results);
  const std::array<LocalTensor, 2> pair = {call.results[0], call.operands[2]};
  RunPart("gelu_dx", call, pair, call.results);
}

// Operands and results have one shape, that of the call's first result.
void Multiply(const KernelCall& call, const LocalTensor& a,
              const LocalTensor& b, const LocalTensor& product) {
  KernelCall part = call;
  const Indices& all = call.rule->results[0];
  const IndexRule rule = {call.rule->factors, {all, all}, {all}, {0, 0}};
  part.rule = &rule;
  const std::array<LocalTensor, 2> pair = {a, b};
  RunPart("multiply", part, pair, {&product, 1});
}

void SiluGate(const KernelCall& call) {
  RunPart("silu", call, call.operands.first(1), call.results.first(1));
  Multiply(call, call.results[0], call.operands[1], call.results[1]);
}

template <bool kBoth>
void SiluGateDx(const KernelCall& call) {
  const auto& in = call.operands;
  if (kBoth) Multiply(call, in[0], in[3], call.results[1]);
  const LocalTensor& dx = call.results[0];
  Multiply(call, in[0], in[1], dx);
  const std::array<LocalTensor, 2> pair = {dx, in[2]};
  RunPart("silu_dx", call, pair, call.results.first(1));
}

template <bool kCentred>
void AddNorm(const KernelCall& call) {
  const size_t terms = call.operands.size() - (kCentred ? 2 : 1);
  RunPart("add", call, call.operands.first(terms), call.results.first(1));
  std::vector<LocalTensor> operands = {call.results[0]};
  operands.insert(operands.end(),
                  call.operands.begin() + static_cast<int64_t>(terms),
                  call.operands.end());
  RunPart(kCentred ? "layer_norm" : "rms_norm", call, operands,
          call.results.subspan(1));
}

template <bool kCentred, bool kAdds, bool kWeights, bool kColumns>
void NormBackward(const KernelCall& call) {
  constexpr size_t kOfNorm = kCentred ? 5 : 4;
  const std::string norm = kCentred ? "layer_norm" : "rms_norm";
  const auto& in = call.operands;
  const auto dx = call.results.first(1);
  KernelCall once = call;
  once.accumulate = false;
  RunPart(norm + "_dx", once, in.first(kOfNorm), dx);
  if (kAdds) {
    std::vector<LocalTensor> terms = {dx[0]};
    terms.insert(terms.end(), in.begin() + kOfNorm, in.end());
    RunPart("sum", once, terms, dx);
  }
  constexpr size_t kOfWeights = kWeights ? 1 + kCentred : 0;
  if (kWeights) {
    std::vector<LocalTensor> operands = {in[0], in[1]};
    operands.insert(operands.end(), in.begin() + 3, in.begin() + kOfNorm);
    RunPart(norm + "_dw", call, operands, call.results.subspan(1, kOfWeights));
  }
  if (kColumns) {
    RunPart("linear_db", call, dx, call.results.subspan(1 + kOfWeights));
  }
}

template <bool kDecays>
void AdamCast(const KernelCall& call) {
  RunPart(kDecays ? "adamw" : "adam", call, call.operands,
          call.results.first(3));
  RunPart("cast", call, call.results.first(1), call.results.subspan(3));
}

}  // namespace

const Kernel* QueueCpuDevice::FindFusedKernel(std::string_view name) const {
  static const Kernel kernels[] = {
      {"linear+gelu", LinearGelu},
      {"linear_dx+gelu_dx", LinearDxGelu},
      {"silu+multiply", SiluGate},
      {"multiply+silu_dx", SiluGateDx<false>, false, nullptr,
       RowsApart::kResults},
      {"multiply+silu_dx+multiply", SiluGateDx<true>, false, nullptr,
       RowsApart::kResults},
      {"add+layer_norm", AddNorm<true>},
      {"add+rms_norm", AddNorm<false>},
      {"layer_norm_dx+sum", NormBackward<true, true, false, false>},
      {"rms_norm_dx+sum", NormBackward<false, true, false, false>},
      {"layer_norm_dx+dw", NormBackward<true, false, true, false>, true},
      {"rms_norm_dx+dw", NormBackward<false, false, true, false>, true},
      {"layer_norm_dx+sum+dw", NormBackward<true, true, true, false>, true},
      {"rms_norm_dx+sum+dw", NormBackward<false, true, true, false>, true},
      {"layer_norm_dx+dw+db", NormBackward<true, false, true, true>, true},
      {"layer_norm_dx+sum+dw+db", NormBackward<true, true, true, true>, true},
      {"adamw+cast", AdamCast<true>},
      {"adam+cast", AdamCast<false>},
  };
  const auto* const it = std::ranges::find(kernels, name, &Kernel::name);
  return it == std::end(kernels) ? nullptr : it;
}

namespace {

// A tensor whose rows lie apart, without the gaps; what lies between the rows
// stays as it is.
class Packed {
 public:
  explicit Packed(LocalTensor& tensor) : there_(tensor) {
    if (tensor.row_stride == 0) return;
    bytes_.resize(static_cast<size_t>(tensor.elements() * size()));
    ForEachRow([](std::byte* packed, std::byte* apart, size_t bytes) {
      std::memcpy(packed, apart, bytes);
    });
    tensor.data = bytes_.data();
    tensor.row = tensor.row_stride = 0;
  }
  void PutBack() {
    if (bytes_.empty()) return;
    ForEachRow([](std::byte* packed, std::byte* apart, size_t bytes) {
      std::memcpy(apart, packed, bytes);
    });
  }

 private:
  int64_t size() const { return SizeOf(there_.dtype); }
  template <typename Body>
  void ForEachRow(Body body) {
    for (int64_t i = 0; i < there_.elements() / there_.row; ++i) {
      body(bytes_.data() + i * there_.row * size(),
           there_.as<std::byte>() + i * there_.row_stride * size(),
           static_cast<size_t>(there_.row * size()));
    }
  }

  const LocalTensor there_;
  std::vector<std::byte> bytes_;
};

void RunPacked(const Kernel& kernel, CopiedCall& copied) {
  std::deque<Packed> operands;
  std::deque<Packed> results;
  for (LocalTensor& tensor : copied.operands) operands.emplace_back(tensor);
  for (LocalTensor& tensor : copied.results) results.emplace_back(tensor);
  kernel.run(copied.call);
  for (Packed& tensor : results) tensor.PutBack();
}

}  // namespace

void QueueCpuDevice::Launch(const Kernel& kernel, const KernelCall& call) {
  const auto gaps = [](std::span<const LocalTensor> tensors) {
    return std::ranges::any_of(tensors, [](const LocalTensor& tensor) {
      return tensor.row_stride > 0;
    });
  };
  const bool first = gaps(call.operands.first(call.operands.empty() ? 0 : 1));
  const bool results = gaps(call.results);
  TESSERA_CHECK((!first || kernel.rows_apart == RowsApart::kFirstOperand) &&
                (!results || kernel.rows_apart == RowsApart::kResults) &&
                (call.operands.empty() || !gaps(call.operands.subspan(1))))
      << kernel.name;
  calls_with_gaps_ += first || results;
  Enqueue([&kernel, call = std::make_shared<CopiedCall>(call)] {
    // A graph runs it again.
    CopiedCall copied(call->call);
    RunPacked(kernel, copied);
  });
}

// Sums that add to one number are the one exception from any order.
void QueueCpuDevice::LaunchList(const Kernel& kernel,
                                std::span<const KernelCall> calls) {
  auto copied = std::make_shared<std::deque<CopiedCall>>();
  for (const KernelCall& call : calls) {
    if (kernel.accumulates) {
      copied->emplace_back(call);
    } else {
      copied->emplace_front(call);
    }
  }
  Enqueue([&kernel, copied] {
    for (const CopiedCall& one : *copied) kernel.run(one.call);
  });
}

// ---- Order

void QueueCpuDevice::Mark(int mark) {
  const auto m = static_cast<size_t>(mark);
  {
    const std::lock_guard lock(mutex_);
    if (marks_.size() <= m) marks_.resize(m + 1);
    marks_[m].capture = captured_ ? static_cast<int>(graphs_.size()) : -1;
  }
  if (!captured_) return MarkIn(in_use_, mark);
  Enqueue(nullptr);
  captured_->jobs.back().mark = mark;
}

void QueueCpuDevice::MarkIn(size_t queue, int mark) {
  Noted* noted = nullptr;
  int64_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    noted = &marks_[static_cast<size_t>(mark)];
    count = ++noted->enqueued;
  }
  EnqueueIn(queue, [this, noted, count] {
    {
      const std::lock_guard lock(mutex_);
      noted->reached = count;
      noted->time = Clock::now();
    }
    noted->changed.notify_all();
  });
}

void QueueCpuDevice::Await(int mark) {
  const auto m = static_cast<size_t>(mark);
  {
    const std::lock_guard lock(mutex_);
    TESSERA_CHECK(marks_[m].capture ==
                  (captured_ ? static_cast<int>(graphs_.size()) : -1))
        << "mark " << mark << " lies outside of the capture, or in one";
  }
  if (!captured_) return AwaitIn(in_use_, mark);
  captured_->queues.try_emplace(in_use_);
  Enqueue(nullptr);
  captured_->jobs.back().mark = mark;
  captured_->jobs.back().awaits = true;
}

void QueueCpuDevice::AwaitIn(size_t queue, int mark) {
  Noted* noted = nullptr;
  int64_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    noted = &marks_[static_cast<size_t>(mark)];
    count = noted->enqueued;
  }
  EnqueueIn(queue, [this, noted, count] {
    std::unique_lock lock(mutex_);
    noted->changed.wait(lock, [&] { return noted->reached >= count; });
  });
}

Result<Duration> QueueCpuDevice::Between(int first, int second) {
  const std::lock_guard lock(mutex_);
  const auto time = marks_[static_cast<size_t>(second)].time -
                    marks_[static_cast<size_t>(first)].time;
  return Duration{
      std::chrono::duration_cast<std::chrono::nanoseconds>(time).count() *
      1000};
}

Result<std::shared_ptr<QueueEvent>> QueueCpuDevice::RecordEvent() {
  RefuseInCapture("RecordEvent");
  auto event = std::make_shared<CpuEvent>();
  Enqueue([event] {
    const std::lock_guard lock(event->mutex);
    event->reached = true;
    event->changed.notify_all();
  });
  return std::shared_ptr<QueueEvent>(event);
}

void QueueCpuDevice::AwaitEvent(const std::shared_ptr<QueueEvent>& event) {
  RefuseInCapture("AwaitEvent");
  Enqueue([awaited = std::static_pointer_cast<CpuEvent>(event)] {
    std::unique_lock lock(awaited->mutex);
    awaited->changed.wait(lock, [&] { return awaited->reached; });
  });
}

void QueueCpuDevice::Sum(std::span<const std::byte* const> sources,
                         std::byte* to, int64_t count, DType dtype) {
  Enqueue([=, of = std::vector(sources.begin(), sources.end())] {
    SumInOrder(of, to, nullptr, count, dtype, /*past_cache=*/false);
  });
}

void QueueCpuDevice::EnqueueOnHost(std::function<Result<void>()> function) {
  RefuseInCapture("EnqueueOnHost");
  Enqueue([this, function = std::move(function)] {
    auto done = function();
    if (done) return;
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = done.error();
  });
}

// ---- Graphs

Result<void> QueueCpuDevice::BeginCapture() {
  RefuseInCapture("BeginCapture");
  captured_.emplace();
  captured_in_ = in_use_;
  captured_->queues.try_emplace(in_use_);
  return {};
}

Result<int> QueueCpuDevice::EndCapture() {
  TESSERA_CHECK(captured_.has_value()) << "no capture goes on";
  // The last of every other queue is a mark that the first one awaits.
  std::map<size_t, const CapturedJob*> last;
  std::vector<int> awaited;
  for (const CapturedJob& job : captured_->jobs) {
    last[job.queue] = &job;
    if (job.queue == captured_in_ && job.awaits) awaited.push_back(job.mark);
  }
  for (const auto& [queue, job] : last) {
    const bool joined =
        !job->job && !job->awaits && std::ranges::count(awaited, job->mark) > 0;
    TESSERA_CHECK(queue == captured_in_ || joined)
        << "queue " << queue << " is not awaited at the end of the capture";
  }
  graphs_.push_back(*std::exchange(captured_, std::nullopt));
  for (auto& [queue, stands_in] : graphs_.back().queues) {
    const auto [it, is_new] =
        stand_ins_.try_emplace(std::pair(captured_in_, queue));
    if (is_new) {
      TESSERA_TRY(const int made, MakeQueue(StreamRole::kCompute));
      it->second = static_cast<size_t>(made);
    }
    stands_in = it->second;
  }
  return static_cast<int>(graphs_.size()) - 1;
}

void QueueCpuDevice::Replay(int graph) {
  RefuseInCapture("Replay");
  Enqueue([this, &of = graphs_[static_cast<size_t>(graph)]] { RunGraph(of); });
}

// The queue goes on when all has run.
void QueueCpuDevice::RunGraph(const Graph& graph) {
  for (const CapturedJob& job : graph.jobs) {
    const size_t queue = graph.queues.at(job.queue);
    if (job.job) {
      EnqueueIn(queue, job.job);
    } else if (job.awaits) {
      AwaitIn(queue, job.mark);
    } else {
      MarkIn(queue, job.mark);
    }
  }
  size_t left = graph.queues.size();
  for (const auto& [queue, stands_in] : graph.queues) {
    EnqueueIn(stands_in, [this, &left] {
      const std::lock_guard lock(mutex_);
      --left;
      drained_.notify_all();
    });
  }
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [&] { return left == 0; });
}

void QueueCpuDevice::BeginRange(const std::string&) {
  ++open_ranges_;
}

void QueueCpuDevice::EndRange() {
  TESSERA_CHECK(open_ranges_-- > 0) << "no range to end";
}

Result<void> QueueCpuDevice::Drain(const Look& look) {
  RefuseInCapture("Drain");
  ++waits_;
  const auto drained = std::make_shared<bool>(false);
  Enqueue([this, drained] {
    const std::lock_guard lock(mutex_);
    *drained = true;
    drained_.notify_all();
  });
  std::unique_lock lock(mutex_);
  const auto is_drained = [&] { return *drained; };
  while (!is_drained()) {
    if (look) TESSERA_RETURN_IF_ERROR(look());
    drained_.wait_for(lock, std::chrono::milliseconds(1), is_drained);
  }
  return {};
}

void QueueCpuDevice::WaitForAll() {
  ++waits_;
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [&] { return unfinished_ == 0; });
}

bool QueueCpuDevice::idle() {
  const std::lock_guard lock(mutex_);
  return unfinished_ == 0;
}

Result<void> QueueCpuDevice::Synchronize() {
  const size_t in_use = std::exchange(in_use_, 0);
  Result<void> waited = Drain(while_waiting_);
  in_use_ = in_use;
  const std::lock_guard lock(mutex_);
  if (!error_) return waited;
  const Error error = *std::exchange(error_, std::nullopt);
  return error;
}

// ---- Communication

namespace {

class QueueCommunicator : public Communicator {
 public:
  QueueCommunicator(Communicator& inner, QueueCpuDevice& device)
      : inner_(inner), device_(device) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }

  Result<void> AllReduce(void* data, int64_t count, DType dtype) override {
    return Enqueue([=, this] { return inner_.AllReduce(data, count, dtype); });
  }
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes_per_rank) override {
    return Enqueue([=, this, bytes = Copied(bytes_per_rank)] {
      return inner_.AllGather(send, send_bytes, recv, bytes);
    });
  }
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts_per_rank,
                             DType dtype) override {
    return Enqueue([=, this, counts = Copied(counts_per_rank)] {
      return inner_.ReduceScatter(send, recv, counts, dtype);
    });
  }
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override {
    return Enqueue(
        [=, this, sent = Copied(send_bytes), received = Copied(recv_bytes)] {
          return inner_.AllToAll(send, sent, recv, received);
        });
  }
  Result<void> Broadcast(void* data, int64_t bytes, int root) override {
    return Enqueue([=, this] { return inner_.Broadcast(data, bytes, root); });
  }
  Result<void> Barrier() override {
    device_.Drain();
    return inner_.Barrier();
  }
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return Enqueue([=, this] { return inner_.Send(data, bytes, peer, tag); });
  }
  Result<void> Recv(void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return Enqueue([=, this] { return inner_.Recv(data, bytes, peer, tag); });
  }
  bool SendInTurnWaits() const override { return true; }
  Result<void> SendInTurn(const void* data, int64_t bytes,
                          const ChannelEnd& end) override {
    return Enqueue([=, this]() -> Result<void> {
      TESSERA_RETURN_IF_ERROR(inner_.Recv(nullptr, 0, end.to, TagOf(end)));
      return inner_.Send(data, bytes, end.to, TagOf(end));
    });
  }
  Result<void> RecvInTurn(void* data, int64_t bytes,
                          const ChannelEnd& end) override {
    return Enqueue([=, this]() -> Result<void> {
      TESSERA_RETURN_IF_ERROR(inner_.Send(nullptr, 0, end.from, TagOf(end)));
      return inner_.Recv(data, bytes, end.from, TagOf(end));
    });
  }

 private:
  // Messages in turn, and the empty ones with which their receivers say that
  // they are there. Tags of tensors are values' numbers, below 2^31.
  static uint64_t TagOf(const ChannelEnd& end) {
    return (uint64_t{1} << 48) + static_cast<uint64_t>(end.channel);
  }
  static std::vector<int64_t> Copied(std::span<const int64_t> counts) {
    return {counts.begin(), counts.end()};
  }
  Result<void> Enqueue(std::function<Result<void>()> operation) {
    device_.EnqueueOnHost(std::move(operation));
    return {};
  }

  Communicator& inner_;
  QueueCpuDevice& device_;
};

class QueueWorld : public CommWorld {
 public:
  QueueWorld(CommWorld& inner, QueueCpuDevice& device)
      : inner_(inner), device_(device) {
    device.set_while_waiting([this]() -> Result<void> {
      if (aborted_) return *aborted_;
      return {};
    });
  }
  QueueWorld(const QueueWorld&) = delete;
  QueueWorld& operator=(const QueueWorld&) = delete;
  ~QueueWorld() override { device_.set_while_waiting(nullptr); }

  int world_rank() const override { return inner_.world_rank(); }
  int world_size() const override { return inner_.world_size(); }
  Result<Communicator*> Group(std::span<const int> ranks) override {
    TESSERA_TRY(Communicator* const group, inner_.Group(ranks));
    auto& made = groups_[group];
    if (made == nullptr) {
      made = std::make_unique<QueueCommunicator>(*group, device_);
    }
    return made.get();
  }
  Result<void> Flush() override {
    TESSERA_RETURN_IF_ERROR(device_.Synchronize());
    return inner_.Flush();
  }
  void Abort(std::string_view reason) override {
    inner_.Abort(reason);
    aborted_ = RankAborted(world_rank(), reason);
  }
  void SetCurrentTask(std::string_view task) override {
    inner_.SetCurrentTask(task);
  }

 private:
  CommWorld& inner_;
  QueueCpuDevice& device_;
  std::optional<Error> aborted_;
  std::map<Communicator*, std::unique_ptr<QueueCommunicator>> groups_;
};

}  // namespace

std::unique_ptr<CommWorld> MakeQueueWorld(CommWorld& world,
                                          QueueCpuDevice& device) {
  return std::make_unique<QueueWorld>(world, device);
}

}  // namespace tessera
