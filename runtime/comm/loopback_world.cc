#include "runtime/comm/loopback_world.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/check.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Event = std::shared_ptr<QueueEvent>;

size_t U(int i) {
  return static_cast<size_t>(i);
}

// What a rank brings to a meeting of its group.
struct Offer {
  std::string_view operation;
  int64_t bytes = 0;
  // What must be the same on all ranks: counts, element type, root.
  std::vector<int64_t> terms = {};
  // All-to-all: bytes for, and from, each rank.
  std::vector<int64_t> sends = {};
  std::vector<int64_t> receives = {};
  std::byte* data = nullptr;  // for the others to read
  Event reached = {};         // when it may be read
};

// A group's meetings, of which the ranks are in the same or in two that follow
// one another: who opens the next but one has seen all ranks leave the last.
struct Meetings {
  explicit Meetings(size_t ranks) : opened(ranks, 0), offers(ranks) {}

  std::vector<int64_t> opened;  // by rank of the group
  std::vector<std::array<Offer, 2>> offers;
};

// Memory for the copy of a message, kept for the next one of its size.
struct Buffer {
  int64_t bytes = 0;
  std::byte* data = nullptr;
  Event last_use;  // null: none
};

struct Message {
  std::vector<int> group;
  uint64_t tag = 0;
  Buffer copy;  // null data where there are no bytes
  Event copied;
};

// What the ranks have in common.
struct Hub {
  explicit Hub(size_t n, CommOptions given)
      : options(given), ranks(n), mail(n * n) {}

  struct Rank {
    bool left = false;
    std::string task;
    std::vector<Buffer> free;
    int messages = 0;  // sent, whose buffers are not back
    // What its threads wait for may have come. Each rank has its own, so that
    // an event wakes those whom it concerns.
    std::condition_variable changed;
  };

  Clock::duration Limit() const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(options.timeout.seconds()));
  }

  void NotifyAll() {
    for (Rank& rank : ranks) rank.changed.notify_all();
  }

  const CommOptions options;
  std::mutex mutex;  // guards what follows
  std::optional<Error> failure;
  std::vector<Rank> ranks;
  std::vector<std::deque<Message>> mail;  // by receiver, then sender
  std::map<std::vector<int>, Meetings> groups;
};

class LoopbackWorld;

class LoopbackCommunicator : public Communicator {
 public:
  LoopbackCommunicator(LoopbackWorld& world, std::vector<int> ranks, int rank,
                       Meetings& meetings)
      : world_(world),
        ranks_(std::move(ranks)),
        rank_(rank),
        meetings_(meetings) {}

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

 private:
  // By rank of the group.
  using Offers = std::vector<Offer>;

  Result<void> Run(Offer offer,
                   const std::function<Result<void>(const Offers&)>& work);
  Result<Offers> Meet(Offer offer, bool begins);
  Result<void> CheckAgreement(const Offers& offers) const;
  void Copy(void* to, const std::byte* from, int64_t bytes);
  Error Here(const Error& error, std::string_view operation) const;

  LoopbackWorld& world_;
  const std::vector<int> ranks_;
  const int rank_;
  Meetings& meetings_;
};

class LoopbackWorld : public CommWorld {
 public:
  LoopbackWorld(std::shared_ptr<Hub> hub, int rank, QueueDevice& device)
      : hub_(std::move(hub)), rank_(rank), device_(device) {}
  ~LoopbackWorld() override;

  int world_rank() const override { return rank_; }
  int world_size() const override {
    return static_cast<int>(hub_->ranks.size());
  }
  Result<Communicator*> Group(std::span<const int> ranks) override;
  // All that was sent has been taken.
  Result<void> Flush() override {
    const std::lock_guard lock(hub_->mutex);
    return CheckUsable();
  }
  void Abort(std::string_view reason) override {
    const std::lock_guard lock(hub_->mutex);
    Fail(RankAborted(rank_, reason));
  }
  void SetCurrentTask(std::string_view task) override {
    const std::lock_guard lock(hub_->mutex);
    hub_->ranks[U(rank_)].task = task.substr(0, 95);  // as CommWorld says
  }

 private:
  friend class LoopbackCommunicator;

  std::deque<Message>& Mail(int to, int from) {
    return hub_->mail[U(to) * hub_->ranks.size() + U(from)];
  }
  Result<Buffer> TakeBuffer(int64_t bytes);

  // REQUIRES of these: the hub's mutex is held.
  Result<void> CheckUsable() const {
    if (hub_->failure) return *hub_->failure;
    return {};
  }
  Error Fail(Error error) {
    if (!hub_->failure) hub_->failure = std::move(error);
    hub_->NotifyAll();
    return *hub_->failure;
  }
  // Waits until ready() is true. `awaited(rank)` says for whom.
  template <typename Ready, typename Awaited>
  Result<void> Wait(std::unique_lock<std::mutex>& lock, Ready ready,
                    Awaited awaited);

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  QueueDevice& device_;
  std::map<std::vector<int>, std::unique_ptr<LoopbackCommunicator>> groups_;
};

// ---- The world --------------------------------------------------------------

template <typename Ready, typename Awaited>
Result<void> LoopbackWorld::Wait(std::unique_lock<std::mutex>& lock,
                                 Ready ready, Awaited awaited) {
  const Clock::time_point end = Clock::now() + hub_->Limit();
  for (bool late = false;;) {
    if (ready()) return {};
    TESSERA_RETURN_IF_ERROR(CheckUsable());
    std::string missing;
    for (int r = 0; r < world_size(); ++r) {
      if (r == rank_ || !awaited(r)) continue;
      const Hub::Rank& peer = hub_->ranks[U(r)];
      if (peer.left) return Fail(RankLeft(r, rank_));
      AppendTo(missing, ", ", Text("rank ", r, " (", TaskText(peer.task), ")"));
    }
    if (late) {
      return Fail(RankWaitedTooLong(rank_, hub_->options.timeout, missing));
    }
    late = hub_->ranks[U(rank_)].changed.wait_until(lock, end) ==
           std::cv_status::timeout;
  }
}

Result<Communicator*> LoopbackWorld::Group(std::span<const int> ranks) {
  std::vector<int> list(ranks.begin(), ranks.end());
  if (const auto found = groups_.find(list); found != groups_.end()) {
    return found->second.get();
  }
  TESSERA_RETURN_IF_ERROR(CheckGroup(list, rank_, world_size()));
  const auto place = std::find(list.begin(), list.end(), rank_) - list.begin();
  Meetings* meetings = nullptr;
  {
    const std::lock_guard lock(hub_->mutex);
    meetings = &hub_->groups.try_emplace(list, list.size()).first->second;
  }
  auto group = std::make_unique<LoopbackCommunicator>(
      *this, list, static_cast<int>(place), *meetings);
  Communicator* const result = group.get();
  groups_.emplace(std::move(list), std::move(group));
  return result;
}

// Copies that are read, or may be, keep their memory until then.
LoopbackWorld::~LoopbackWorld() {
  std::unique_lock lock(hub_->mutex);
  Hub::Rank& self = hub_->ranks[U(rank_)];
  self.left = true;
  hub_->NotifyAll();
  const auto unread = [&] {
    int left = 0;
    for (int to = 0; to < world_size(); ++to) {
      const bool reads = !hub_->failure && !hub_->ranks[U(to)].left;
      if (!reads) left += static_cast<int>(Mail(to, rank_).size());
    }
    return left;
  };
  const auto taken = [&] { return self.messages == unread(); };
  if (!self.changed.wait_for(lock, hub_->Limit(), taken)) {
    Fail(RankWaitedTooLong(rank_, hub_->options.timeout,
                           "receivers of its messages"));
    self.changed.wait(lock, taken);
  }
  std::vector<Buffer> buffers = std::move(self.free);
  for (int to = 0; to < world_size(); ++to) {
    for (Message& message : Mail(to, rank_)) {
      buffers.push_back(std::move(message.copy));
    }
    Mail(to, rank_).clear();
  }
  lock.unlock();
  for (const Buffer& buffer : buffers) {
    if (buffer.last_use != nullptr) device_.AwaitEvent(buffer.last_use);
  }
  (void)device_.Synchronize();
  for (const Buffer& buffer : buffers) {
    if (buffer.data != nullptr) device_.Free(buffer.data);
  }
}

Result<Buffer> LoopbackWorld::TakeBuffer(int64_t bytes) {
  if (bytes == 0) return Buffer{};
  {
    const std::lock_guard lock(hub_->mutex);
    auto& free = hub_->ranks[U(rank_)].free;
    const auto found = std::ranges::find(free, bytes, &Buffer::bytes);
    if (found != free.end()) {
      Buffer buffer = std::move(*found);
      free.erase(found);
      return buffer;
    }
  }
  Buffer buffer;
  buffer.bytes = bytes;
  TESSERA_TRY(void* const data,
              device_.Allocate({bytes}, MemoryCategory::kCommunication));
  buffer.data = static_cast<std::byte*>(data);
  return buffer;
}

// ---- Meetings ---------------------------------------------------------------

Error LoopbackCommunicator::Here(const Error& error,
                                 std::string_view operation) const {
  return error.At(Text("rank ", world_.rank_, ", ", operation, " of group ",
                       GroupText(ranks_)));
}

// What the others offer; their buffers may be read by what is enqueued from
// then on. Whether a meeting at which an operation begins takes place is the
// same for all ranks: it does when all have come, whatever else happened. So
// those that follow within the operation always take place.
Result<LoopbackCommunicator::Offers> LoopbackCommunicator::Meet(Offer offer,
                                                                bool begins) {
  auto reached = world_.device_.RecordEvent();
  if (begins && !reached) return reached.error();
  if (reached) offer.reached = *std::move(reached);
  Hub& hub = *world_.hub_;
  Offers offers;
  {
    std::unique_lock lock(hub.mutex);
    if (begins) TESSERA_RETURN_IF_ERROR(world_.CheckUsable());
    const int64_t meeting = ++meetings_.opened[U(rank_)];
    const auto slot = static_cast<size_t>(meeting % 2);
    meetings_.offers[U(rank_)][slot] = std::move(offer);
    const auto all_have_come = [&] {
      return std::ranges::all_of(
          meetings_.opened, [&](int64_t opened) { return opened >= meeting; });
    };
    if (all_have_come()) {
      for (int r : ranks_) hub.ranks[U(r)].changed.notify_all();
    } else if (begins) {
      TESSERA_RETURN_IF_ERROR(world_.Wait(lock, all_have_come, [&](int r) {
        const auto at = std::ranges::find(ranks_, r);
        return at != ranks_.end() &&
               meetings_.opened[static_cast<size_t>(at - ranks_.begin())] <
                   meeting;
      }));
    } else {
      hub.ranks[U(world_.rank_)].changed.wait(lock, all_have_come);
    }
    for (const auto& slots : meetings_.offers) offers.push_back(slots[slot]);
  }
  for (int r = 0; r < size(); ++r) {
    const Event& event = offers[U(r)].reached;
    if (r != rank_ && event != nullptr) world_.device_.AwaitEvent(event);
  }
  if (!reached) return reached.error();
  return offers;
}

// Compares all with all, so that the ranks come to one verdict.
Result<void> LoopbackCommunicator::CheckAgreement(const Offers& offers) const {
  for (int r = 1; r < size(); ++r) {
    const Offer& first = offers[0];
    const Offer& other = offers[U(r)];
    if (first.operation == other.operation && first.terms == other.terms) {
      continue;
    }
    return CallsDiffer(ranks_[0], {first.operation, first.bytes}, ranks_[U(r)],
                       {other.operation, other.bytes}, ranks_);
  }
  if (offers[0].sends.empty()) return {};
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      const int64_t sent = offers[U(from)].sends[U(to)];
      const int64_t wanted = offers[U(to)].receives[U(from)];
      if (sent == wanted) continue;
      return PartsDiffer(ranks_[U(from)], sent, ranks_[U(to)], wanted);
    }
  }
  return {};
}

// work(offers) enqueues this rank's half. Afterwards nobody reads its buffers.
Result<void> LoopbackCommunicator::Run(
    Offer offer, const std::function<Result<void>(const Offers&)>& work) {
  const std::string_view operation = offer.operation;
  const auto run = [&]() -> Result<void> {
    TESSERA_TRY(const Offers offers, Meet(std::move(offer), /*begins=*/true));
    if (auto agreed = CheckAgreement(offers); !agreed) {
      const std::lock_guard lock(world_.hub_->mutex);
      return world_.Fail(agreed.error());
    }
    const auto worked = work(offers);
    const auto after = Meet({}, /*begins=*/false);
    if (worked && !after) return after.error();
    return worked;
  };
  if (auto done = run(); !done) return Here(done.error(), operation);
  return {};
}

void LoopbackCommunicator::Copy(void* to, const std::byte* from,
                                int64_t bytes) {
  if (bytes > 0) world_.device_.Copy(to, from, {.run_bytes = bytes});
}

// ---- Collectives ------------------------------------------------------------

// Every rank sums one slice, into its place; then all take the others' slices.
Result<void> LoopbackCommunicator::AllReduce(void* data, int64_t count,
                                             DType dtype) {
  if (auto valid = CheckCount(count); !valid) {
    return Here(valid.error(), "all-reduce");
  }
  const int64_t element = SizeOf(dtype);
  auto* const bytes = static_cast<std::byte*>(data);
  const auto begin = [&](int r) { return count * r / size() * element; };
  const auto length = [&](int r) { return begin(r + 1) - begin(r); };
  Offer offer{.operation = "all-reduce",
              .bytes = count * element,
              .terms = {count, static_cast<int64_t>(dtype)},
              .data = bytes};
  return Run(std::move(offer), [&](const Offers& offers) -> Result<void> {
    if (length(rank_) > 0 && size() > 1) {
      std::vector<const std::byte*> sources;
      for (const Offer& one : offers) {
        sources.push_back(one.data + begin(rank_));
      }
      world_.device_.Sum(sources, bytes + begin(rank_), length(rank_) / element,
                         dtype);
    }
    TESSERA_TRY([[maybe_unused]] const Offers summed,
                Meet({}, /*begins=*/false));
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      Copy(bytes + begin(r), offers[U(r)].data + begin(r), length(r));
    }
    return {};
  });
}

Result<void> LoopbackCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckGather(send_bytes, bytes_per_rank, rank_, size());
      !valid) {
    return Here(valid.error(), "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  auto* const to = static_cast<std::byte*>(recv);
  Offer offer{.operation = "all-gather",
              .bytes = offsets.back(),
              .terms = {bytes_per_rank.begin(), bytes_per_rank.end()},
              .data = static_cast<std::byte*>(const_cast<void*>(send))};
  return Run(std::move(offer), [&](const Offers& offers) -> Result<void> {
    for (int r = 0; r < size(); ++r) {
      std::byte* const part = to + offsets[U(r)];
      if (r == rank_ && send == part) continue;
      Copy(part, offers[U(r)].data, bytes_per_rank[U(r)]);
    }
    return {};
  });
}

Result<void> LoopbackCommunicator::ReduceScatter(
    const void* send, void* recv, std::span<const int64_t> counts_per_rank,
    DType dtype) {
  if (auto valid = CheckLengths(counts_per_rank, size()); !valid) {
    return Here(valid.error(), "reduce-scatter");
  }
  const std::vector<int64_t> offsets = Offsets(counts_per_rank);
  const int64_t element = SizeOf(dtype);
  Offer offer{.operation = "reduce-scatter",
              .bytes = offsets.back() * element,
              .terms = {counts_per_rank.begin(), counts_per_rank.end()},
              .data = static_cast<std::byte*>(const_cast<void*>(send))};
  offer.terms.push_back(static_cast<int64_t>(dtype));
  return Run(std::move(offer), [&](const Offers& offers) -> Result<void> {
    if (counts_per_rank[U(rank_)] == 0) return {};
    std::vector<const std::byte*> sources;
    for (const Offer& one : offers) {
      sources.push_back(one.data + offsets[U(rank_)] * element);
    }
    world_.device_.Sum(sources, static_cast<std::byte*>(recv),
                       counts_per_rank[U(rank_)], dtype);
    return {};
  });
}

Result<void> LoopbackCommunicator::AllToAll(
    const void* send, std::span<const int64_t> send_bytes, void* recv,
    std::span<const int64_t> recv_bytes) {
  if (auto valid = CheckExchange(send_bytes, recv_bytes, rank_, size());
      !valid) {
    return Here(valid.error(), "all-to-all");
  }
  const std::vector<int64_t> recv_offsets = Offsets(recv_bytes);
  auto* const to = static_cast<std::byte*>(recv);
  Offer offer{.operation = "all-to-all",
              .bytes = Offsets(send_bytes).back(),
              .sends = {send_bytes.begin(), send_bytes.end()},
              .receives = {recv_bytes.begin(), recv_bytes.end()},
              .data = static_cast<std::byte*>(const_cast<void*>(send))};
  return Run(std::move(offer), [&](const Offers& offers) -> Result<void> {
    for (int r = 0; r < size(); ++r) {
      const Offer& one = offers[U(r)];
      Copy(to + recv_offsets[U(r)], one.data + Offsets(one.sends)[U(rank_)],
           recv_bytes[U(r)]);
    }
    return {};
  });
}

Result<void> LoopbackCommunicator::Broadcast(void* data, int64_t bytes,
                                             int root) {
  if (auto valid = CheckBroadcast(bytes, root, size()); !valid) {
    return Here(valid.error(), "broadcast");
  }
  Offer offer{.operation = "broadcast",
              .bytes = bytes,
              .terms = {bytes, root},
              .data = static_cast<std::byte*>(data)};
  return Run(std::move(offer), [&](const Offers& offers) -> Result<void> {
    if (rank_ != root) Copy(data, offers[U(root)].data, bytes);
    return {};
  });
}

Result<void> LoopbackCommunicator::Barrier() {
  const auto none = [](const Offers&) -> Result<void> { return {}; };
  TESSERA_RETURN_IF_ERROR(Run({.operation = "barrier"}, none));
  return world_.device_.Synchronize();
}

// ---- Messages ---------------------------------------------------------------

Result<void> LoopbackCommunicator::Send(const void* data, int64_t bytes,
                                        int peer, uint64_t tag) {
  if (auto valid = CheckSend(bytes, peer, size()); !valid) {
    return Here(valid.error(), "send");
  }
  const auto send = [&]() -> Result<void> {
    Message message;
    message.group = ranks_;
    message.tag = tag;
    TESSERA_TRY(message.copy, world_.TakeBuffer(bytes));
    if (message.copy.last_use != nullptr) {
      world_.device_.AwaitEvent(message.copy.last_use);
    }
    Copy(message.copy.data, static_cast<const std::byte*>(data), bytes);
    TESSERA_TRY(message.copied, world_.device_.RecordEvent());
    message.copy.last_use = message.copied;
    Hub& hub = *world_.hub_;
    const std::lock_guard lock(hub.mutex);
    ++hub.ranks[U(world_.rank_)].messages;
    world_.Mail(ranks_[U(peer)], world_.rank_).push_back(std::move(message));
    hub.ranks[U(ranks_[U(peer)])].changed.notify_all();
    return world_.CheckUsable();
  };
  if (auto sent = send(); !sent) return Here(sent.error(), "send");
  return {};
}

Result<void> LoopbackCommunicator::Recv(void* data, int64_t bytes, int peer,
                                        uint64_t tag) {
  if (auto valid = CheckRecv(bytes, peer, size()); !valid) {
    return Here(valid.error(), "receive");
  }
  Hub& hub = *world_.hub_;
  const int from = ranks_[U(peer)];
  auto& mail = world_.Mail(world_.rank_, from);
  const auto receive = [&]() -> Result<void> {
    Message message;
    {
      std::unique_lock lock(hub.mutex);
      TESSERA_RETURN_IF_ERROR(world_.CheckUsable());
      auto found = mail.end();
      TESSERA_RETURN_IF_ERROR(world_.Wait(
          lock,
          [&] {
            found = std::ranges::find_if(mail, [&](const Message& one) {
              return one.tag == tag && one.group == ranks_;
            });
            return found != mail.end();
          },
          [&](int r) { return r == from; }));
      if (found->copy.bytes != bytes) {
        return MessageSizesDiffer(from, found->copy.bytes, tag, bytes);
      }
      message = std::move(*found);
      mail.erase(found);
    }
    world_.device_.AwaitEvent(message.copied);
    Copy(data, message.copy.data, bytes);
    auto read = world_.device_.RecordEvent();
    if (read) message.copy.last_use = *read;
    const std::lock_guard lock(hub.mutex);
    Hub::Rank& sender = hub.ranks[U(from)];
    --sender.messages;
    if (bytes > 0) sender.free.push_back(std::move(message.copy));
    sender.changed.notify_all();
    if (!read) return read.error();
    return {};
  };
  if (auto received = receive(); !received) {
    return Here(received.error(), "receive");
  }
  return {};
}

}  // namespace

std::vector<std::unique_ptr<CommWorld>> MakeLoopbackWorlds(
    std::span<QueueDevice* const> devices, CommOptions options) {
  TESSERA_CHECK(!devices.empty() && devices.size() <= QueueDevice::kMostSources)
      << devices.size();
  const auto hub = std::make_shared<Hub>(devices.size(), options);
  std::vector<std::unique_ptr<CommWorld>> worlds;
  for (size_t r = 0; r < devices.size(); ++r) {
    worlds.push_back(
        std::make_unique<LoopbackWorld>(hub, static_cast<int>(r), *devices[r]));
  }
  return worlds;
}

}  // namespace tessera
