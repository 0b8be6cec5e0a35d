#include "runtime/comm/region_world.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <type_traits>
#include <utility>

#include "planner/base/check.h"
#include "planner/base/fnv1a.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/copy.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How a waiting rank looks before it sleeps. A peer on another core answers
// within a microsecond or so; when ranks share cores, giving the core away is
// what lets the peer answer. With these a 4-byte all-reduce of 2 ranks took 0.3
// us on 2 idle cores and 15 us on busy ones, of 4 ranks 16 us and 46 us (own
// measurement, November 2026).
constexpr int kLooks = 200;
constexpr int kYields = 20;
// How often sleepers look after the peers' health.
constexpr Duration kHealthInterval = {100'000'000'000};  // 0.1 s
// More between two looks at a peer is no waiting: this process was stopped.
constexpr auto kLongestLook = std::chrono::seconds(2);
// A rank that waits has looked within this, or within half of a patience that
// is shorter than twice this.
constexpr auto kFreshLook = std::chrono::seconds(1);
// Peers that are told to stop as well come by themselves within this.
constexpr auto kStopPatience = std::chrono::seconds(1);
// Sums of at most this many bytes are formed by every rank for itself, in one
// round: below, a wait costs more than the repeated additions.
constexpr int64_t kAtOnceBytes = 16 << 10;
// Long messages are announced in pieces, so that the receiver starts early.
constexpr int64_t kAnnounceBytes = 128 << 10;

struct MessageHeader {
  uint64_t group;
  uint64_t tag;
  int64_t bytes;
};

const char* NameOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all-reduce";
    case CollectiveKind::kAllGather:
      return "all-gather";
    case CollectiveKind::kReduceScatter:
      return "reduce-scatter";
    case CollectiveKind::kAllToAll:
      return "all-to-all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

// Whether results of `bytes` in all should go past the cache. What a core's
// second-level cache (256 KiB at least on current CPUs) holds, the user may
// find there.
bool IsLarge(int64_t bytes) {
  return bytes > (256 << 10);
}

// Into the user's memory, by an operation that writes `total` bytes there.
void CopyOut(void* to, const void* from, int64_t bytes, int64_t total) {
  if (IsLarge(total)) {
    CopyPastCache(to, from, bytes);
  } else {
    CopyToCache(to, from, bytes);
  }
}

int64_t Rounds(int64_t bytes, int64_t bytes_per_round) {
  return std::max<int64_t>(1, (bytes + bytes_per_round - 1) / bytes_per_round);
}

// [0, extent) cut into pieces of `step`: where piece i begins, and its length.
struct Piece {
  int64_t begin;
  int64_t length;
};
Piece PieceOf(int64_t extent, int64_t step, int64_t i) {
  const int64_t begin = std::min(i * step, extent);
  return {begin, std::min(step, extent - begin)};
}

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

int64_t Nanoseconds(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool IsZombieOrGone(int pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  // "PID (NAME) STATE ...": NAME may hold anything, even parentheses.
  std::ifstream stat(Text("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(stat, line)) return false;
  const size_t end = line.rfind(')');
  return end != std::string::npos && end + 2 < line.size() &&
         (line[end + 2] == 'Z' || line[end + 2] == 'X');
}

}  // namespace

// ---- The world --------------------------------------------------------------

RegionWorld::RegionWorld(std::shared_ptr<Region> region, int rank,
                         CommOptions options)
    : region_(std::move(region)),
      rank_(rank),
      options_(options),
      peers_(static_cast<size_t>(region_->ranks())) {
  TESSERA_CHECK(rank >= 0 && rank < region_->ranks()) << rank;
  Inbox& inbox = region_->inbox(rank_);
  inbox.pid.store(getpid(), std::memory_order_relaxed);
  inbox.state.store(RankState::kPresent, std::memory_order_release);
  if (world_size() > 1) courier_ = std::thread([this] { RunCourier(); });
}

RegionWorld::~RegionWorld() {
  leaving_.store(true);
  Ring(region_->inbox(rank_).courier);
  if (courier_.joinable()) courier_.join();
  region_->inbox(rank_).state.store(RankState::kLeft);
  for (int r = 0; r < world_size(); ++r) {
    RingAll(r);
    const int pidfd = peers_[static_cast<size_t>(r)].pidfd;
    if (pidfd >= 0) close(pidfd);
  }
}

void RegionWorld::WatchProcesses() {
  watches_processes_ = true;
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank_) continue;
    Peer& peer = peers_[static_cast<size_t>(r)];
    const int pid = region_->inbox(r).pid.load();
    // A pidfd tells of the end of a process that nobody has waited for yet,
    // and is never mistaken for a later process. Some sandboxes refuse it.
    peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (peer.pidfd < 0 && errno == ESRCH) peer.gone = true;
  }
}

bool RegionWorld::IsDead(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.gone) return true;
  if (peer.pidfd >= 0) {
    pollfd poll_fd = {peer.pidfd, POLLIN, 0};
    peer.gone = poll(&poll_fd, 1, 0) == 1;
  } else {
    peer.gone = IsZombieOrGone(region_->inbox(rank).pid.load());
  }
  return peer.gone;
}

Result<Communicator*> RegionWorld::Group(std::span<const int> ranks) {
  std::vector<int> key(ranks.begin(), ranks.end());
  const std::lock_guard lock(groups_mutex_);
  if (const auto found = groups_.find(key); found != groups_.end()) {
    return found->second.get();
  }
  TESSERA_RETURN_IF_ERROR(CheckGroup(key, rank_, world_size()));
  if (groups_.size() == kMaxChannels) {
    return InvalidInput(
        Text("rank ", rank_, " asks for more than ", kMaxChannels, " groups"));
  }
  auto group = std::make_unique<RegionCommunicator>(
      *this, key, static_cast<int>(groups_.size()));
  Communicator* result = group.get();
  groups_.emplace(std::move(key), std::move(group));
  return result;
}

void RegionWorld::Abort(std::string_view reason) {
  Fail(RankAborted(rank_, reason));
}

Error RegionWorld::AbortOfJob() const {
  const RegionHeader& header = region_->header();
  return {header.abort_code.load(), header.abort_message.Load(), ""};
}

// Publishes `error` as the job's, unless there is one already. The failure of
// this world is what was published first.
Error RegionWorld::Fail(Error error) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return *failure_;
  RegionHeader& header = region_->header();
  AbortState none = AbortState::kNone;
  if (header.abort_state.compare_exchange_strong(none, AbortState::kWriting)) {
    header.abort_code.store(error.code);
    header.abort_message.Store(error.message);
    header.abort_state.store(AbortState::kSet);
    for (int r = 0; r < world_size(); ++r) RingAll(r);
  } else if (header.abort_state.load() == AbortState::kSet) {
    error = AbortOfJob();
  }
  failure_ = error;
  failed_.store(true);
  return error;
}

Result<void> RegionWorld::CheckUsable() {
  const RegionHeader& header = region_->header();
  if (!failed_.load(std::memory_order_acquire) &&
      header.abort_state.load(std::memory_order_acquire) != AbortState::kSet) {
    return {};
  }
  const std::lock_guard lock(failure_mutex_);
  if (!failure_) {
    failure_ = AbortOfJob();
    failed_.store(true);
  }
  return *failure_;
}

void RegionWorld::SetCurrentTask(std::string_view task) {
  const std::lock_guard lock(task_mutex_);
  region_->inbox(rank_).task.Store(task);
}

std::string RegionWorld::TaskOf(int rank) const {
  return region_->inbox(rank).task.Load();
}

// ---- Waiting ----------------------------------------------------------------

void RegionWorld::RingAll(int rank) {
  Inbox& inbox = region_->inbox(rank);
  Ring(inbox.mail);
  Ring(inbox.courier);
  for (Channel& channel : inbox.channels) {
    if (channel.group.load() == 0) break;
    Ring(channel.bell);
  }
}

template <typename Ready, typename Awaited>
Result<void> RegionWorld::Wait(Bell& bell, Ready ready, Awaited awaited) {
  for (int i = 0; i < kLooks; ++i) {
    if (ready()) return {};
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return {};
    sched_yield();
  }
  struct Sleeper {
    Bell& bell;
    explicit Sleeper(Bell& b) : bell(b) { bell.sleepers.fetch_add(1); }
    ~Sleeper() { bell.sleepers.fetch_sub(1); }
  } sleeper(bell);
  // One rank tells of a stall. The next may be told of once its wait is over.
  struct Stall {
    std::atomic<bool>& told;
    bool told_here = false;
    ~Stall() {
      if (told_here) told.store(false);
    }
  } stall{region_->header().stall_told};
  Clock::time_point checked = Clock::now();
  // Without the time in which Ctrl-Z stopped ranks; that since `stop`; and that
  // since a stall was last told of, which may be what this wait began with.
  Clock::duration waited{}, waited_to_stop{}, untold{};
  for (;;) {
    const uint32_t rung = bell.rung.load();
    if (ready()) return {};
    TESSERA_RETURN_IF_ERROR(CheckUsable());
    const Clock::time_point now = Clock::now();
    if (now - checked >= std::chrono::milliseconds(90)) {
      const auto look = std::min<Clock::duration>(now - checked, kLongestLook);
      waited += look;
      if (MayStop()) waited_to_stop += look;
      untold = stall.told.load() ? Clock::duration() : untold + look;
      checked = now;
      region_->inbox(rank_).looked_at.store(Nanoseconds(now));
      std::optional<Error> trouble = FindTrouble(awaited);
      // What a peer did before its end may be all that was awaited.
      if (ready()) return {};
      if (!trouble && Seconds(waited) > options_.timeout.seconds()) {
        trouble =
            RankWaitedTooLong(rank_, options_.timeout, RanksText(awaited));
      }
      if (!trouble && waited_to_stop > kStopPatience) {
        trouble = Error{ErrorCode::kInterrupted,
                        Text("interrupted as rank ", rank_, " waited for ",
                             RanksText(awaited)),
                        ""};
      }
      if (!trouble && Seconds(untold) > options_.patience.seconds() &&
          TellOfStall(Seconds(untold), Seconds(waited), awaited)) {
        stall.told_here = true;
      }
      if (trouble) {
        TESSERA_RETURN_IF_ERROR(CheckUsable());
        return Fail(*trouble);
      }
    }
    SleepOn(bell, rung, kHealthInterval);
  }
}

// Whether this rank was told to stop and has no step that it could end first.
bool RegionWorld::MayStop() const {
  return options_.stop != nullptr && options_.stop->load() &&
         TaskOf(rank_).empty();
}

template <typename Awaited>
std::string RegionWorld::RanksText(Awaited awaited) const {
  std::string text;
  for (int r = 0; r < world_size(); ++r) {
    if (!awaited(r)) continue;
    text += Text(text.empty() ? "" : ", ", "rank ", r, " (",
                 TaskText(TaskOf(r)), ")");
  }
  return text;
}

// A rank that waits itself is not to blame: it tells for whom. But ranks that
// wait for each other are named after as long again. Whether this rank told.
template <typename Awaited>
bool RegionWorld::TellOfStall(double untold, double waited, Awaited awaited) {
  if (!options_.stalled) return false;
  const double patience = options_.patience.seconds();
  const bool whoever = untold > 2 * patience;
  const auto fresh_look = std::min<Clock::duration>(
      kFreshLook, std::chrono::nanoseconds(std::llround(patience * 1e9 / 2)));
  const int64_t fresh = Nanoseconds(Clock::now() - fresh_look);
  const std::string who = RanksText([&](int r) {
    return awaited(r) &&
           (whoever || region_->inbox(r).looked_at.load() < fresh);
  });
  if (who.empty() || region_->header().stall_told.exchange(true)) return false;
  options_.stalled(StallText(rank_, Duration::FromSeconds(std::floor(waited)),
                             options_.timeout, who));
  return true;
}

template <typename Awaited>
std::optional<Error> RegionWorld::FindTrouble(Awaited awaited) {
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank_) continue;
    const Inbox& inbox = region_->inbox(r);
    if (inbox.state.load() == RankState::kLeft) {
      if (!awaited(r)) continue;
      return RankLeft(r, rank_);
    }
    if (!watches_processes_ || !IsDead(r)) continue;
    // It may have left between the two looks.
    if (inbox.state.load() == RankState::kLeft) continue;
    return RankDied(r, inbox.pid.load(), TaskOf(r));
  }
  return std::nullopt;
}

// ---- Messages ---------------------------------------------------------------

int64_t RegionWorld::WriteRing(int to, const std::byte* data, int64_t bytes) {
  MessageRing& ring = region_->ring(rank_, to);
  const auto size = static_cast<uint64_t>(region_->ring_bytes());
  int64_t written = 0;
  while (written < bytes) {
    const uint64_t head = ring.head.load(std::memory_order_relaxed);
    const uint64_t room = size - (head - ring.tail.load());
    const uint64_t offset = head % size;
    const auto n = static_cast<int64_t>(
        std::min({room, size - offset, static_cast<uint64_t>(kAnnounceBytes),
                  static_cast<uint64_t>(bytes - written)}));
    if (n == 0) break;
    CopyToCache(region_->ring_data(rank_, to) + offset, data + written, n);
    ring.head.store(head + static_cast<uint64_t>(n), std::memory_order_release);
    Ring(region_->inbox(to).mail);
    written += n;
  }
  return written;
}

int64_t RegionWorld::ReadRing(int from, std::byte* data, int64_t bytes) {
  MessageRing& ring = region_->ring(from, rank_);
  const auto size = static_cast<uint64_t>(region_->ring_bytes());
  int64_t read = 0;
  while (read < bytes) {
    const uint64_t tail = ring.tail.load(std::memory_order_relaxed);
    const uint64_t filled = ring.head.load(std::memory_order_acquire) - tail;
    const uint64_t offset = tail % size;
    const auto n = static_cast<int64_t>(
        std::min({filled, size - offset, static_cast<uint64_t>(bytes - read)}));
    if (n == 0) break;
    CopyToCache(data + read, region_->ring_data(from, rank_) + offset, n);
    // Sequentially consistent against the sender, which sets `backlog` and
    // whose courier then looks at `tail` once more before it sleeps.
    ring.tail.store(tail + static_cast<uint64_t>(n));
    if (ring.backlog.load() != 0) Ring(region_->inbox(from).courier);
    read += n;
  }
  return read;
}

bool RegionWorld::PushQueue(int to) {
  auto& queue = peers_[static_cast<size_t>(to)].queue;
  bool moved = false;
  while (!queue.empty()) {
    Outgoing& first = queue.front();
    const auto left = static_cast<int64_t>(first.bytes.size()) - first.written;
    const int64_t n = WriteRing(to, first.bytes.data() + first.written, left);
    first.written += n;
    moved |= n > 0;
    if (n < left) break;
    queue.pop_front();
  }
  if (queue.empty()) {
    region_->ring(rank_, to).backlog.store(0);
  } else if (moved) {
    Ring(region_->inbox(to).courier);  // to make room for the rest
  }
  return moved;
}

bool RegionWorld::DrainRing(int from) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  MessageRing& ring = region_->ring(from, rank_);
  bool moved = false;
  // After a failure waiting receives return, and their buffers are gone.
  while (CheckUsable()) {
    if (!peer.messages.empty() &&
        peer.messages.back().filled < peer.messages.back().bytes) {
      Message& message = peer.messages.back();
      const int64_t n = ReadRing(from, message.data + message.filled,
                                 message.bytes - message.filled);
      message.filled += n;
      moved |= n > 0;
      if (message.filled < message.bytes) return moved;
      continue;
    }
    const uint64_t filled = ring.head.load(std::memory_order_acquire) -
                            ring.tail.load(std::memory_order_relaxed);
    MessageHeader header;
    if (filled < sizeof(header)) return moved;
    ReadRing(from, reinterpret_cast<std::byte*>(&header), sizeof(header));
    moved = true;
    Message message{header.group, header.tag, header.bytes, 0, nullptr, {}};
    // A posted receive takes the first that matches, straight into place.
    const auto posted = std::find_if(
        posted_.begin(), posted_.end(), [&](const PostedRecv* recv) {
          return recv->from == from && recv->data != nullptr &&
                 recv->group == header.group && recv->tag == header.tag &&
                 recv->bytes == header.bytes;
        });
    if (posted != posted_.end()) {
      message.data = std::exchange((*posted)->data, nullptr);
    } else {
      message.buffer = std::make_unique_for_overwrite<std::byte[]>(
          static_cast<size_t>(header.bytes));
      message.data = message.buffer.get();
    }
    peer.messages.push_back(std::move(message));
  }
  return moved;
}

bool RegionWorld::QueuesAreEmpty() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.queue.empty(); });
}

// Moves what senders could not, in both directions. Looks again whenever a ring
// has room for what is queued here, or a sender has more than a ring takes.
void RegionWorld::RunCourier() {
  Inbox& inbox = region_->inbox(rank_);
  inbox.courier.sleepers.fetch_add(1);
  while (!leaving_.load()) {
    const uint32_t rung = inbox.courier.rung.load();
    bool moved = false;
    if (CheckUsable()) {
      const std::lock_guard lock(mail_mutex_);
      for (int r = 0; r < world_size(); ++r) {
        if (r == rank_) continue;
        if (!peers_[static_cast<size_t>(r)].queue.empty()) {
          moved |= PushQueue(r);
        }
        if (region_->ring(r, rank_).backlog.load() != 0) moved |= DrainRing(r);
      }
    }
    if (moved) {
      Ring(inbox.mail);
    } else {
      SleepOn(inbox.courier, rung, options_.timeout);
    }
  }
  inbox.courier.sleepers.fetch_sub(1);
}

Result<void> RegionWorld::Flush() {
  Result<void> result = CheckUsable();
  if (result) {
    result = Wait(
        region_->inbox(rank_).mail,
        [&] {
          const std::lock_guard lock(mail_mutex_);
          return QueuesAreEmpty();
        },
        [&](int r) {
          const std::lock_guard lock(mail_mutex_);
          return !peers_[static_cast<size_t>(r)].queue.empty();
        });
  }
  if (result) return result;
  return result.error().At(Text("rank ", rank_, ", flush"));
}

// ---- The communicator -------------------------------------------------------

RegionCommunicator::RegionCommunicator(RegionWorld& world,
                                       std::vector<int> ranks, int channel)
    : world_(world), ranks_(std::move(ranks)), channels_(ranks_.size(), -1) {
  group_ = Fnv1a().AddAll(ranks_).value() | 1;  // 0 is an unused channel
  rank_ = static_cast<int>(
      std::find(ranks_.begin(), ranks_.end(), world_.rank_) - ranks_.begin());
  channels_[static_cast<size_t>(rank_)] = channel;
  // Published, and then those told who joined before: of two members at least
  // one finds the other, and tells it.
  this->channel(rank_).group.store(group_);
  for (int r = 0; r < size(); ++r) {
    if (FindChannel(r)) Ring(this->channel(r).bell);
  }
}

Channel& RegionCommunicator::channel(int rank) const {
  const int number = channels_[static_cast<size_t>(rank)];
  TESSERA_CHECK(number >= 0) << rank;
  return world_.region_->inbox(Global(rank)).channels[number];
}

std::byte* RegionCommunicator::send_half(int rank, int64_t round) const {
  return world_.region_->send_half(Global(rank),
                                   channels_[static_cast<size_t>(rank)], round);
}

std::byte* RegionCommunicator::result_half(int rank, int64_t round) const {
  return world_.region_->result_half(
      Global(rank), channels_[static_cast<size_t>(rank)], round);
}

bool RegionCommunicator::FindChannel(int rank) {
  int& number = channels_[static_cast<size_t>(rank)];
  if (number >= 0) return true;
  Inbox& inbox = world_.region_->inbox(Global(rank));
  for (int c = 0; c < kMaxChannels; ++c) {
    const uint64_t group = inbox.channels[c].group.load();
    if (group == 0) return false;
    if (group != group_) continue;
    number = c;
    return true;
  }
  return false;
}

bool RegionCommunicator::HasSignalled(int rank) {
  return rank == rank_ ||
         (FindChannel(rank) && channel(rank_).signals[Global(rank)].load(
                                   std::memory_order_acquire) >= signals_);
}

// Until all have joined and have signalled as often as this rank.
Result<void> RegionCommunicator::WaitForPeers() {
  return world_.Wait(
      channel(rank_).bell,
      [&] {
        for (int r = 0; r < size(); ++r) {
          if (!HasSignalled(r)) return false;
        }
        return true;
      },
      [&](int world_rank) {
        const auto at = std::find(ranks_.begin(), ranks_.end(), world_rank);
        return at != ranks_.end() &&
               !HasSignalled(static_cast<int>(at - ranks_.begin()));
      });
}

// REQUIRES: all peers have joined.
void RegionCommunicator::SignalPeers() {
  ++signals_;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    channel(r).signals[world_.rank_].store(signals_, std::memory_order_release);
    Ring(channel(r).bell);
  }
}

Error RegionCommunicator::Here(Error error, std::string_view operation) const {
  return error.At(Text("rank ", world_.rank_, ", ", operation, " of group ",
                       GroupText(ranks_)));
}

// The part of a half that is staged for one rank of the group. Multiples of a
// cache line, so that ranks do not share lines and elements stay aligned.
int64_t RegionCommunicator::SlotBytes() const {
  constexpr auto kLine = static_cast<int64_t>(kCacheLine);
  return world_.region_->half_bytes() / std::max(2, size()) / kLine * kLine;
}

CollectiveHeader RegionCommunicator::Header(CollectiveKind kind, int64_t bytes,
                                            int64_t bytes_per_round) const {
  CollectiveHeader header;
  header.kind = kind;
  header.detail = static_cast<uint64_t>(bytes);
  header.bytes = bytes;
  header.rounds = Rounds(bytes, bytes_per_round);
  return header;
}

Result<void> RegionCommunicator::CheckHeaders(const CollectiveHeader& mine,
                                              int64_t& rounds) {
  for (int r = 0; r < size(); ++r) {
    const CollectiveHeader& theirs = channel(r).collective;
    rounds = std::max(rounds, theirs.rounds);
    if (theirs.kind == mine.kind && theirs.detail == mine.detail) continue;
    return world_.Fail(
        CallsDiffer(world_.rank_, {NameOf(mine.kind), mine.bytes}, Global(r),
                    {NameOf(theirs.kind), theirs.bytes}, ranks_));
  }
  return {};
}

template <typename Stage, typename Consume>
Result<void> RegionCommunicator::RunRounds(CollectiveHeader header, Stage stage,
                                           Consume consume) {
  const auto run = [&]() -> Result<void> {
    TESSERA_RETURN_IF_ERROR(world_.CheckUsable());
    // A peer may still be reading what the last collective staged.
    TESSERA_RETURN_IF_ERROR(WaitForPeers());
    channel(rank_).collective = header;
    int64_t rounds = header.rounds;
    for (int64_t i = 0; i < rounds; ++i) {
      stage(i);
      SignalPeers();
      TESSERA_RETURN_IF_ERROR(WaitForPeers());
      if (i == 0) {
        TESSERA_RETURN_IF_ERROR(CheckHeaders(header, rounds));
      }
      if constexpr (std::is_same_v<decltype(consume(i)), Result<void>>) {
        TESSERA_RETURN_IF_ERROR(consume(i));
      } else {
        consume(i);
      }
    }
    SignalPeers();
    return {};
  };
  if (Result<void> result = run(); !result) {
    return Here(result.error(), NameOf(header.kind));
  }
  return {};
}

Result<void> RegionCommunicator::AllReduce(void* data, int64_t count,
                                           DType dtype) {
  if (auto valid = CheckCount(count); !valid) {
    return Here(valid.error(), "all-reduce");
  }
  if (size() == 1) return world_.CheckUsable();
  auto* bytes = static_cast<std::byte*>(data);
  const int64_t limit = std::min(kAtOnceBytes, world_.region_->half_bytes());
  return count * SizeOf(dtype) <= limit
             ? AllReduceAtOnce(bytes, count, dtype)
             : AllReduceInSlices(bytes, count, dtype);
}

Result<void> RegionCommunicator::AllReduceAtOnce(std::byte* data, int64_t count,
                                                 DType dtype) {
  const int64_t bytes = count * SizeOf(dtype);
  CollectiveHeader header =
      Header(CollectiveKind::kAllReduce, bytes, bytes + 1);
  header.detail = Fnv1a().Add(header.detail).Add(uint64_t(dtype)).value();
  return RunRounds(
      header, [&](int64_t) { CopyToCache(send_half(rank_, 0), data, bytes); },
      [&](int64_t) {
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(send_half(r, 0));
        }
        SumInOrder(sources, data, nullptr, count, dtype, IsLarge(bytes));
      });
}

// Every round sums up to a slot per rank: each rank sums one slice of the
// round and publishes it. Round i stages its slices and, with them, the sums
// of the slices of round i - 1; hence one round more than slices.
Result<void> RegionCommunicator::AllReduceInSlices(std::byte* data,
                                                   int64_t count, DType dtype) {
  const int64_t element = SizeOf(dtype);
  const int64_t per_round = SlotBytes() / element * size();
  CollectiveHeader header =
      Header(CollectiveKind::kAllReduce, count * element, per_round * element);
  header.detail = Fnv1a().Add(header.detail).Add(uint64_t(dtype)).value();
  header.rounds += 1;
  // The elements of rank r's slice of round i.
  const auto slice = [&](int64_t i, int r) -> Piece {
    const Piece round = PieceOf(count, per_round, i);
    const int64_t begin = round.length * r / size();
    const int64_t end = round.length * (r + 1) / size();
    return {round.begin + begin, end - begin};
  };
  const int64_t slot = SlotBytes();
  return RunRounds(
      header,
      [&](int64_t i) {
        for (int r = 0; r < size() && i + 1 < header.rounds; ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i, r);
          CopyToCache(send_half(rank_, i) + r * slot,
                      data + piece.begin * element, piece.length * element);
        }
        if (i == 0) return;
        const Piece mine = slice(i - 1, rank_);
        std::byte* const place = data + mine.begin * element;
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? place
                                       : send_half(r, i - 1) + rank_ * slot);
        }
        SumInOrder(sources, place, result_half(rank_, i - 1), mine.length,
                   dtype, IsLarge(count * element));
      },
      [&](int64_t i) {
        if (i == 0) return;
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i - 1, r);
          CopyOut(data + piece.begin * element, result_half(r, i - 1),
                  piece.length * element, count * element);
        }
      });
}

namespace {

int64_t Largest(std::span<const int64_t> lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

}  // namespace

Result<void> RegionCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckGather(send_bytes, bytes_per_rank, rank_, size());
      !valid) {
    return Here(valid.error(), "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  const int64_t per_round = world_.region_->half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kAllGather, offsets.back(), per_round);
  header.detail = Fnv1a().AddAll(bytes_per_rank).value();
  header.rounds = Rounds(Largest(bytes_per_rank), per_round);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  CopyOut(to + offsets[static_cast<size_t>(rank_)], from, send_bytes,
          header.bytes);
  return RunRounds(
      header,
      [&](int64_t i) {
        if (size() == 1) return;
        const Piece piece = PieceOf(send_bytes, per_round, i);
        CopyToCache(send_half(rank_, i), from + piece.begin, piece.length);
      },
      [&](int64_t i) {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(bytes_per_rank[index], per_round, i);
          CopyOut(to + offsets[index] + piece.begin, send_half(r, i),
                  piece.length, header.bytes);
        }
      });
}

Result<void> RegionCommunicator::ReduceScatter(
    const void* send, void* recv, std::span<const int64_t> counts_per_rank,
    DType dtype) {
  if (auto valid = CheckLengths(counts_per_rank, size()); !valid) {
    return Here(valid.error(), "reduce-scatter");
  }
  const std::vector<int64_t> offsets = Offsets(counts_per_rank);
  const int64_t element = SizeOf(dtype);
  const int64_t slot = SlotBytes();
  const int64_t per_round = slot / element;
  CollectiveHeader header =
      Header(CollectiveKind::kReduceScatter, offsets.back() * element, slot);
  header.detail =
      Fnv1a().AddAll(counts_per_rank).Add(static_cast<uint64_t>(dtype)).value();
  header.rounds = Rounds(Largest(counts_per_rank), per_round);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  // The piece of rank r's part that is summed in round i, in elements of send.
  const auto piece_of = [&](int64_t i, int r) -> Piece {
    const auto index = static_cast<size_t>(r);
    const Piece piece = PieceOf(counts_per_rank[index], per_round, i);
    return {offsets[index] + piece.begin, piece.length};
  };
  return RunRounds(
      header,
      [&](int64_t i) {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const Piece piece = piece_of(i, r);
          CopyToCache(send_half(rank_, i) + r * slot,
                      from + piece.begin * element, piece.length * element);
        }
      },
      [&](int64_t i) {
        const Piece mine = piece_of(i, rank_);
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? from + mine.begin * element
                                       : send_half(r, i) + rank_ * slot);
        }
        SumInOrder(sources, to + i * per_round * element, nullptr, mine.length,
                   dtype, IsLarge(offsets.back() * element));
      });
}

Result<void> RegionCommunicator::AllToAll(const void* send,
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
  const int64_t slot = SlotBytes();
  CollectiveHeader header =
      Header(CollectiveKind::kAllToAll, send_offsets.back(), slot);
  header.detail = 0;  // ranks may differ; sizes are compared pair by pair
  header.rounds = Rounds(Largest(send_bytes), slot);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  CopyOut(to + recv_offsets[me], from + send_offsets[me], send_bytes[me],
          recv_offsets.back());
  return RunRounds(
      header,
      [&](int64_t i) {
        if (i == 0) {
          std::copy(send_bytes.begin(), send_bytes.end(), channel(rank_).sizes);
        }
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(send_bytes[index], slot, i);
          CopyToCache(send_half(rank_, i) + r * slot,
                      from + send_offsets[index] + piece.begin, piece.length);
        }
      },
      [&](int64_t i) -> Result<void> {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const int64_t sent = channel(r).sizes[rank_];
          if (i == 0 && sent != recv_bytes[index]) {
            return world_.Fail(
                PartsDiffer(Global(r), sent, world_.rank_, recv_bytes[index]));
          }
          const Piece piece = PieceOf(recv_bytes[index], slot, i);
          CopyOut(to + recv_offsets[index] + piece.begin,
                  send_half(r, i) + rank_ * slot, piece.length,
                  recv_offsets.back());
        }
        return {};
      });
}

Result<void> RegionCommunicator::Broadcast(void* data, int64_t bytes,
                                           int root) {
  if (auto valid = CheckBroadcast(bytes, root, size()); !valid) {
    return Here(valid.error(), "broadcast");
  }
  const int64_t per_round = world_.region_->half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kBroadcast, bytes, per_round);
  header.detail =
      Fnv1a().Add(header.detail).Add(static_cast<uint64_t>(root)).value();
  auto* const place = static_cast<std::byte*>(data);
  return RunRounds(
      header,
      [&](int64_t i) {
        if (rank_ != root || size() == 1) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyToCache(send_half(rank_, i), place + piece.begin, piece.length);
      },
      [&](int64_t i) {
        if (rank_ == root) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyOut(place + piece.begin, send_half(root, i), piece.length, bytes);
      });
}

Result<void> RegionCommunicator::Barrier() {
  return RunRounds(
      Header(CollectiveKind::kBarrier, 0, 1), [](int64_t) {}, [](int64_t) {});
}

Result<void> RegionCommunicator::Send(const void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (auto valid = CheckSend(bytes, peer, size()); !valid) {
    return Here(valid.error(), "send");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "send");
  }
  const auto* const from = static_cast<const std::byte*>(data);
  const int to = Global(peer);
  const std::lock_guard lock(world_.mail_mutex_);
  RegionWorld::Peer& state = world_.peers_[static_cast<size_t>(to)];
  if (peer == rank_) {
    RegionWorld::Message message{group_, tag, bytes, bytes, nullptr, {}};
    message.buffer =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
    message.data = message.buffer.get();
    CopyToCache(message.data, from, bytes);
    state.messages.push_back(std::move(message));
    Ring(world_.region_->inbox(to).mail);
    return {};
  }
  const MessageHeader header = {group_, tag, bytes};
  const auto* const head = reinterpret_cast<const std::byte*>(&header);
  constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(header));
  int64_t head_written = 0;
  int64_t written = 0;
  world_.PushQueue(to);
  if (state.queue.empty()) {
    head_written = world_.WriteRing(to, head, kHeaderBytes);
    if (head_written == kHeaderBytes) {
      written = world_.WriteRing(to, from, bytes);
    }
  }
  if (head_written == kHeaderBytes && written == bytes) return {};
  RegionWorld::Outgoing rest;
  rest.bytes.assign(head + head_written, head + kHeaderBytes);
  if (bytes > written) {
    rest.bytes.insert(rest.bytes.end(), from + written, from + bytes);
  }
  state.queue.push_back(std::move(rest));
  world_.region_->ring(world_.rank_, to).backlog.store(1);
  // The peer's courier has to make room, and then the own one to go on; or it
  // has made some meanwhile.
  Ring(world_.region_->inbox(to).courier);
  Ring(world_.region_->inbox(world_.rank_).courier);
  return {};
}

Result<void> RegionCommunicator::Recv(void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (auto valid = CheckRecv(bytes, peer, size()); !valid) {
    return Here(valid.error(), "receive");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "receive");
  }
  const int from = Global(peer);
  auto& messages = world_.peers_[static_cast<size_t>(from)].messages;
  auto* const place = static_cast<std::byte*>(data);
  RegionWorld::PostedRecv post = {from, group_, tag, bytes,
                                  bytes > 0 ? place : nullptr};
  const auto find = [&] {
    return std::find_if(messages.begin(), messages.end(), [&](const auto& m) {
      return m.group == group_ && m.tag == tag;
    });
  };
  auto found = messages.end();
  const auto ready = [&] {
    const std::lock_guard lock(world_.mail_mutex_);
    if (peer != rank_) world_.DrainRing(from);
    if (found == messages.end()) found = find();
    return found != messages.end() &&
           (found->filled == found->bytes || found->bytes != bytes);
  };
  {
    // What has begun to arrive comes before what a post would take.
    const std::lock_guard lock(world_.mail_mutex_);
    found = find();
    if (found == messages.end()) world_.posted_.push_back(&post);
  }
  Result<void> result =
      world_.Wait(world_.region_->inbox(world_.rank_).mail, ready,
                  [&](int r) { return r == from && r != world_.rank_; });
  const std::lock_guard lock(world_.mail_mutex_);
  world_.posted_.remove(&post);
  if (!result) return Here(result.error(), "receive");
  if (found->bytes != bytes) {
    return Here(MessageSizesDiffer(from, found->bytes, tag, bytes), "receive");
  }
  if (found->buffer != nullptr) CopyToCache(place, found->buffer.get(), bytes);
  messages.erase(found);
  return {};
}

}  // namespace tessera
