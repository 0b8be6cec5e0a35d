#include "runtime/comm/store_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "planner/base/start_thread.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/socket.h"
#include "runtime/comm/store.h"
#include "runtime/comm/store_wire.h"
#include "runtime/comm/text.h"
#include "runtime/descriptor_limit.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How long a server without file descriptors leaves connections waiting: poll
// would return for them at once, again and again.
constexpr auto kNoDescriptorsPause = std::chrono::milliseconds(100);
// Connections that never finish their greeting are closed after this.
constexpr auto kGreetingTime = std::chrono::seconds(10);
// How long the server stays for ranks that still have something to ask, or to
// be told.
constexpr auto kLingerTime = std::chrono::seconds(5);

class Server : public StoreServer {
 public:
  // `stop`: an eventfd.
  Server(FileDescriptor listener, FileDescriptor stop, std::string job_id,
         int size)
      : listener_(std::move(listener)),
        job_id_(std::move(job_id)),
        size_(size),
        stop_(std::move(stop)) {}
  ~Server() override {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    // Cannot fail: the counter is far from its limit.
    (void)!write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }

  Result<void> Serve() {
    TESSERA_TRY(thread_, StartThread([this] { Run(); }));
    return {};
  }

 private:
  struct Connection {
    FileDescriptor fd;
    std::string in;
    std::string out;
    bool greeted = false;
    bool closing = false;  // close once `out` is sent
    int rank = -1;         // that was welcome
    Clock::time_point since;
  };
  struct Waiter {
    Connection* connection;
    std::string key;
    Clock::time_point deadline;
  };

  void Run() {
    std::optional<Clock::time_point> stopping;
    for (;;) {
      std::vector<pollfd> fds = {{stop_.get(), POLLIN, 0},
                                 {listener_.get(), POLLIN, 0}};
      for (const Connection& c : connections_) {
        const int events = c.out.empty() ? POLLIN : POLLIN | POLLOUT;
        fds.push_back({c.fd.get(), static_cast<short>(events), 0});
      }
      if (stopping) fds[0].fd = -1;  // seen
      if (Clock::now() < accept_again_) fds[1].fd = -1;
      poll(fds.data(), fds.size(), 100);
      if (fds[0].revents != 0) stopping = Clock::now();
      const bool all_told = connections_.empty() && (!end_ || AllCame());
      if (stopping && (all_told || Clock::now() - *stopping > kLingerTime)) {
        return;
      }
      auto fd = fds.begin() + 2;
      for (auto c = connections_.begin(); c != connections_.end(); ++fd) {
        const bool keep = fd->revents == 0 || HandleEvents(*c);
        const bool late =
            !c->greeted && Clock::now() - c->since > kGreetingTime;
        c = keep && !late ? std::next(c) : Drop(c);
      }
      if (fds[1].revents != 0) Accept();
      ExpireWaiters();
    }
  }

  void Accept() {
    FileDescriptor fd(accept4(listener_.get(), nullptr, nullptr,
                              SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.get() < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
          errno == ENOMEM) {
        LackDescriptors(errno);
      }
      return;
    }
    lacking_since_.reset();
    SetNoDelay(fd.get());
    Connection connection;
    connection.fd = std::move(fd);
    connection.since = Clock::now();
    connections_.push_back(std::move(connection));
  }

  // Who connects and says nothing gives its own back in kGreetingTime; half as
  // much again is a choice. Where all have come nobody of the job misses one.
  void LackDescriptors(int error) {
    const Clock::time_point now = Clock::now();
    accept_again_ = now + kNoDescriptorsPause;
    if (!lacking_since_) lacking_since_ = now;
    if (end_ || AllCame() || now - *lacking_since_ < 1.5 * kGreetingTime) {
      return;
    }
    EndJob(Unavailable(
        Text("rank 0 has no file descriptor for a further rank (", came_.size(),
             " of ", size_, " have come): ", std::strerror(error),
             "; raise its ulimit -n")));
  }

  std::list<Connection>::iterator Drop(std::list<Connection>::iterator c) {
    std::erase_if(waiters_,
                  [&](const Waiter& w) { return w.connection == &*c; });
    const int rank = c->rank;
    const auto next = connections_.erase(c);
    if (rank >= 0 && !values_.contains(wire::LeftKey(rank))) TellGone(rank);
    return next;
  }

  // Of the first rank alone: others may have ended for that.
  void TellGone(int rank) {
    const auto there = values_.find(kGoneKey);
    std::string none;
    wire::Append(none, int64_t{0});
    if (there != values_.end() && there->second != none) return;
    std::string gone;
    wire::Append(gone, int64_t{rank} + 1);
    Store(kGoneKey, std::move(gone));
  }

  // False when the connection is to be dropped.
  bool HandleEvents(Connection& c) {
    bool is_open = true;
    char buffer[1 << 16];
    for (;;) {
      const ssize_t n = recv(c.fd.get(), buffer, sizeof(buffer), 0);
      if (n > 0) {
        c.in.append(buffer, static_cast<size_t>(n));
        if (c.in.size() > 2 * wire::kMaxValue)
          break;  // leaves the rest for later
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      is_open = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
      break;
    }
    // What a rank has asked counts though it ended right behind that. Who ends
    // before the greeting is answered has not come.
    if (!is_open && !c.greeted) return false;
    while (!c.closing) {
      size_t used = 0;
      if (!(c.greeted ? HandleRequest(c, used) : HandleGreeting(c, used))) {
        return false;
      }
      if (used == 0) break;
      c.in.erase(0, used);
    }
    return is_open && SendOut(c);
  }

  bool SendOut(Connection& c) {
    while (!c.out.empty()) {
      const ssize_t n =
          send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      c.out.erase(0, static_cast<size_t>(n));
    }
    return !c.closing;
  }

  // These set `used` to the bytes consumed, 0 if more are needed; false for
  // bytes that no client of ours sends.
  bool HandleGreeting(Connection& c, size_t& used) {
    if (c.in.size() >= 8 && wire::Read<uint64_t>(c.in.data()) != wire::kMagic)
      return false;
    if (c.in.size() < wire::kVersionEnd) return true;
    if (wire::Read<uint32_t>(c.in.data() + 8) != wire::kVersion) {
      used = c.in.size();  // its greeting may have another form
      Welcome(c, wire::kOtherJob);
      return true;
    }
    if (c.in.size() < wire::kGreetingBytes) return true;
    const auto length = wire::Read<uint32_t>(c.in.data() + 12);
    const auto rank = wire::Read<int32_t>(c.in.data() + 16);
    const auto size = wire::Read<int32_t>(c.in.data() + 20);
    if (length > wire::kMaxKey || rank < 0 || rank >= size) return false;
    if (c.in.size() < wire::kGreetingBytes + length) return true;
    used = wire::kGreetingBytes + length;
    if (c.in.compare(wire::kGreetingBytes, length, job_id_) != 0) {
      Welcome(c, wire::kOtherJob);
    } else {
      Admit(c, rank, size);
    }
    return true;
  }

  void Welcome(Connection& c, wire::Status status) {
    wire::Append(c.out, wire::kMagic);
    wire::Append(c.out, wire::kVersion);
    wire::Append(c.out, static_cast<uint8_t>(status));
    c.greeted = true;
    c.closing = status != wire::kOk;
  }

  bool AllCame() const { return std::ssize(came_) == size_; }

  // A rank that greets. One of another size is of this job as long as that
  // lacks a rank; where all have come it is a stranger.
  void Admit(Connection& c, int rank, int size) {
    std::optional<Error> refusal = end_;
    if (size != size_ && !refusal) {
      refusal = Disagreement(Text("rank ", rank, " has WORLD_SIZE ", size,
                                  ", rank 0 has ", size_));
      if (!AllCame()) EndJob(*refusal);
    }
    const bool first = rank >= size_ || came_.insert(rank).second;
    if (!refusal) {
      Welcome(c, first ? wire::kOk : wire::kCameBefore);
      if (first) c.rank = rank;
    } else {
      Welcome(c, StatusOf(*refusal));
      wire::Append(c.out, static_cast<uint32_t>(refusal->message.size()));
      c.out += refusal->message;
    }
  }

  static wire::Status StatusOf(const Error& end) {
    return end.code == ErrorCode::kInvalidInput ? wire::kDisagreement
                                                : wire::kNoDescriptors;
  }

  // All that is asked from now on returns `error`.
  void EndJob(const Error& error) {
    end_ = error;
    for (const Waiter& waiter : waiters_) {
      Reply(*waiter.connection, StatusOf(error), error.message);
      SendOut(*waiter.connection);  // a failure shows at the next event
    }
    waiters_.clear();
  }

  bool HandleRequest(Connection& c, size_t& used) {
    if (c.in.size() < wire::kRequestBytes) return true;
    const auto operation = wire::Read<uint8_t>(c.in.data());
    const auto key_length = wire::Read<uint32_t>(c.in.data() + 1);
    const auto value_length = wire::Read<uint32_t>(c.in.data() + 5);
    const auto argument = wire::Read<int64_t>(c.in.data() + 9);
    if (key_length > wire::kMaxKey || value_length > wire::kMaxValue)
      return false;
    if (c.in.size() < wire::kRequestBytes + key_length + value_length)
      return true;
    const std::string key = c.in.substr(wire::kRequestBytes, key_length);
    used = wire::kRequestBytes + key_length + value_length;
    if (end_) {
      Reply(c, StatusOf(*end_), end_->message);
      return true;
    }
    switch (operation) {
      case wire::kSet:
        Reply(c, wire::kOk, "");
        Store(key, c.in.substr(wire::kRequestBytes + key_length, value_length));
        return true;
      case wire::kGet: {
        if (const auto found = values_.find(key); found != values_.end()) {
          Reply(c, wire::kOk, found->second);
        } else {
          // At most about three years, so that the sum cannot overflow.
          const int64_t wait =
              std::clamp<int64_t>(argument, 0, int64_t{1} << 36);
          waiters_.push_back(
              {&c, key, Clock::now() + std::chrono::milliseconds(wait)});
        }
        return true;
      }
      case wire::kAdd: {
        int64_t sum = argument;
        if (const auto found = values_.find(key); found != values_.end()) {
          if (found->second.size() != sizeof(sum)) return false;
          sum =
              static_cast<int64_t>(static_cast<uint64_t>(argument) +
                                   wire::Read<uint64_t>(found->second.data()));
        }
        std::string bytes;
        wire::Append(bytes, sum);
        Reply(c, wire::kOk, bytes);
        Store(key, bytes);
        return true;
      }
      default:
        return false;
    }
  }

  void Store(const std::string& key, std::string value) {
    for (const Waiter& waiter : waiters_) {
      if (waiter.key != key) continue;
      Reply(*waiter.connection, wire::kOk, value);
      SendOut(*waiter.connection);  // a failure shows at the next event
    }
    std::erase_if(waiters_, [&](const Waiter& w) { return w.key == key; });
    values_[key] = std::move(value);
  }

  void Reply(Connection& c, wire::Status status, std::string_view value) {
    wire::Append(c.out, static_cast<uint8_t>(status));
    wire::Append(c.out, static_cast<uint32_t>(value.size()));
    c.out += value;
  }

  void ExpireWaiters() {
    const Clock::time_point now = Clock::now();
    std::erase_if(waiters_, [&](const Waiter& waiter) {
      if (waiter.deadline > now) return false;
      Reply(*waiter.connection, wire::kTimeout, "");
      SendOut(*waiter.connection);
      return true;
    });
  }

  FileDescriptor listener_;
  const std::string job_id_;
  const int size_;
  std::set<int> came_;        // ranks that have greeted
  std::optional<Error> end_;  // of a job that has ended
  Clock::time_point accept_again_;
  std::optional<Clock::time_point> lacking_since_;  // descriptors
  FileDescriptor stop_;
  std::list<Connection> connections_;
  std::vector<Waiter> waiters_;
  std::map<std::string, std::string> values_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::Start(FileDescriptor listener,
                                                        std::string job_id,
                                                        int size) {
  RaiseDescriptorLimit(size);  // each rank takes one
  FileDescriptor stop(eventfd(0, EFD_CLOEXEC));
  if (!stop.is_open()) {
    return Unavailable(
        Text("rank 0 has no file descriptor for the job's store: ",
             std::strerror(errno), "; raise its ulimit -n"));
  }
  fcntl(listener.get(), F_SETFL, O_NONBLOCK);
  auto server = std::make_unique<Server>(std::move(listener), std::move(stop),
                                         std::move(job_id), size);
  TESSERA_RETURN_IF_ERROR(server->Serve());
  return std::unique_ptr<StoreServer>(std::move(server));
}

}  // namespace tessera
