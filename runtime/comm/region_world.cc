#include "runtime/comm/region_world.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <type_traits>

#include "planner/base/check.h"
#include "runtime/comm/copy.h"
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

// FNV-1a over 64-bit words: tells differing arguments apart, nothing more.
class Hash {
 public:
  Hash& Add(uint64_t word) {
    for (int i = 0; i < 8; ++i) {
      value_ = (value_ ^ ((word >> (8 * i)) & 0xff)) * 0x100000001b3ULL;
    }
    return *this;
  }
  Hash& Add(std::span<const int64_t> words) {
    for (int64_t word : words) Add(static_cast<uint64_t>(word));
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
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

Error Unavailable(std::string message) {
  return {ErrorCode::kUnavailable, std::move(message), ""};
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

std::vector<int64_t> Offsets(std::span<const int64_t> lengths) {
  std::vector<int64_t> offsets(1, 0);
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
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
}

RegionWorld::~RegionWorld() {
  region_->inbox(rank_).state.store(RankState::kLeft);
  for (int r = 0; r < world_size(); ++r) {
    Notify(r);
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
  if (const auto found = groups_.find(key); found != groups_.end()) {
    return found->second.get();
  }
  std::vector<bool> seen(static_cast<size_t>(world_size()), false);
  for (int r : key) {
    if (r < 0 || r >= world_size()) {
      return InvalidInput(Text("rank ", r,
                               " of a group is not among the job's ",
                               world_size(), " ranks"));
    }
    if (seen[static_cast<size_t>(r)]) {
      return InvalidInput(Text("rank ", r, " is twice in a group"));
    }
    seen[static_cast<size_t>(r)] = true;
  }
  if (!seen[static_cast<size_t>(rank_)]) {
    return InvalidInput(
        Text("rank ", rank_, " asks for a group that it is not in"));
  }
  auto group = std::make_unique<RegionCommunicator>(*this, key);
  Communicator* result = group.get();
  groups_.emplace(std::move(key), std::move(group));
  return result;
}

void RegionWorld::Abort(std::string_view reason) {
  Fail(Unavailable(Text("rank ", rank_, " aborted: ", reason)));
}

// Publishes `error` as the job's, unless there is one already. The failure of
// this world is what was published first.
Error RegionWorld::Fail(Error error) {
  if (failure_) return *failure_;
  RegionHeader& header = region_->header();
  AbortState none = AbortState::kNone;
  if (header.abort_state.compare_exchange_strong(none, AbortState::kWriting)) {
    header.abort_message.Store(error.message);
    header.abort_state.store(AbortState::kSet);
    for (int r = 0; r < world_size(); ++r) Notify(r);
  } else if (header.abort_state.load() == AbortState::kSet) {
    error = Unavailable(header.abort_message.Load());
  }
  failure_ = error;
  posted_.reset();
  return error;
}

Result<void> RegionWorld::CheckUsable() {
  if (failure_) return *failure_;
  const RegionHeader& header = region_->header();
  if (header.abort_state.load(std::memory_order_acquire) == AbortState::kSet) {
    failure_ = Unavailable(header.abort_message.Load());
    return *failure_;
  }
  return {};
}

void RegionWorld::SetCurrentTask(std::string_view task) {
  region_->inbox(rank_).task.Store(task);
}

std::string RegionWorld::TaskOf(int rank) const {
  const std::string task = region_->inbox(rank).task.Load();
  return task.empty() ? "before its first task" : Text("in task '", task, "'");
}

// ---- Waiting ----------------------------------------------------------------

// The bell is raised before `sleeping` is read, and a sleeper sets `sleeping`
// before it reads the bell, both sequentially consistent: either the sleeper
// sees the new bell or the ringer sees the sleeper.
void RegionWorld::Notify(int rank) {
  Inbox& inbox = region_->inbox(rank);
  inbox.bell.fetch_add(1);
  if (inbox.sleeping.load() != 0 && inbox.sleeping.exchange(0) != 0) {
    FutexWake(inbox.bell);
  }
}

void RegionWorld::Signal(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  region_->inbox(rank).signals[rank_].store(++peer.signals_sent,
                                            std::memory_order_release);
  Notify(rank);
}

bool RegionWorld::HasSignalled(int rank) const {
  return region_->inbox(rank_).signals[rank].load(std::memory_order_acquire) >=
         peers_[static_cast<size_t>(rank)].signals_expected;
}

template <typename Ready, typename Awaited>
Result<void> RegionWorld::Wait(Ready ready, Awaited awaited) {
  MoveMessages();
  for (int i = 0; i < kLooks; ++i) {
    if (ready()) return {};
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    MoveMessages();
    if (ready()) return {};
    sched_yield();
  }
  Inbox& inbox = region_->inbox(rank_);
  const Clock::time_point begin = Clock::now();
  Clock::time_point checked = begin;
  for (;;) {
    inbox.sleeping.store(1);
    const uint32_t bell = inbox.bell.load();
    const bool moved = MoveMessages();
    if (ready()) break;
    TESSERA_RETURN_IF_ERROR(CheckUsable());
    const Clock::time_point now = Clock::now();
    if (now - checked >= std::chrono::milliseconds(90)) {
      checked = now;
      std::optional<Error> trouble = FindTrouble(awaited);
      // What a peer did before its end may be all that was awaited.
      if (ready()) break;
      if (!trouble && std::chrono::duration<double>(now - begin).count() >
                          options_.timeout.seconds()) {
        std::string missing;
        for (int r = 0; r < world_size(); ++r) {
          if (!awaited(r)) continue;
          missing += Text(missing.empty() ? "" : ", ", "rank ", r, " (",
                          TaskOf(r), ")");
        }
        trouble =
            Unavailable(Text("rank ", rank_, " waited longer than ",
                             options_.timeout.seconds(), " s for ", missing));
      }
      if (trouble) {
        TESSERA_RETURN_IF_ERROR(CheckUsable());
        return Fail(*trouble);
      }
    }
    if (!moved) FutexWait(inbox.bell, bell, kHealthInterval);
  }
  inbox.sleeping.store(0);
  return {};
}

template <typename Awaited>
std::optional<Error> RegionWorld::FindTrouble(Awaited awaited) {
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank_) continue;
    const Inbox& inbox = region_->inbox(r);
    if (inbox.state.load() == RankState::kLeft) {
      if (!awaited(r)) continue;
      return Unavailable(Text("rank ", r, " has left the job, and rank ", rank_,
                              " waits for it"));
    }
    if (!watches_processes_ || !IsDead(r)) continue;
    // It may have left between the two looks.
    if (inbox.state.load() == RankState::kLeft) continue;
    return Unavailable(
        Text("rank ", r, " (pid ", inbox.pid.load(), ") died ", TaskOf(r)));
  }
  return std::nullopt;
}

// ---- Messages ---------------------------------------------------------------

int64_t RegionWorld::WriteRing(int to, const std::byte* data, int64_t bytes) {
  Ring& ring = region_->ring(rank_, to);
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
    Notify(to);
    written += n;
  }
  return written;
}

int64_t RegionWorld::ReadRing(int from, std::byte* data, int64_t bytes) {
  Ring& ring = region_->ring(from, rank_);
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
    // then looks at `tail` once more before it sleeps.
    ring.tail.store(tail + static_cast<uint64_t>(n));
    if (ring.backlog.load() != 0) Notify(from);
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
    if (n < left) return moved;
    queue.pop_front();
  }
  if (moved) region_->ring(rank_, to).backlog.store(0);
  return moved;
}

bool RegionWorld::DrainRing(int from) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  Ring& ring = region_->ring(from, rank_);
  bool moved = false;
  for (;;) {
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
    // The posted receive takes the first that matches, straight into place.
    if (posted_ && posted_->from == from && posted_->data != nullptr &&
        posted_->group == header.group && posted_->tag == header.tag &&
        posted_->bytes == header.bytes) {
      message.data = posted_->data;
      posted_->data = nullptr;
    } else {
      message.buffer = std::make_unique_for_overwrite<std::byte[]>(
          static_cast<size_t>(header.bytes));
      message.data = message.buffer.get();
    }
    peer.messages.push_back(std::move(message));
  }
}

bool RegionWorld::MoveMessages() {
  bool moved = false;
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank_) continue;
    if (!peers_[static_cast<size_t>(r)].queue.empty()) moved |= PushQueue(r);
    if (region_->ring(r, rank_).backlog.load() != 0) moved |= DrainRing(r);
  }
  return moved;
}

Result<void> RegionWorld::Flush() {
  Result<void> result = CheckUsable();
  const auto has_queue = [this](int r) {
    return !peers_[static_cast<size_t>(r)].queue.empty();
  };
  if (result) {
    result = Wait(
        [&] {
          MoveMessages();
          for (int r = 0; r < world_size(); ++r) {
            if (has_queue(r)) return false;
          }
          return true;
        },
        has_queue);
  }
  if (result) return result;
  return result.error().At(
      Text("rank ", rank_, ", ", TaskOf(rank_), ", flush"));
}

// ---- The communicator -------------------------------------------------------

RegionCommunicator::RegionCommunicator(RegionWorld& world,
                                       std::vector<int> ranks)
    : world_(world), ranks_(std::move(ranks)) {
  Hash hash;
  for (int r : ranks_) hash.Add(static_cast<uint64_t>(r));
  group_ = hash.value();
  rank_ = static_cast<int>(
      std::find(ranks_.begin(), ranks_.end(), world_.rank_) - ranks_.begin());
}

std::string RegionCommunicator::GroupName() const {
  std::string name;
  for (int r : ranks_) name += Text(name.empty() ? "" : ",", r);
  return Text("{", name, "}");
}

Error RegionCommunicator::Here(Error error, std::string_view operation) const {
  return error.At(Text("rank ", world_.rank_, ", ", world_.TaskOf(world_.rank_),
                       ", ", operation, " of group ", GroupName()));
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
  header.group = group_;
  header.detail = static_cast<uint64_t>(bytes);
  header.bytes = bytes;
  header.rounds = Rounds(bytes, bytes_per_round);
  return header;
}

Result<void> RegionCommunicator::CheckHeaders(const CollectiveHeader& mine,
                                              int64_t& rounds) {
  for (int r : ranks_) {
    const CollectiveHeader& theirs = world_.region_->inbox(r).collective;
    rounds = std::max(rounds, theirs.rounds);
    if (theirs.kind == mine.kind && theirs.group == mine.group &&
        theirs.detail == mine.detail) {
      continue;
    }
    const auto describe = [](const CollectiveHeader& header) {
      return Text(NameOf(header.kind), " of ", header.bytes, " bytes");
    };
    return world_.Fail(InvalidInput(
        Text("ranks disagree: rank ", world_.rank_, " calls ", describe(mine),
             " in group ", GroupName(), ", rank ", r, " ", describe(theirs),
             (theirs.group != mine.group ? " in another group"
              : theirs.kind == mine.kind && theirs.bytes == mine.bytes
                  ? " with other counts, element type or root"
                  : ""))));
  }
  return {};
}

template <typename Stage, typename Consume>
Result<void> RegionCommunicator::RunRounds(CollectiveHeader header, Stage stage,
                                           Consume consume) {
  const auto signal_peers = [&] {
    for (int r : ranks_) {
      if (r == world_.rank_) continue;
      world_.Signal(r);
      ++world_.peers_[static_cast<size_t>(r)].signals_expected;
    }
  };
  const auto pending = [&](int r) {
    return r != world_.rank_ && !world_.HasSignalled(r);
  };
  const auto run = [&]() -> Result<void> {
    TESSERA_RETURN_IF_ERROR(world_.CheckUsable());
    // Any rank may still be reading what the last collective staged.
    const auto none_pending = [&] {
      for (int r = 0; r < world_.world_size(); ++r) {
        if (pending(r)) return false;
      }
      return true;
    };
    TESSERA_RETURN_IF_ERROR(world_.Wait(none_pending, pending));
    world_.region_->inbox(world_.rank_).collective = header;
    int64_t rounds = header.rounds;
    for (int64_t i = 0; i < rounds; ++i) {
      stage(i);
      signal_peers();
      TESSERA_RETURN_IF_ERROR(world_.Wait(none_pending, pending));
      if (i == 0) {
        TESSERA_RETURN_IF_ERROR(CheckHeaders(header, rounds));
      }
      if constexpr (std::is_same_v<decltype(consume(i)), Result<void>>) {
        TESSERA_RETURN_IF_ERROR(consume(i));
      } else {
        consume(i);
      }
    }
    signal_peers();
    return {};
  };
  if (Result<void> result = run(); !result) {
    return Here(result.error(), NameOf(header.kind));
  }
  return {};
}

Result<void> RegionCommunicator::AllReduce(void* data, int64_t count,
                                           DType dtype) {
  if (count < 0) {
    return Here(InvalidInput(Text("negative count ", count)), "all-reduce");
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
  header.detail = Hash().Add(header.detail).Add(uint64_t(dtype)).value();
  return RunRounds(
      header,
      [&](int64_t) {
        CopyToCache(world_.region_->send_half(world_.rank_, 0), data, bytes);
      },
      [&](int64_t) {
        std::vector<const std::byte*> sources;
        for (int r : ranks_) {
          sources.push_back(world_.region_->send_half(r, 0));
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
  header.detail = Hash().Add(header.detail).Add(uint64_t(dtype)).value();
  header.rounds += 1;
  // The elements of rank r's slice of round i.
  const auto slice = [&](int64_t i, int r) -> Piece {
    const Piece round = PieceOf(count, per_round, i);
    const int64_t begin = round.length * r / size();
    const int64_t end = round.length * (r + 1) / size();
    return {round.begin + begin, end - begin};
  };
  const Region& region = *world_.region_;
  const int64_t slot = SlotBytes();
  return RunRounds(
      header,
      [&](int64_t i) {
        for (int r = 0; r < size() && i + 1 < header.rounds; ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i, r);
          CopyToCache(region.send_half(world_.rank_, i) + r * slot,
                      data + piece.begin * element, piece.length * element);
        }
        if (i == 0) return;
        const Piece mine = slice(i - 1, rank_);
        std::byte* const place = data + mine.begin * element;
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? place
                                       : region.send_half(Global(r), i - 1) +
                                             rank_ * slot);
        }
        SumInOrder(sources, place, region.result_half(world_.rank_, i - 1),
                   mine.length, dtype, IsLarge(count * element));
      },
      [&](int64_t i) {
        if (i == 0) return;
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i - 1, r);
          CopyOut(data + piece.begin * element,
                  region.result_half(Global(r), i - 1), piece.length * element,
                  count * element);
        }
      });
}

namespace {

Result<void> CheckLengths(std::span<const int64_t> lengths, int size) {
  if (static_cast<int>(lengths.size()) != size) {
    return InvalidInput(
        Text("got ", lengths.size(), " sizes for a group of ", size));
  }
  for (int64_t length : lengths) {
    if (length < 0) {
      return InvalidInput(Text("negative size ", length));
    }
  }
  return {};
}

int64_t Largest(std::span<const int64_t> lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

}  // namespace

Result<void> RegionCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckLengths(bytes_per_rank, size()); !valid) {
    return Here(valid.error(), "all-gather");
  }
  if (send_bytes != bytes_per_rank[static_cast<size_t>(rank_)]) {
    return Here(InvalidInput(Text("sends ", send_bytes, " bytes, but expects ",
                                  bytes_per_rank[static_cast<size_t>(rank_)],
                                  " from itself")),
                "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  const Region& region = *world_.region_;
  const int64_t per_round = region.half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kAllGather, offsets.back(), per_round);
  header.detail = Hash().Add(bytes_per_rank).value();
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
        CopyToCache(region.send_half(world_.rank_, i), from + piece.begin,
                    piece.length);
      },
      [&](int64_t i) {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(bytes_per_rank[index], per_round, i);
          CopyOut(to + offsets[index] + piece.begin,
                  region.send_half(Global(r), i), piece.length, header.bytes);
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
  const Region& region = *world_.region_;
  const int64_t element = SizeOf(dtype);
  const int64_t slot = SlotBytes();
  const int64_t per_round = slot / element;
  CollectiveHeader header =
      Header(CollectiveKind::kReduceScatter, offsets.back() * element, slot);
  header.detail =
      Hash().Add(counts_per_rank).Add(static_cast<uint64_t>(dtype)).value();
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
          CopyToCache(region.send_half(world_.rank_, i) + r * slot,
                      from + piece.begin * element, piece.length * element);
        }
      },
      [&](int64_t i) {
        const Piece mine = piece_of(i, rank_);
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? from + mine.begin * element
                                       : region.send_half(Global(r), i) +
                                             rank_ * slot);
        }
        SumInOrder(sources, to + i * per_round * element, nullptr, mine.length,
                   dtype, IsLarge(offsets.back() * element));
      });
}

Result<void> RegionCommunicator::AllToAll(const void* send,
                                          std::span<const int64_t> send_bytes,
                                          void* recv,
                                          std::span<const int64_t> recv_bytes) {
  for (const auto& lengths : {send_bytes, recv_bytes}) {
    if (auto valid = CheckLengths(lengths, size()); !valid) {
      return Here(valid.error(), "all-to-all");
    }
  }
  const auto me = static_cast<size_t>(rank_);
  if (send_bytes[me] != recv_bytes[me]) {
    return Here(
        InvalidInput(Text("sends ", send_bytes[me],
                          " bytes to itself, but expects ", recv_bytes[me])),
        "all-to-all");
  }
  const std::vector<int64_t> send_offsets = Offsets(send_bytes);
  const std::vector<int64_t> recv_offsets = Offsets(recv_bytes);
  const Region& region = *world_.region_;
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
          std::copy(send_bytes.begin(), send_bytes.end(),
                    region.inbox(world_.rank_).sizes);
        }
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(send_bytes[index], slot, i);
          CopyToCache(region.send_half(world_.rank_, i) + r * slot,
                      from + send_offsets[index] + piece.begin, piece.length);
        }
      },
      [&](int64_t i) -> Result<void> {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const int64_t sent = region.inbox(Global(r)).sizes[rank_];
          if (i == 0 && sent != recv_bytes[index]) {
            return world_.Fail(
                InvalidInput(Text("ranks disagree: rank ", Global(r), " sends ",
                                  sent, " bytes to rank ", world_.rank_,
                                  ", which expects ", recv_bytes[index])));
          }
          const Piece piece = PieceOf(recv_bytes[index], slot, i);
          CopyOut(to + recv_offsets[index] + piece.begin,
                  region.send_half(Global(r), i) + rank_ * slot, piece.length,
                  recv_offsets.back());
        }
        return {};
      });
}

Result<void> RegionCommunicator::Broadcast(void* data, int64_t bytes,
                                           int root) {
  if (root < 0 || root >= size() || bytes < 0) {
    return Here(InvalidInput(Text("cannot send ", bytes, " bytes from rank ",
                                  root, " of a group of ", size())),
                "broadcast");
  }
  const Region& region = *world_.region_;
  const int64_t per_round = region.half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kBroadcast, bytes, per_round);
  header.detail =
      Hash().Add(header.detail).Add(static_cast<uint64_t>(root)).value();
  auto* const place = static_cast<std::byte*>(data);
  return RunRounds(
      header,
      [&](int64_t i) {
        if (rank_ != root || size() == 1) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyToCache(region.send_half(world_.rank_, i), place + piece.begin,
                    piece.length);
      },
      [&](int64_t i) {
        if (rank_ == root) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyOut(place + piece.begin, region.send_half(Global(root), i),
                piece.length, bytes);
      });
}

Result<void> RegionCommunicator::Barrier() {
  return RunRounds(
      Header(CollectiveKind::kBarrier, 0, 1), [](int64_t) {}, [](int64_t) {});
}

Result<void> RegionCommunicator::Send(const void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (peer < 0 || peer >= size() || bytes < 0) {
    return Here(InvalidInput(Text("cannot send ", bytes, " bytes to rank ",
                                  peer, " of a group of ", size())),
                "send");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "send");
  }
  const auto* const from = static_cast<const std::byte*>(data);
  const int to = Global(peer);
  RegionWorld::Peer& state = world_.peers_[static_cast<size_t>(to)];
  if (peer == rank_) {
    RegionWorld::Message message{group_, tag, bytes, bytes, nullptr, {}};
    message.buffer =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
    message.data = message.buffer.get();
    CopyToCache(message.data, from, bytes);
    state.messages.push_back(std::move(message));
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
  world_.Notify(to);  // it may sleep in another operation, and must drain
  return {};
}

Result<void> RegionCommunicator::Recv(void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (peer < 0 || peer >= size() || bytes < 0) {
    return Here(InvalidInput(Text("cannot receive ", bytes, " bytes from rank ",
                                  peer, " of a group of ", size())),
                "receive");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "receive");
  }
  const int from = Global(peer);
  auto& messages = world_.peers_[static_cast<size_t>(from)].messages;
  auto* const place = static_cast<std::byte*>(data);
  const auto find = [&] {
    return std::find_if(messages.begin(), messages.end(), [&](const auto& m) {
      return m.group == group_ && m.tag == tag;
    });
  };
  auto found = find();
  if (found == messages.end()) {
    world_.posted_ = {from, group_, tag, bytes, place};
    if (bytes == 0) world_.posted_.reset();  // nothing to place
  }
  const auto ready = [&] {
    if (peer != rank_) world_.DrainRing(from);
    if (found == messages.end()) found = find();
    return found != messages.end() &&
           (found->filled == found->bytes || found->bytes != bytes);
  };
  Result<void> result =
      world_.Wait(ready, [&](int r) { return r == from && r != world_.rank_; });
  world_.posted_.reset();
  if (!result) return Here(result.error(), "receive");
  if (found->bytes != bytes) {
    return Here(InvalidInput(Text("rank ", from, " sent ", found->bytes,
                                  " bytes with tag ", tag, ", but ", bytes,
                                  " are expected")),
                "receive");
  }
  if (found->buffer != nullptr) CopyToCache(place, found->buffer.get(), bytes);
  messages.erase(found);
  return {};
}

}  // namespace tessera
