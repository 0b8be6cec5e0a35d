#include "runtime/comm/nccl_world.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "planner/base/fnv1a.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// Between looks at what another rank or a thread of NCCL has to do first.
constexpr std::chrono::microseconds kPause{20};
// So long a rank looks without a pause for the thread that NCCL starts for each
// operation: it takes some 10 us, and a pause, by Linux's timer slack, 70.
constexpr std::chrono::microseconds kNoPause{500};
// Between questions to the store, whose one thread all ranks ask.
constexpr std::chrono::milliseconds kStorePause{5};

// How often a waiting rank asks NCCL for errors, and the store (a round trip
// to rank 0) for an abort.
constexpr std::chrono::milliseconds kHealthInterval{100};
constexpr std::chrono::milliseconds kStoreInterval{500};

// How long a communicator may take to close before it is cut off: peers that
// are not closing theirs, or are dead, would be waited for without end.
constexpr std::chrono::seconds kCloseTime{5};

// Peers that are told to stop as well come by themselves within this many
// seconds.
constexpr double kStopPatience = 1;

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kInt32:
      return ncclInt32;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
  }
  TESSERA_CHECK(false) << static_cast<int>(dtype);
  return ncclUint8;
}

Result<void> CudaOk(cudaError_t code, std::string_view call) {
  if (code == cudaSuccess) return {};
  return Unavailable(Text(call, ": ", cudaGetErrorName(code), " (",
                          cudaGetErrorString(code), ")"));
}

Error NcclError(ncclResult_t code, ncclComm_t comm, std::string_view call) {
  std::string text = Text(call, ": NCCL: ", ncclGetErrorString(code));
  const char* const last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += Text(" (", last, ")");
  return Unavailable(std::move(text));
}

// ncclInProgress is well: communicators do not block, and are looked at until
// they are done.
Result<void> NcclOk(ncclResult_t code, ncclComm_t comm, std::string_view call) {
  if (code == ncclSuccess || code == ncclInProgress) return {};
  return NcclError(code, comm, call);
}

bool AllEqual(std::span<const int64_t> lengths) {
  return std::all_of(lengths.begin(), lengths.end(),
                     [&](int64_t length) { return length == lengths[0]; });
}

// What goes ahead of a message.
struct MessageHeader {
  uint64_t group = 0;
  uint64_t tag = 0;
  int64_t bytes = 0;
};

class NcclWorld;

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(NcclWorld& world, std::vector<int> ranks, int rank,
                   ncclComm_t comm)
      : world_(world),
        ranks_(std::move(ranks)),
        rank_(rank),
        id_(Fnv1a().AddAll(ranks_).value()),
        comm_(comm) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  Result<void> AllReduce(void* data, int64_t count, DType dtype) override;
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes_per_rank) override;
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts_per_rank,
                             DType dtype) override;
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override;
  Result<void> Broadcast(void* data, int64_t bytes, int root) override;
  Result<void> Barrier() override;
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override;
  Result<void> Recv(void* data, int64_t bytes, int peer, uint64_t tag) override;
  bool SendInTurnWaits() const override { return true; }
  Result<void> OpenChannels(
      std::span<const ChannelEnd> ends,
      std::span<const std::vector<int64_t>> sizes) override;
  Result<void> SendInTurn(const void* data, int64_t bytes,
                          const ChannelEnd& end) override;
  Result<void> RecvInTurn(void* data, int64_t bytes,
                          const ChannelEnd& end) override;

 private:
  // issue(stream) calls NCCL, several times if it likes.
  template <typename Issue>
  Result<void> Enqueue(std::string_view operation, int64_t bytes, Issue issue) {
    return EnqueueOn(comm_, operation, bytes, issue);
  }
  template <typename Issue>
  Result<void> EnqueueOn(ncclComm_t comm, std::string_view operation,
                         int64_t bytes, Issue issue);
  Result<void> OpenChannel(const ChannelEnd& end,
                           std::span<const int64_t> sizes);
  ChannelEnd InWorld(const ChannelEnd& end) const {
    return {end.channel, ranks_[static_cast<size_t>(end.from)],
            ranks_[static_cast<size_t>(end.to)]};
  }
  Error Here(const Error& error, std::string_view operation) const;

  NcclWorld& world_;
  const std::vector<int> ranks_;
  const int rank_;
  const uint64_t id_;
  const ncclComm_t comm_;
};

class NcclWorld : public CommWorld {
 public:
  NcclWorld(int rank, int size, Store& store, CudaDevice& device,
            CommOptions options)
      : rank_(rank),
        size_(size),
        store_(store),
        device_(device),
        options_(options) {}
  ~NcclWorld() override;

  // The collective start of all ranks.
  Result<void> Open();

  int world_rank() const override { return rank_; }
  int world_size() const override { return size_; }
  Result<Communicator*> Group(std::span<const int> ranks) override;
  Result<void> Flush() override;
  void Abort(std::string_view reason) override;
  void SetCurrentTask(std::string_view task) override {
    task_ = task.substr(0, 95);  // as CommWorld says
  }

 private:
  friend class NcclCommunicator;

  // The two sides of a message's way, of the pair (from, to).
  struct Channel {
    ncclComm_t comm = nullptr;
    CudaStream stream = nullptr;
  };
  // A header's place on both sides of the bus, from a pool. Its device memory
  // is never used by the queue, so it needs no order against it.
  struct Slot {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
  };
  struct Outgoing {
    enum class Step { kQueued, kHeaderIssued, kIssued };
    Step step = Step::kQueued;
    int64_t bytes = 0;
    Slot header;
    void* data = nullptr;        // the copy; null where there are no bytes
    CudaEvent copied = nullptr;  // then
    CudaEvent done = nullptr;    // once issued
  };
  struct Outbox {
    Channel channel;
    std::deque<Outgoing> messages;
  };
  // A message that came, or is on its way, while another one was wanted.
  struct Message {
    MessageHeader header;
    void* data = nullptr;         // null where there are no bytes
    CudaEvent arrived = nullptr;  // null: no data
  };
  struct Inbox {
    Channel channel;
    std::deque<Message> messages;
  };
  struct InFlight {
    CudaEvent done = nullptr;
    std::string what;
  };

  Result<void> CheckUsable() const {
    if (failure_) return *failure_;
    return {};
  }
  Error Fail(Error error);
  Error AtThisRank(const Error& error, std::string_view what) const;

  template <typename Ready>
  Result<void> Wait(Ready ready, Clock::time_point begin, std::string_view who,
                    std::chrono::microseconds pause = kPause);
  Result<void> WhileWaiting();
  Result<void> CheckHealth();
  Result<void> CheckWait(double waited, std::string_view who);

  Result<ncclComm_t> Connect(const std::string& key, int rank, int size,
                             std::string_view who, bool wait);
  Result<std::string> GetWhenSet(const std::string& key, std::string_view who);
  Result<void> Settle(ncclComm_t comm, std::string_view who);
  void CloseAll();

  Result<void> Post(int to, const MessageHeader& header, const void* data);
  Result<void> PushOutgoing();
  Result<bool> Advance(Outbox& outbox, Outgoing& message);
  Result<void> Take(int from, const MessageHeader& wanted, void* data);
  Result<Message> ReceiveNext(int from, Inbox& inbox,
                              const MessageHeader& wanted, void* data);
  Result<void> AddSlots();
  Result<void> FreeAfterQueue(void* data);

  const int rank_;
  const int size_;
  Store& store_;
  CudaDevice& device_;
  const CommOptions options_;
  std::string prefix_;  // of this world's keys in the store
  std::string task_;
  std::optional<Error> failure_;
  bool stall_told_ = false;  // by this rank, or it left that to another

  std::vector<ncclComm_t> comms_;  // all
  std::map<std::vector<int>, std::unique_ptr<NcclCommunicator>> groups_;
  std::deque<InFlight> in_flight_;  // collectives, in the queue's order
  Clock::time_point front_since_;   // when the oldest became the oldest
  Clock::time_point health_checked_;
  Clock::time_point store_asked_;

  std::map<ChannelEnd, ncclComm_t> channels_;  // of messages in turn
  // Memory that a queue still reads.
  std::deque<std::pair<CudaEvent, void*>> to_free_;
  std::map<int, Outbox> outboxes_;  // by receiver
  std::map<int, Inbox> inboxes_;    // by sender
  std::vector<Slot> free_slots_;
  std::vector<void*> pinned_;  // behind the slots
  std::vector<void*> slots_on_device_;
};

// ---- Waiting and failing ----------------------------------------------------

Error NcclWorld::AtThisRank(const Error& error, std::string_view what) const {
  return error.At(Text("rank ", rank_, ", ", what));
}

// Publishes `error` as the job's, unless there is one already, and cuts this
// rank's communicators off: the GPU would wait for peers without end. In the
// store it is its code, one digit, and its message.
Error NcclWorld::Fail(Error error) {
  if (failure_) return *failure_;
  failure_ = error;  // what follows may fail in its turn
  if (auto first = store_.Add(prefix_ + "failures", 1); first && *first == 1) {
    const Error told = RankFailed(rank_, error);
    (void)store_.Set(prefix_ + "failure",
                     Text(static_cast<int>(told.code), told.message));
  } else if (first) {
    auto why =
        store_.Get(prefix_ + "failure", Duration::FromSeconds(1), "its reason");
    if (why) {
      failure_ = {static_cast<ErrorCode>((*why)[0] - '0'), why->substr(1), ""};
    }
  }
  for (ncclComm_t comm : comms_) (void)ncclCommAbort(comm);
  comms_.clear();
  return *failure_;
}

void NcclWorld::Abort(std::string_view reason) {
  Fail(RankAborted(rank_, reason));
}

// Waits until ready() returns true, which is asked every `pause`. `who` is
// waited for, since `begin`.
template <typename Ready>
Result<void> NcclWorld::Wait(Ready ready, Clock::time_point begin,
                             std::string_view who,
                             std::chrono::microseconds pause) {
  for (;;) {
    Result<bool> done = ready();
    if (!done) return Fail(done.error());
    if (*done) return {};
    TESSERA_RETURN_IF_ERROR(WhileWaiting());
    const std::chrono::duration<double> waited = Clock::now() - begin;
    TESSERA_RETURN_IF_ERROR(CheckWait(waited.count(), who));
    std::this_thread::sleep_for(pause);
  }
}

// What is to be done in every wait. It does not wait itself.
Result<void> NcclWorld::WhileWaiting() {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  if (auto pushed = PushOutgoing(); !pushed) return Fail(pushed.error());
  while (!to_free_.empty()) {
    const Result<bool> done = device_.IsDone(to_free_.front().first);
    if (!done) return Fail(done.error());
    if (!*done) break;
    device_.Recycle(to_free_.front().first);
    device_.Free(to_free_.front().second);
    to_free_.pop_front();
  }
  const Clock::time_point now = Clock::now();
  while (!in_flight_.empty()) {
    const Result<bool> done = device_.IsDone(in_flight_.front().done);
    if (!done) return Fail(done.error());
    if (!*done) break;
    device_.Recycle(in_flight_.front().done);
    in_flight_.pop_front();
    front_since_ = now;
  }
  if (now - health_checked_ < kHealthInterval) return {};
  health_checked_ = now;
  return CheckHealth();
}

Result<void> NcclWorld::CheckHealth() {
  const std::string oldest = in_flight_.empty() ? "" : in_flight_.front().what;
  for (ncclComm_t comm : comms_) {
    ncclResult_t state = ncclSuccess;
    Result<void> well =
        NcclOk(ncclCommGetAsyncError(comm, &state), comm, "communicator");
    if (well) well = NcclOk(state, comm, "communicator");
    if (!well) {
      const Error failure = Fail(well.error());
      return oldest.empty() ? failure : failure.At(oldest);
    }
  }
  const Clock::time_point now = Clock::now();
  if (now - store_asked_ >= kStoreInterval) {
    store_asked_ = now;
    const auto failures = store_.Add(prefix_ + "failures", 0);
    if (!failures) return Fail(failures.error());
    if (*failures > 0) {
      const Error failure = Fail(Unavailable("another rank failed"));
      return oldest.empty() ? failure : failure.At(oldest);
    }
  }
  if (in_flight_.empty()) return {};
  const std::chrono::duration<double> waited = now - front_since_;
  if (auto well = CheckWait(waited.count(), "its peers"); !well) {
    return well.error().At(oldest);
  }
  return {};
}

// Of a wait that has lasted `waited` seconds. Where several ranks wait the
// first to come tells of it.
Result<void> NcclWorld::CheckWait(double waited, std::string_view who) {
  if (waited > options_.timeout.seconds()) {
    return Fail(RankWaitedTooLong(rank_, options_.timeout, who));
  }
  // Without a task there is no step that this rank could end first.
  const bool may_stop =
      options_.stop != nullptr && options_.stop->load() && task_.empty();
  if (may_stop && waited > kStopPatience) {
    return Fail({ErrorCode::kInterrupted,
                 Text("interrupted as rank ", rank_, " waited for ", who), ""});
  }
  if (options_.stalled && !stall_told_ &&
      waited > options_.patience.seconds()) {
    stall_told_ = true;
    const auto tellers = store_.Add(prefix_ + "stalls", 1);
    if (tellers && *tellers == 1) {
      options_.stalled(StallText(rank_, options_.patience, options_.timeout,
                                 Text(who, " (", TaskText(task_), ")")));
    }
  }
  return {};
}

// ---- Communicators ----------------------------------------------------------

Result<void> NcclWorld::Open() {
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    return InvalidInput(Text("rank ", rank_, " of ", size_));
  }
  // The n-th world of this job, by the rank's own count of its calls.
  TESSERA_TRY(const int64_t call, store_.Add(Text("nccl/calls/", rank_), 1));
  prefix_ = Text("nccl/", call, "/");
  front_since_ = health_checked_ = store_asked_ = Clock::now();
  device_.set_while_waiting([this] { return WhileWaiting(); });
  std::vector<int> everyone(static_cast<size_t>(size_));
  std::iota(everyone.begin(), everyone.end(), 0);
  if (auto all = Group(everyone); !all) return all.error();
  return {};
}

// Waits for a key of the store without leaving anything else undone.
Result<std::string> NcclWorld::GetWhenSet(const std::string& key,
                                          std::string_view who) {
  TESSERA_RETURN_IF_ERROR(Wait(
      [&]() -> Result<bool> {
        TESSERA_TRY(const int64_t set, store_.Add(key + "/set", 0));
        return set > 0;
      },
      Clock::now(), who, kStorePause));
  return store_.Get(key, options_.timeout, who);
}

// A communicator of `size` ranks, `who` but for this one, that meet at `key`.
// Without `wait` it may still be connecting.
Result<ncclComm_t> NcclWorld::Connect(const std::string& key, int rank,
                                      int size, std::string_view who,
                                      bool wait) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  ncclUniqueId id;
  if (rank == 0) {
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
  TESSERA_RETURN_IF_ERROR(
      NcclOk(ncclCommInitRankConfig(&comm, size, id, rank, &config), nullptr,
             "ncclCommInitRankConfig"));
  comms_.push_back(comm);
  if (wait) TESSERA_RETURN_IF_ERROR(Settle(comm, who));
  return comm;
}

// Waits until NCCL has enqueued what it was given.
Result<void> NcclWorld::Settle(ncclComm_t comm, std::string_view who) {
  const Clock::time_point begin = Clock::now();
  const auto is_settled = [&]() -> Result<bool> {
    ncclResult_t state = ncclSuccess;
    TESSERA_RETURN_IF_ERROR(
        NcclOk(ncclCommGetAsyncError(comm, &state), comm, who));
    TESSERA_RETURN_IF_ERROR(NcclOk(state, comm, who));
    return state != ncclInProgress;
  };
  while (Clock::now() - begin < kNoPause) {
    const Result<bool> settled = is_settled();
    if (!settled) return Fail(settled.error());
    if (*settled) return {};
    std::this_thread::yield();
  }
  return Wait(is_settled, begin, who);
}

Result<Communicator*> NcclWorld::Group(std::span<const int> ranks) {
  std::vector<int> list(ranks.begin(), ranks.end());
  if (const auto found = groups_.find(list); found != groups_.end()) {
    return found->second.get();
  }
  TESSERA_RETURN_IF_ERROR(CheckGroup(list, rank_, size_));
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  const auto here = std::find(list.begin(), list.end(), rank_) - list.begin();
  const auto position = static_cast<int>(here);
  // The list itself may be longer than a key.
  const std::string key =
      Text("group/", list.size(), "/", Fnv1a().AddAll(list).value());
  auto comm = Connect(key, position, static_cast<int>(list.size()),
                      "the other members", /*wait=*/true);
  if (!comm) {
    return AtThisRank(Fail(comm.error()),
                      Text("joining group ", GroupText(list)));
  }
  auto group = std::make_unique<NcclCommunicator>(*this, list, position, *comm);
  Communicator* const result = group.get();
  groups_.emplace(std::move(list), std::move(group));
  return result;
}

// Sends what is left and closes the communicators, those of a job that is well
// with their peers.
NcclWorld::~NcclWorld() {
  (void)device_.Select();
  if (!failure_) (void)Flush();
  if (!failure_) {
    (void)Wait(
        [&]() -> Result<bool> {
          TESSERA_RETURN_IF_ERROR(PushOutgoing());
          return std::all_of(
              outboxes_.begin(), outboxes_.end(),
              [](const auto& box) { return box.second.messages.empty(); });
        },
        Clock::now(), "receivers of its messages");
  }
  CloseAll();
  device_.set_while_waiting(nullptr);
  // Nothing uses the buffers any more: the work is done or was cut off.
  for (auto& [to, outbox] : outboxes_) {
    if (outbox.channel.stream != nullptr) {
      (void)cudaStreamSynchronize(outbox.channel.stream);
    }
    for (Outgoing& message : outbox.messages) {
      if (message.data != nullptr) device_.Free(message.data);
    }
  }
  for (auto& [from, inbox] : inboxes_) {
    if (inbox.channel.stream != nullptr) {
      (void)cudaStreamSynchronize(inbox.channel.stream);
    }
    for (Message& message : inbox.messages) {
      if (message.data != nullptr) device_.Free(message.data);
    }
  }
  if (!to_free_.empty()) (void)cudaDeviceSynchronize();
  for (auto& [event, data] : to_free_) {
    device_.Recycle(event);
    device_.Free(data);
  }
  for (InFlight& operation : in_flight_) device_.Recycle(operation.done);
  for (void* slots : slots_on_device_) device_.Free(slots);
  for (void* pinned : pinned_) (void)cudaFreeHost(pinned);
}

void NcclWorld::CloseAll() {
  const Clock::time_point end = Clock::now() + kCloseTime;
  for (ncclComm_t comm : comms_) (void)ncclCommFinalize(comm);
  for (ncclComm_t comm : comms_) {
    ncclResult_t state = ncclInProgress;
    while (ncclCommGetAsyncError(comm, &state) == ncclSuccess &&
           state == ncclInProgress && Clock::now() < end) {
      std::this_thread::sleep_for(kPause);
    }
    (void)(state == ncclSuccess ? ncclCommDestroy(comm) : ncclCommAbort(comm));
  }
  comms_.clear();
}

Result<void> NcclWorld::Flush() {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  // CheckHealth limits the time.
  while (!in_flight_.empty()) {
    TESSERA_RETURN_IF_ERROR(WhileWaiting());
    if (!in_flight_.empty()) std::this_thread::sleep_for(kPause);
  }
  // What was cut off is done as well: somebody's failure must be known here.
  health_checked_ = store_asked_ = {};
  return WhileWaiting();
}

// ---- Collectives ------------------------------------------------------------

Error NcclCommunicator::Here(const Error& error,
                             std::string_view operation) const {
  return world_.AtThisRank(error, Text(TaskText(world_.task_), ", ", operation,
                                       " of group ", GroupText(ranks_)));
}

template <typename Issue>
Result<void> NcclCommunicator::EnqueueOn(ncclComm_t comm,
                                         std::string_view operation,
                                         int64_t bytes, Issue issue) {
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), operation);
  }
  const auto run = [&]() -> Result<void> {
    TESSERA_RETURN_IF_ERROR(world_.device_.Select());
    TESSERA_RETURN_IF_ERROR(NcclOk(ncclGroupStart(), comm, "ncclGroupStart"));
    const ncclResult_t issued = issue(world_.device_.queue());
    const ncclResult_t ended = ncclGroupEnd();
    TESSERA_RETURN_IF_ERROR(NcclOk(issued, comm, "issue"));
    TESSERA_RETURN_IF_ERROR(NcclOk(ended, comm, "ncclGroupEnd"));
    TESSERA_RETURN_IF_ERROR(world_.Settle(comm, "its peers"));
    TESSERA_TRY(const CudaEvent done,
                world_.device_.Record(world_.device_.queue()));
    if (world_.in_flight_.empty()) world_.front_since_ = Clock::now();
    world_.in_flight_.push_back(
        {done, Text("rank ", world_.rank_, ", ", TaskText(world_.task_), ", ",
                    operation, " of ", bytes, " bytes of group ",
                    GroupText(ranks_))});
    return world_.WhileWaiting();
  };
  if (auto done = run(); !done) {
    const Error failure = world_.Fail(done.error());
    // Where an operation before this one is to blame, it is named already.
    return done.error().where.empty() ? Here(failure, operation) : done.error();
  }
  return {};
}

// The first failure of a row of calls; ncclInProgress is none.
template <typename Call>
ncclResult_t ForEachRank(int size, Call call) {
  for (int rank = 0; rank < size; ++rank) {
    const ncclResult_t result = call(rank, static_cast<size_t>(rank));
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

Result<void> NcclCommunicator::AllReduce(void* data, int64_t count,
                                         DType dtype) {
  if (auto valid = CheckCount(count); !valid) {
    return Here(valid.error(), "all-reduce");
  }
  if (count == 0) return {};
  return Enqueue("all-reduce", count * SizeOf(dtype), [&](cudaStream_t queue) {
    return ncclAllReduce(data, data, static_cast<size_t>(count),
                         NcclType(dtype), ncclSum, comm_, queue);
  });
}

// Ragged parts are broadcast, all at once.
Result<void> NcclCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckGather(send_bytes, bytes_per_rank, rank_, size());
      !valid) {
    return Here(valid.error(), "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  if (offsets.back() == 0) return {};
  auto* const to = static_cast<std::byte*>(recv);
  return Enqueue("all-gather", offsets.back(), [&](cudaStream_t queue) {
    if (AllEqual(bytes_per_rank)) {
      return ncclAllGather(send, recv, static_cast<size_t>(send_bytes),
                           ncclUint8, comm_, queue);
    }
    return ForEachRank(size(), [&](int root, size_t r) {
      if (bytes_per_rank[r] == 0) return ncclSuccess;
      std::byte* const part = to + offsets[r];
      return ncclBroadcast(root == rank_ ? send : part, part,
                           static_cast<size_t>(bytes_per_rank[r]), ncclUint8,
                           root, comm_, queue);
    });
  });
}

// Ragged parts are reduced, all at once, each to its rank.
Result<void> NcclCommunicator::ReduceScatter(
    const void* send, void* recv, std::span<const int64_t> counts_per_rank,
    DType dtype) {
  if (auto valid = CheckLengths(counts_per_rank, size()); !valid) {
    return Here(valid.error(), "reduce-scatter");
  }
  const std::vector<int64_t> offsets = Offsets(counts_per_rank);
  if (offsets.back() == 0) return {};
  const int64_t element = SizeOf(dtype);
  const auto* const from = static_cast<const std::byte*>(send);
  return Enqueue(
      "reduce-scatter", offsets.back() * element, [&](cudaStream_t queue) {
        if (AllEqual(counts_per_rank)) {
          return ncclReduceScatter(send, recv,
                                   static_cast<size_t>(counts_per_rank[0]),
                                   NcclType(dtype), ncclSum, comm_, queue);
        }
        return ForEachRank(size(), [&](int root, size_t r) {
          if (counts_per_rank[r] == 0) return ncclSuccess;
          return ncclReduce(from + offsets[r] * element,
                            root == rank_ ? recv : nullptr,
                            static_cast<size_t>(counts_per_rank[r]),
                            NcclType(dtype), ncclSum, root, comm_, queue);
        });
      });
}

Result<void> NcclCommunicator::AllToAll(const void* send,
                                        std::span<const int64_t> send_bytes,
                                        void* recv,
                                        std::span<const int64_t> recv_bytes) {
  if (auto valid = CheckExchange(send_bytes, recv_bytes, rank_, size());
      !valid) {
    return Here(valid.error(), "all-to-all");
  }
  const auto me = static_cast<size_t>(rank_);
  const std::vector<int64_t> send_offsets = Offsets(send_bytes);
  const std::vector<int64_t> recv_offsets = Offsets(recv_bytes);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "all-to-all");
  }
  if (send_bytes[me] > 0) {
    world_.device_.Copy(to + recv_offsets[me], from + send_offsets[me],
                        {.run_bytes = send_bytes[me]});
  }
  // A rank with nothing to exchange has no part in it; who has something to
  // exchange with it knows that.
  if (send_offsets.back() + recv_offsets.back() == 2 * send_bytes[me]) {
    return {};
  }
  return Enqueue("all-to-all", send_offsets.back(), [&](cudaStream_t queue) {
    return ForEachRank(size(), [&](int peer, size_t r) {
      if (peer == rank_) return ncclSuccess;
      if (send_bytes[r] > 0) {
        const ncclResult_t sent =
            ncclSend(from + send_offsets[r], static_cast<size_t>(send_bytes[r]),
                     ncclUint8, peer, comm_, queue);
        if (sent != ncclSuccess && sent != ncclInProgress) return sent;
      }
      if (recv_bytes[r] == 0) return ncclSuccess;
      return ncclRecv(to + recv_offsets[r], static_cast<size_t>(recv_bytes[r]),
                      ncclUint8, peer, comm_, queue);
    });
  });
}

Result<void> NcclCommunicator::Broadcast(void* data, int64_t bytes, int root) {
  if (auto valid = CheckBroadcast(bytes, root, size()); !valid) {
    return Here(valid.error(), "broadcast");
  }
  if (bytes == 0) return {};
  return Enqueue("broadcast", bytes, [&](cudaStream_t queue) {
    return ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclUint8,
                         root, comm_, queue);
  });
}

// An all-reduce of one number that is waited for.
Result<void> NcclCommunicator::Barrier() {
  TESSERA_TRY(void* const number,
              world_.device_.Allocate({4}, MemoryCategory::kCommunication));
  Result<void> done = Enqueue("barrier", 4, [&](cudaStream_t queue) {
    return ncclAllReduce(number, number, 1, ncclInt32, ncclSum, comm_, queue);
  });
  if (done) done = world_.Flush();
  world_.device_.Free(number);
  return done;
}

// ---- Messages in turn -------------------------------------------------------

// A message of eight bytes connects the two GPUs, which NCCL does at the first
// message, when both sides are at it; and tells the receiver the sender's
// sizes.
Result<void> NcclCommunicator::OpenChannel(const ChannelEnd& end,
                                           std::span<const int64_t> sizes) {
  const bool sends = end.from == world_.rank_;
  const int peer = sends ? end.to : end.from;
  const std::string who = Text("rank ", peer);
  TESSERA_TRY(
      const ncclComm_t comm,
      world_.Connect(Text("turn/", end.channel, "/", end.from, "/", end.to),
                     sends ? 0 : 1, 2, who, /*wait=*/true));
  world_.channels_[end] = comm;
  CudaDevice& device = world_.device_;
  TESSERA_TRY(void* const place,
              device.Allocate({8}, MemoryCategory::kCommunication));
  const auto exchange = [&]() -> Result<void> {
    const uint64_t mine = Fnv1a().AddAll(sizes).value();
    uint64_t theirs = mine;
    if (sends) device.Write(place, &mine, {8});
    TESSERA_RETURN_IF_ERROR(
        EnqueueOn(comm, "open a channel", 8, [&](cudaStream_t queue) {
          return sends ? ncclSend(place, 8, ncclUint8, 1, comm, queue)
                       : ncclRecv(place, 8, ncclUint8, 0, comm, queue);
        }));
    if (!sends) device.Read(&theirs, place, {8});
    TESSERA_RETURN_IF_ERROR(device.Synchronize());
    if (theirs == mine) return {};
    return Disagreement(Text(who, " sends other sizes or another number of ",
                             "messages than rank ", world_.rank_, " expects"));
  };
  const auto exchanged = exchange();
  device.Free(place);
  return exchanged;
}

Result<void> NcclCommunicator::OpenChannels(
    std::span<const ChannelEnd> ends,
    std::span<const std::vector<int64_t>> sizes) {
  for (size_t i = 0; i < ends.size(); ++i) {
    const ChannelEnd end = InWorld(ends[i]);
    if (end.from == end.to || world_.channels_.contains(end)) continue;
    if (auto opened = OpenChannel(end, sizes[i]); !opened) {
      return Here(world_.Fail(opened.error()), "open a channel");
    }
  }
  return {};
}

Result<void> NcclCommunicator::SendInTurn(const void* data, int64_t bytes,
                                          const ChannelEnd& end) {
  if (end.from == end.to) return Communicator::SendInTurn(data, bytes, end);
  if (bytes == 0) return {};
  const ncclComm_t comm = world_.channels_.at(InWorld(end));
  return EnqueueOn(comm, "send", bytes, [&](cudaStream_t queue) {
    return ncclSend(data, static_cast<size_t>(bytes), ncclUint8, /*peer=*/1,
                    comm, queue);
  });
}

Result<void> NcclCommunicator::RecvInTurn(void* data, int64_t bytes,
                                          const ChannelEnd& end) {
  if (end.from == end.to) return Communicator::RecvInTurn(data, bytes, end);
  if (bytes == 0) return {};
  const ncclComm_t comm = world_.channels_.at(InWorld(end));
  return EnqueueOn(comm, "receive", bytes, [&](cudaStream_t queue) {
    return ncclRecv(data, static_cast<size_t>(bytes), ncclUint8, /*peer=*/0,
                    comm, queue);
  });
}

// ---- Messages ---------------------------------------------------------------

Result<void> NcclCommunicator::Send(const void* data, int64_t bytes, int peer,
                                    uint64_t tag) {
  if (auto valid = CheckSend(bytes, peer, size()); !valid) {
    return Here(valid.error(), "send");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "send");
  }
  if (auto posted = world_.Post(ranks_[static_cast<size_t>(peer)],
                                {id_, tag, bytes}, data);
      !posted) {
    return Here(world_.Fail(posted.error()), "send");
  }
  return {};
}

Result<void> NcclCommunicator::Recv(void* data, int64_t bytes, int peer,
                                    uint64_t tag) {
  if (auto valid = CheckRecv(bytes, peer, size()); !valid) {
    return Here(valid.error(), "receive");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "receive");
  }
  if (auto taken = world_.Take(ranks_[static_cast<size_t>(peer)],
                               {id_, tag, bytes}, data);
      !taken) {
    // A message of another size harms nothing.
    return Here(taken.error().code == ErrorCode::kInvalidInput
                    ? taken.error()
                    : world_.Fail(taken.error()),
                "receive");
  }
  return {};
}

// What uses the queue in use's order no longer needs `data` when it is freed:
// other queues may be handed it at once.
Result<void> NcclWorld::FreeAfterQueue(void* data) {
  TESSERA_TRY(const CudaEvent event, device_.Record(device_.queue()));
  to_free_.emplace_back(event, data);
  return {};
}

Result<void> NcclWorld::AddSlots() {
  constexpr int kSlots = 256;
  constexpr int kSlotBytes = 64;  // a header and its alignment
  static_assert(sizeof(MessageHeader) <= kSlotBytes);
  void* host = nullptr;
  TESSERA_RETURN_IF_ERROR(
      CudaOk(cudaMallocHost(&host, kSlots * kSlotBytes), "cudaMallocHost"));
  pinned_.push_back(host);
  TESSERA_TRY(
      void* const on_device,
      device_.Allocate({kSlots * kSlotBytes}, MemoryCategory::kCommunication));
  slots_on_device_.push_back(on_device);
  // What the queue still does with this memory is over then.
  TESSERA_RETURN_IF_ERROR(device_.Synchronize());
  for (int slot = 0; slot < kSlots; ++slot) {
    free_slots_.push_back(
        {static_cast<std::byte*>(host) + slot * kSlotBytes,
         static_cast<std::byte*>(on_device) + slot * kSlotBytes});
  }
  return {};
}

// Copies the message, in the queue's order, and lets it go as far as it can.
Result<void> NcclWorld::Post(int to, const MessageHeader& header,
                             const void* data) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  void* copy = nullptr;
  if (header.bytes > 0) {
    TESSERA_TRY(
        copy, device_.Allocate({header.bytes}, MemoryCategory::kCommunication));
    device_.Copy(copy, data, {.run_bytes = header.bytes});
  }
  if (to == rank_) {
    Message message{header, copy, nullptr};
    TESSERA_TRY(message.arrived, device_.Record(device_.queue()));
    inboxes_[to].messages.push_back(message);
    return {};
  }
  Outbox& outbox = outboxes_[to];
  if (outbox.channel.comm == nullptr) {
    TESSERA_TRY(outbox.channel.stream,
                device_.MakeStream(StreamRole::kSendForward));
    TESSERA_TRY(outbox.channel.comm,
                Connect(Text("channel/", rank_, "/", to), 0, 2,
                        Text("rank ", to), /*wait=*/false));
  }
  if (free_slots_.empty()) TESSERA_RETURN_IF_ERROR(AddSlots());
  Outgoing message;
  message.bytes = header.bytes;
  message.data = copy;
  message.header = free_slots_.back();
  free_slots_.pop_back();
  std::memcpy(message.header.host, &header, sizeof(header));
  if (copy != nullptr) {
    TESSERA_TRY(message.copied, device_.Record(device_.queue()));
  }
  outbox.messages.push_back(message);
  return WhileWaiting();
}

// Issues what the channels take and forgets what has gone.
Result<void> NcclWorld::PushOutgoing() {
  for (auto& [to, outbox] : outboxes_) {
    for (Outgoing& message : outbox.messages) {
      TESSERA_TRY(const bool issued, Advance(outbox, message));
      if (!issued) break;
    }
    while (!outbox.messages.empty()) {
      Outgoing& message = outbox.messages.front();
      if (message.step != Outgoing::Step::kIssued) break;
      TESSERA_TRY(const bool done, device_.IsDone(message.done));
      if (!done) break;
      device_.Recycle(message.done);
      free_slots_.push_back(message.header);
      if (message.data != nullptr) {
        device_.Recycle(message.copied);
        device_.Free(message.data);
      }
      outbox.messages.pop_front();
    }
  }
  return {};
}

// Whether the message is issued. The header does not wait for the copy, so that
// the receiver can enqueue its half before the data is there.
Result<bool> NcclWorld::Advance(Outbox& outbox, Outgoing& message) {
  using Step = Outgoing::Step;
  if (message.step == Step::kIssued) return true;
  const ncclComm_t comm = outbox.channel.comm;
  const CudaStream stream = outbox.channel.stream;
  const auto busy = [&]() -> Result<bool> {
    ncclResult_t state = ncclSuccess;
    TESSERA_RETURN_IF_ERROR(
        NcclOk(ncclCommGetAsyncError(comm, &state), comm, "send"));
    TESSERA_RETURN_IF_ERROR(NcclOk(state, comm, "send"));
    return state == ncclInProgress;
  };
  const auto send = [&](const void* data, int64_t bytes) {
    return NcclOk(ncclSend(data, static_cast<size_t>(bytes), ncclUint8,
                           /*peer=*/1, comm, stream),
                  comm, "ncclSend");
  };
  TESSERA_TRY(const bool connecting, busy());
  if (connecting) return false;
  if (message.step == Step::kQueued) {
    TESSERA_RETURN_IF_ERROR(device_.Select());
    TESSERA_RETURN_IF_ERROR(CudaOk(
        cudaMemcpyAsync(message.header.device, message.header.host,
                        sizeof(MessageHeader), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync"));
    TESSERA_RETURN_IF_ERROR(send(message.header.device, sizeof(MessageHeader)));
    message.step = Step::kHeaderIssued;
    TESSERA_TRY(const bool sending_header, busy());
    if (sending_header) return false;
  }
  // The data; `done` stands for: it was given to NCCL, and NCCL may be busy.
  if (message.done == nullptr && message.data != nullptr) {
    TESSERA_RETURN_IF_ERROR(device_.RunAfter(stream, message.copied));
    TESSERA_RETURN_IF_ERROR(send(message.data, message.bytes));
    TESSERA_TRY(message.done, device_.Record(stream));
    TESSERA_TRY(const bool sending, busy());
    if (sending) return false;
  }
  if (message.done != nullptr) device_.Recycle(message.done);
  TESSERA_TRY(message.done, device_.Record(stream));
  message.step = Step::kIssued;
  return true;
}

Result<void> NcclWorld::Take(int from, const MessageHeader& wanted,
                             void* data) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  Inbox& inbox = inboxes_[from];
  auto& messages = inbox.messages;
  const auto matches = [&](const Message& message) {
    return message.header.group == wanted.group &&
           message.header.tag == wanted.tag;
  };
  auto found = std::find_if(messages.begin(), messages.end(), matches);
  const Clock::time_point begin = Clock::now();
  while (found == messages.end()) {
    if (from == rank_) {
      TESSERA_RETURN_IF_ERROR(Wait([] { return Result<bool>(false); }, begin,
                                   Text("a message of its own")));
    }
    TESSERA_TRY(const Message next, ReceiveNext(from, inbox, wanted, data));
    if (matches(next) && next.header.bytes == wanted.bytes) return {};
    messages.push_back(next);
    found = std::find_if(messages.begin(), messages.end(), matches);
  }
  if (found->header.bytes != wanted.bytes) {
    return MessageSizesDiffer(from, found->header.bytes, wanted.tag,
                              wanted.bytes);
  }
  if (found->arrived != nullptr) {
    TESSERA_RETURN_IF_ERROR(device_.RunAfter(device_.queue(), found->arrived));
    device_.Recycle(found->arrived);
  }
  if (found->data != nullptr) {
    device_.Copy(data, found->data, {.run_bytes = wanted.bytes});
    TESSERA_RETURN_IF_ERROR(FreeAfterQueue(found->data));
  }
  messages.erase(found);
  return {};
}

// The next message from `from`: if it is the one that is wanted, into `data`
// and in the queue's order, else into memory of its own.
Result<NcclWorld::Message> NcclWorld::ReceiveNext(int from, Inbox& inbox,
                                                  const MessageHeader& wanted,
                                                  void* data) {
  const Clock::time_point begin = Clock::now();
  const std::string who = Text("rank ", from);
  if (inbox.channel.comm == nullptr) {
    TESSERA_TRY(inbox.channel.stream,
                device_.MakeStream(StreamRole::kRecvForward));
    TESSERA_TRY(inbox.channel.comm,
                Connect(Text("channel/", from, "/", rank_), 1, 2, who,
                        /*wait=*/true));
  }
  const ncclComm_t comm = inbox.channel.comm;
  const CudaStream stream = inbox.channel.stream;
  const auto receive = [&](void* to, int64_t bytes) -> Result<void> {
    TESSERA_RETURN_IF_ERROR(
        NcclOk(ncclRecv(to, static_cast<size_t>(bytes), ncclUint8, /*peer=*/0,
                        comm, stream),
               comm, "ncclRecv"));
    return Settle(comm, who);
  };

  if (free_slots_.empty()) TESSERA_RETURN_IF_ERROR(AddSlots());
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  TESSERA_RETURN_IF_ERROR(receive(slot.device, sizeof(MessageHeader)));
  TESSERA_RETURN_IF_ERROR(
      CudaOk(cudaMemcpyAsync(slot.host, slot.device, sizeof(MessageHeader),
                             cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync"));
  TESSERA_TRY(const CudaEvent header_came, device_.Record(stream));
  TESSERA_RETURN_IF_ERROR(
      Wait([&] { return device_.IsDone(header_came); }, begin, who));
  device_.Recycle(header_came);
  Message message;
  std::memcpy(&message.header, slot.host, sizeof(MessageHeader));
  free_slots_.push_back(slot);

  const int64_t bytes = message.header.bytes;
  if (bytes == 0) return message;
  const bool is_wanted = message.header.group == wanted.group &&
                         message.header.tag == wanted.tag &&
                         bytes == wanted.bytes;
  if (!is_wanted) {
    TESSERA_TRY(message.data,
                device_.Allocate({bytes}, MemoryCategory::kCommunication));
  }
  // What the queue did with this memory comes first.
  TESSERA_RETURN_IF_ERROR(device_.Order(device_.queue(), stream));
  TESSERA_RETURN_IF_ERROR(receive(is_wanted ? data : message.data, bytes));
  if (is_wanted) {
    TESSERA_RETURN_IF_ERROR(device_.Order(stream, device_.queue()));
  } else {
    TESSERA_TRY(message.arrived, device_.Record(stream));
  }
  return message;
}

}  // namespace

Result<std::unique_ptr<CommWorld>> MakeNcclWorld(int rank, int size,
                                                 Store& store,
                                                 CudaDevice& device,
                                                 CommOptions options) {
  auto world = std::make_unique<NcclWorld>(rank, size, store, device, options);
  TESSERA_RETURN_IF_ERROR(world->Open());
  return std::unique_ptr<CommWorld>(std::move(world));
}

std::string NcclVersion() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  // NCCL_VERSION of nccl.h, from 2.9 on.
  return Text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace tessera
