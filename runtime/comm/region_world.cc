#include "runtime/comm/region_world.h"

#include <poll.h>
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
#include <utility>

#include "planner/base/append.h"
#include "planner/base/check.h"
#include "planner/base/start_thread.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/copy.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How often sleepers look after the peers' health.
constexpr Duration kHealthInterval = {100'000'000'000};  // 0.1 s
// More between two looks at a peer is no waiting: this process was stopped.
constexpr auto kLongestLook = std::chrono::seconds(2);
// A rank that waits has looked within this, or within half of a patience that
// is shorter than twice this.
constexpr auto kFreshLook = std::chrono::seconds(1);
// Peers that are told to stop as well come by themselves within this.
constexpr auto kStopPatience = std::chrono::seconds(1);
// Long messages are announced in pieces, so that the receiver starts early.
constexpr int64_t kAnnounceBytes = 128 << 10;

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

int64_t Nanoseconds(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
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
  if (world_size() == 1) return;
  if (auto started = StartThread([this] { RunCourier(); })) {
    courier_ = *std::move(started);
  } else {
    Abort(started.error().message);
  }
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

Result<void> RegionWorld::Sleep(Bell& bell, const ReadyFunction& ready,
                                const AwaitedFunction& awaited) {
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

std::string RegionWorld::RanksText(const AwaitedFunction& awaited) const {
  std::string text;
  for (int r = 0; r < world_size(); ++r) {
    if (!awaited(r)) continue;
    AppendTo(text, ", ", Text("rank ", r, " (", TaskText(TaskOf(r)), ")"));
  }
  return text;
}

// A rank that waits itself is not to blame: it tells for whom. But ranks that
// wait for each other are named after as long again. Whether this rank told.
bool RegionWorld::TellOfStall(double untold, double waited,
                              const AwaitedFunction& awaited) {
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

std::optional<Error> RegionWorld::FindTrouble(const AwaitedFunction& awaited) {
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
    // A posted receive takes the first of its group and tag, straight into
    // place. One before it that still lies here has another size: the receive
    // fails on that, and is soon over.
    const auto posted = std::find_if(
        posted_.begin(), posted_.end(), [&](const PostedRecv* recv) {
          return recv->from == from && recv->data != nullptr &&
                 recv->group == header.group && recv->tag == header.tag &&
                 recv->bytes == header.bytes;
        });
    const auto is_alike = [&](const Message& before) {
      return before.group == header.group && before.tag == header.tag;
    };
    if (posted != posted_.end() &&
        std::none_of(peer.messages.begin(), peer.messages.end(), is_alike)) {
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

}  // namespace tessera
