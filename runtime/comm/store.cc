#include "runtime/comm/store.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// On the wire, integers in the byte order of the host (ranks of one job run
// one binary):
//   greeting  magic u64, version u32, length u32, rank i32, size i32, job id
//   welcome   magic u64, version u32, status u8; and of a job that has ended
//             length u32, text
//   request   operation u8, key length u32, value length u32, argument i64,
//             key, value
//   reply     status u8, length u32, value (of a job that has ended why)
// `argument` is the delta of an add and the timeout of a get in milliseconds.

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x0041524553534554;  // "TESSERA\0"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMaxKey = 256;
constexpr uint32_t kMaxValue = 1 << 20;
constexpr size_t kVersionEnd = 12;  // of a greeting; the same in all versions
constexpr size_t kGreetingBytes = 24;
constexpr size_t kWelcomeBytes = 13;
constexpr size_t kRequestBytes = 17;
constexpr size_t kReplyBytes = 5;
// How much longer than the server's clock a client waits for a value; less
// where it waits less for any answer.
constexpr auto kGrace = std::chrono::seconds(10);
// How often waits look whether they are to stop.
constexpr auto kStopInterval = std::chrono::milliseconds(100);
// How long a server without file descriptors leaves connections waiting: poll
// would return for them at once, again and again.
constexpr auto kNoDescriptorsPause = std::chrono::milliseconds(100);
// Connections that never finish their greeting are closed after this.
constexpr auto kGreetingTime = std::chrono::seconds(10);
// A store welcomes at once: who says nothing for so long is none. But a
// launcher's socket listens before rank 0, which a busy host delays, serves it.
constexpr auto kWelcomeTime = std::chrono::seconds(30);
// Of one attempt; a host that is not there answers none.
constexpr auto kConnectTime = std::chrono::seconds(5);
// How long the server stays for ranks that still have something to ask, or to
// be told.
constexpr auto kLingerTime = std::chrono::seconds(5);

enum Operation : uint8_t { kSet = 1, kGet = 2, kAdd = 3 };
enum Status : uint8_t {
  kOk = 0,
  kTimeout = 1,
  kOtherJob = 2,
  kCameBefore = 3,
  kDisagreement = 4,   // ends the job with kInvalidInput
  kNoDescriptors = 5,  // with kUnavailable
};

template <typename T>
void Append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T Read(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

std::chrono::milliseconds Milliseconds(Duration duration) {
  return std::chrono::milliseconds(duration.picoseconds / 1'000'000'000);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  // It then belongs to the caller.
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

enum class Event { kReady, kLate, kStopped };

// Waits until poll has one of `events` of `fd`. A deadline that is over makes
// it a look.
Event Await(int fd, short events, Clock::time_point deadline,
            const std::atomic<bool>* stop) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::clamp<Clock::duration>(deadline - Clock::now(), Clock::duration(),
                                    kStopInterval));
    pollfd polled = {fd, events, 0};
    if (poll(&polled, 1, static_cast<int>(left.count())) > 0) {
      return Event::kReady;
    }
    if (Clock::now() >= deadline) return Event::kLate;
    if (stop != nullptr && stop->load()) return Event::kStopped;
  }
}

Error Interrupted(int rank, std::string_view who) {
  return {ErrorCode::kInterrupted,
          Text("interrupted as rank ", rank, " waited for ", who), ""};
}

// Descriptors that the system gives to who asks: each rank of a job takes one
// of rank 0's.
void RaiseDescriptorLimit(int ranks) {
  constexpr rlim_t kOthers = 256;  // files and sockets: a choice
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = static_cast<rlim_t>(ranks) + kOthers;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);  // fails harmlessly
}

void SetNoDelay(int fd) {
  const int on = 1;  // fails harmlessly on what is no TCP socket
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// ---- The server -------------------------------------------------------------

class Server {
 public:
  Server(FileDescriptor listener, std::string job_id, int size)
      : listener_(std::move(listener)),
        job_id_(std::move(job_id)),
        size_(size),
        stop_(eventfd(0, EFD_CLOEXEC)) {
    fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
    RaiseDescriptorLimit(size);
    thread_ = std::thread([this] { Serve(); });
  }
  ~Server() {
    const uint64_t one = 1;
    if (write(stop_.get(), &one, sizeof(one)) < 0) {
      // Cannot fail: the counter is far from its limit.
    }
    thread_.join();
  }

 private:
  struct Connection {
    FileDescriptor fd;
    std::string in;
    std::string out;
    bool greeted = false;
    bool closing = false;  // close once `out` is sent
    Clock::time_point since;
  };
  struct Waiter {
    Connection* connection;
    std::string key;
    Clock::time_point deadline;
  };

  void Serve() {
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
    return connections_.erase(c);
  }

  // False when the connection is to be dropped.
  bool HandleEvents(Connection& c) {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t n = recv(c.fd.get(), buffer, sizeof(buffer), 0);
      if (n > 0) {
        c.in.append(buffer, static_cast<size_t>(n));
        if (c.in.size() > 2 * kMaxValue) break;  // leaves the rest for later
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      return false;
    }
    while (!c.closing) {
      size_t used = 0;
      if (!(c.greeted ? HandleRequest(c, used) : HandleGreeting(c, used))) {
        return false;
      }
      if (used == 0) break;
      c.in.erase(0, used);
    }
    return SendOut(c);
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
    if (c.in.size() >= 8 && Read<uint64_t>(c.in.data()) != kMagic) return false;
    if (c.in.size() < kVersionEnd) return true;
    if (Read<uint32_t>(c.in.data() + 8) != kVersion) {
      used = c.in.size();  // its greeting may have another form
      Welcome(c, kOtherJob);
      return true;
    }
    if (c.in.size() < kGreetingBytes) return true;
    const auto length = Read<uint32_t>(c.in.data() + 12);
    const auto rank = Read<int32_t>(c.in.data() + 16);
    const auto size = Read<int32_t>(c.in.data() + 20);
    if (length > kMaxKey || rank < 0 || rank >= size) return false;
    if (c.in.size() < kGreetingBytes + length) return true;
    used = kGreetingBytes + length;
    if (c.in.compare(kGreetingBytes, length, job_id_) != 0) {
      Welcome(c, kOtherJob);
    } else {
      Admit(c, rank, size);
    }
    return true;
  }

  void Welcome(Connection& c, Status status) {
    Append(c.out, kMagic);
    Append(c.out, kVersion);
    Append(c.out, static_cast<uint8_t>(status));
    c.greeted = true;
    c.closing = status != kOk;
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
      Welcome(c, first ? kOk : kCameBefore);
    } else {
      Welcome(c, StatusOf(*refusal));
      Append(c.out, static_cast<uint32_t>(refusal->message.size()));
      c.out += refusal->message;
    }
  }

  static Status StatusOf(const Error& end) {
    return end.code == ErrorCode::kInvalidInput ? kDisagreement
                                                : kNoDescriptors;
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
    if (c.in.size() < kRequestBytes) return true;
    const auto operation = Read<uint8_t>(c.in.data());
    const auto key_length = Read<uint32_t>(c.in.data() + 1);
    const auto value_length = Read<uint32_t>(c.in.data() + 5);
    const auto argument = Read<int64_t>(c.in.data() + 9);
    if (key_length > kMaxKey || value_length > kMaxValue) return false;
    if (c.in.size() < kRequestBytes + key_length + value_length) return true;
    const std::string key = c.in.substr(kRequestBytes, key_length);
    used = kRequestBytes + key_length + value_length;
    if (end_) {
      Reply(c, StatusOf(*end_), end_->message);
      return true;
    }
    switch (operation) {
      case kSet:
        Reply(c, kOk, "");
        Store(key, c.in.substr(kRequestBytes + key_length, value_length));
        return true;
      case kGet: {
        if (const auto found = values_.find(key); found != values_.end()) {
          Reply(c, kOk, found->second);
        } else {
          // At most about three years, so that the sum cannot overflow.
          const int64_t wait =
              std::clamp<int64_t>(argument, 0, int64_t{1} << 36);
          waiters_.push_back(
              {&c, key, Clock::now() + std::chrono::milliseconds(wait)});
        }
        return true;
      }
      case kAdd: {
        int64_t sum = argument;
        if (const auto found = values_.find(key); found != values_.end()) {
          if (found->second.size() != sizeof(sum)) return false;
          sum = static_cast<int64_t>(static_cast<uint64_t>(argument) +
                                     Read<uint64_t>(found->second.data()));
        }
        std::string bytes;
        Append(bytes, sum);
        Reply(c, kOk, bytes);
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
      Reply(*waiter.connection, kOk, value);
      SendOut(*waiter.connection);  // a failure shows at the next event
    }
    std::erase_if(waiters_, [&](const Waiter& w) { return w.key == key; });
    values_[key] = std::move(value);
  }

  void Reply(Connection& c, Status status, std::string_view value) {
    Append(c.out, static_cast<uint8_t>(status));
    Append(c.out, static_cast<uint32_t>(value.size()));
    c.out += value;
  }

  void ExpireWaiters() {
    const Clock::time_point now = Clock::now();
    std::erase_if(waiters_, [&](const Waiter& waiter) {
      if (waiter.deadline > now) return false;
      Reply(*waiter.connection, kTimeout, "");
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

// ---- The client -------------------------------------------------------------

// The error that a job ended with, if that is what a status says.
std::optional<Error> EndOf(uint8_t status, const std::string& text) {
  if (status == kDisagreement) return InvalidInput(text);
  if (status == kNoDescriptors) return Unavailable(text);
  return std::nullopt;
}

class Client : public Store {
 public:
  Client(FileDescriptor fd, const StoreOptions& options, std::string address,
         Clock::time_point deadline)
      : Store(options, deadline),
        fd_(std::move(fd)),
        rank_(options.rank),
        address_(std::move(address)) {}

  // Ends after the connection to it, with this object.
  void Own(std::unique_ptr<Server> server) { server_ = std::move(server); }

  // Whether this rank is welcome; false where who listens closes the
  // connection.
  Result<bool> Greet(const StoreOptions& options) {
    std::string greeting;
    Append(greeting, kMagic);
    Append(greeting, kVersion);
    Append(greeting, static_cast<uint32_t>(options.job_id.size()));
    Append(greeting, int32_t{options.rank});
    Append(greeting, int32_t{options.size});
    greeting += options.job_id;
    if (!Write(greeting)) return false;
    const auto deadline = std::min(deadline_, Clock::now() + kWelcomeTime);
    switch (Fill(kWelcomeBytes, deadline)) {
      case Filled::kYes:
        break;
      case Filled::kLost:
        return false;
      case Filled::kStopped:
        return Interrupted(rank_, kRankZero);
      case Filled::kLate:
        return Stranger("what listens",
                        "says nothing, unlike a store of Tessera");
    }
    const std::string welcome = Take(kWelcomeBytes);
    if (Read<uint64_t>(welcome.data()) != kMagic) {
      return Stranger("what listens", "is not a store of Tessera");
    }
    const auto status = static_cast<uint8_t>(welcome[12]);
    if (status == kOk) return true;
    if (status == kCameBefore) {
      return Stranger("the store", Text("has met a rank ", options.rank,
                                        " already and may be another job's"));
    }
    if (EndOf(status, "")) {
      if (Fill(sizeof(uint32_t), deadline) != Filled::kYes) return false;
      const auto length = Read<uint32_t>(Take(sizeof(uint32_t)).data());
      const size_t bytes = std::min(length, kMaxValue);
      if (Fill(bytes, deadline) != Filled::kYes) return false;
      return *EndOf(status, Take(bytes));
    }
    return Stranger("the store", "serves another job or another version");
  }

  Result<void> Set(std::string_view key, std::string_view value) override {
    auto reply = Request(kSet, key, value, 0,
                         Clock::now() + Milliseconds(timeout_), kRankZero);
    if (!reply) return reply.error();
    return {};
  }

  Result<std::string> Get(std::string_view key, Duration timeout,
                          std::string_view what, bool& late) override {
    late = false;
    const auto wait = Milliseconds(timeout);
    const auto answer = Milliseconds(timeout_);
    const Clock::duration longest = std::max<Clock::duration>(
        answer, wait + std::min<Clock::duration>(kGrace, answer));
    TESSERA_TRY(Reply reply, Request(kGet, key, "", wait.count(),
                                     Clock::now() + longest, what));
    if (reply.status != kTimeout) return std::move(reply.value);
    late = true;
    return Unavailable(Text("waited ", static_cast<double>(wait.count()) / 1e3,
                            " s in vain for ", what, " (the job's store is at ",
                            address_, ")"));
  }

  Result<int64_t> Add(std::string_view key, int64_t delta) override {
    TESSERA_TRY(const Reply reply,
                Request(kAdd, key, "", delta,
                        Clock::now() + Milliseconds(timeout_), kRankZero));
    return SumOf(reply);
  }

  Result<std::optional<int64_t>> Poll(std::string_view key,
                                      int64_t delta) override {
    if (failure_) return *failure_;
    auto question = std::ranges::find(questions_, key, &Question::key);
    if (question == questions_.end()) {
      TESSERA_RETURN_IF_ERROR(Send(kAdd, key, "", delta));
      question = questions_.insert(question, {std::string(key), {}});
    }
    TESSERA_TRY([[maybe_unused]] const bool all,
                ReadAnswers(Clock::time_point(), kRankZero));
    const std::optional<int64_t> answer = question->answer;
    if (answer) questions_.erase(question);
    return answer;
  }

 private:
  static constexpr std::string_view kRankZero = "rank 0";

  struct Reply {
    uint8_t status = kOk;
    std::string value;
  };
  // What Poll asked.
  struct Question {
    std::string key;
    std::optional<int64_t> answer;
  };

  // For this request and all that follow: the answer to this one could come
  // behind it.
  Error Break(const Error& error) {
    failure_ = error;
    return error;
  }
  Error Break(std::string_view why) {
    return Break(StoreOfRankZero(address_, why));
  }

  // At the address is something else than this job's store.
  Error Stranger(std::string_view who, std::string_view what) const {
    return Unavailable(
        Text(who, " at ", address_, " ", what, "; choose another MASTER_PORT"));
  }

  Result<Reply> Request(Operation operation, std::string_view key,
                        std::string_view value, int64_t argument,
                        Clock::time_point deadline, std::string_view what) {
    TESSERA_RETURN_IF_ERROR(Send(operation, key, value, argument));
    TESSERA_TRY(const bool answered, ReadAnswers(deadline, what));
    std::optional<Reply> reply;
    if (answered) {
      TESSERA_TRY(reply, ReadReply(deadline, what));
    }
    if (!reply) return Break("does not answer");
    if (const auto end = EndOf(reply->status, reply->value)) return *end;
    return *std::move(reply);
  }

  Result<void> Send(Operation operation, std::string_view key,
                    std::string_view value, int64_t argument) {
    if (failure_) return *failure_;
    if (key.size() > kMaxKey || value.size() > kMaxValue) {
      return InvalidInput(Text("key of ", key.size(), " bytes (at most ",
                               kMaxKey, ") or value of ", value.size(),
                               " bytes (at most ", kMaxValue, ")"));
    }
    std::string request;
    Append(request, static_cast<uint8_t>(operation));
    Append(request, static_cast<uint32_t>(key.size()));
    Append(request, static_cast<uint32_t>(value.size()));
    Append(request, argument);
    request += key;
    request += value;
    if (!Write(request)) return Break("connection lost");
    return {};
  }

  // Answers come in the order of what was asked. Whether all that Poll asked
  // are there before the deadline.
  Result<bool> ReadAnswers(Clock::time_point deadline, std::string_view what) {
    for (Question& question : questions_) {
      if (question.answer) continue;
      TESSERA_TRY(const std::optional<Reply> reply, ReadReply(deadline, what));
      if (!reply) return false;
      if (const auto end = EndOf(reply->status, reply->value)) {
        return Break(*end);
      }
      TESSERA_TRY(question.answer, SumOf(*reply));
    }
    return true;
  }

  // The next one; nothing where it is not whole before the deadline. What has
  // come of it is kept for a later call.
  Result<std::optional<Reply>> ReadReply(Clock::time_point deadline,
                                         std::string_view what) {
    if (failure_) return *failure_;
    Filled filled = Fill(kReplyBytes, deadline);
    uint32_t length = 0;
    if (filled == Filled::kYes) {
      length = Read<uint32_t>(in_.data() + 1);
      if (length > kMaxValue) return Break("it answered nonsense");
      filled = Fill(kReplyBytes + length, deadline);
    }
    switch (filled) {
      case Filled::kYes:
        break;
      case Filled::kLost:
        return Break("connection lost");
      case Filled::kStopped:
        return Break(Interrupted(rank_, what));
      case Filled::kLate:
        return std::optional<Reply>();
    }
    const std::string head = Take(kReplyBytes);
    return std::optional<Reply>({static_cast<uint8_t>(head[0]), Take(length)});
  }

  Result<int64_t> SumOf(const Reply& reply) {
    if (reply.value.size() != sizeof(int64_t)) {
      return Break("it answered nonsense");
    }
    return Read<int64_t>(reply.value.data());
  }

  bool Write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n =
          send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  enum class Filled { kYes, kLate, kStopped, kLost };

  // Receives until `in_` has so many bytes.
  Filled Fill(size_t bytes, Clock::time_point deadline) {
    while (in_.size() < bytes) {
      const Event event = Await(fd_.get(), POLLIN, deadline, stop_);
      if (event == Event::kLate) return Filled::kLate;
      if (event == Event::kStopped) return Filled::kStopped;
      char buffer[1 << 12];
      const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return Filled::kLost;
      in_.append(buffer, static_cast<size_t>(n));
    }
    return Filled::kYes;
  }

  // REQUIRES: `in_` has so many.
  std::string Take(size_t bytes) {
    std::string taken = in_.substr(0, bytes);
    in_.erase(0, bytes);
    return taken;
  }

  std::unique_ptr<Server> server_;  // on rank 0; closed after fd_
  FileDescriptor fd_;
  const int rank_;
  const std::string address_;
  std::string in_;  // received and not yet taken
  std::vector<Question> questions_;
  std::optional<Error> failure_;
};

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

// `host`: that of the options, or null for all addresses of this host.
Result<void> Resolve(const StoreOptions& options, const char* host,
                     AddressList& list) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;  // passive: if host is null
  const int status = getaddrinfo(host, std::to_string(options.port).c_str(),
                                 &hints, &list.first);
  if (status == 0) return {};
  return Unavailable(Text("cannot find the host '", options.host,
                          "' of rank 0: ", gai_strerror(status)));
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(
        &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(address);
  return address->sa_family == AF_INET &&
         ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

// Whether `host` is a loopback address here but another one elsewhere: in
// Debian's /etc/hosts the host's own name is 127.0.1.1.
bool IsLoopbackOnlyHere(std::string_view host, const AddressList& list) {
  const bool everywhere =
      host == "localhost" || host.starts_with("localhost.") ||
      host.ends_with(".localhost") || host == "ip6-localhost" ||
      host.starts_with("127.") || host == "::1";
  if (everywhere) return false;
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    if (IsLoopback(a->ai_addr)) return true;
  }
  return false;
}

Result<FileDescriptor> Listen(const StoreOptions& options) {
  AddressList named, all;
  TESSERA_RETURN_IF_ERROR(Resolve(options, options.host.c_str(), named));
  const bool everywhere = IsLoopbackOnlyHere(options.host, named);
  if (everywhere) TESSERA_RETURN_IF_ERROR(Resolve(options, nullptr, all));
  int error = 0;
  for (const addrinfo* a = everywhere ? all.first : named.first; a != nullptr;
       a = a->ai_next) {
    FileDescriptor fd(
        socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int on =
        1;  // a port left by an earlier job may still be in TIME_WAIT
    if (fd.get() >= 0 &&
        setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    error = errno;
  }
  return Unavailable(
      Text("rank 0 cannot serve the job's store at ", options.host, ":",
           options.port, ": ", std::strerror(error),
           error == EADDRINUSE ? "; choose another MASTER_PORT" : ""));
}

// Whether a connection is one to itself, as TCP makes it where nobody listens
// on a port of this host that the system then picks for who connects: rank 0
// could not listen there any more.
bool IsItsOwnPeer(int fd) {
  sockaddr_storage own = {};
  sockaddr_storage peer = {};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) ==
             0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

// One attempt. An empty result: nobody listens yet.
Result<FileDescriptor> ConnectOnce(const StoreOptions& options,
                                   Clock::time_point deadline, int& error) {
  AddressList list;
  TESSERA_RETURN_IF_ERROR(Resolve(options, options.host.c_str(), list));
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    FileDescriptor fd(socket(a->ai_family,
                             a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                             a->ai_protocol));
    if (fd.get() < 0) {
      error = errno;
      continue;
    }
    error = connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      const auto patience = std::min(deadline, Clock::now() + kConnectTime);
      if (Await(fd.get(), POLLOUT, patience, options.stop) != Event::kReady) {
        error = ETIMEDOUT;
      } else {
        socklen_t length = sizeof(error);
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error == 0 && IsItsOwnPeer(fd.get())) {
      // At once, without TIME_WAIT, in which rank 0 could not listen there.
      const linger reset = {1, 0};
      setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      error = ECONNREFUSED;
    }
    if (error != 0) continue;
    fcntl(fd.get(), F_SETFL, 0);  // blocking from here on
    SetNoDelay(fd.get());
    return fd;
  }
  return FileDescriptor();
}

}  // namespace

Result<std::unique_ptr<Store>> Store::Open(const StoreOptions& options) {
  if (options.job_id.size() > kMaxKey) {
    return InvalidInput(Text("the job id is longer than ", kMaxKey, " bytes"));
  }
  std::unique_ptr<Server> server;
  if (options.rank == 0) {
    FileDescriptor listener(options.listen_fd);
    if (options.listen_fd < 0) {
      TESSERA_TRY(listener, Listen(options));
    }
    server = std::make_unique<Server>(std::move(listener), options.job_id,
                                      options.size);
  }
  const std::string address = Text(options.host, ":", options.port);
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = begin + Milliseconds(options.timeout);
  bool told = false;
  for (;;) {
    int error = 0;
    TESSERA_TRY(FileDescriptor fd, ConnectOnce(options, deadline, error));
    std::string trouble = std::strerror(error);
    if (fd.get() >= 0) {
      auto client =
          std::make_unique<Client>(std::move(fd), options, address, deadline);
      TESSERA_TRY(const bool welcome, client->Greet(options));
      if (welcome) {
        client->Own(std::move(server));
        return std::unique_ptr<Store>(std::move(client));
      }
      // An earlier job's store that is ending, or another protocol.
      trouble = "who listens there closes the connection";
    }
    if (options.stop != nullptr && options.stop->load()) {
      return Interrupted(options.rank, "rank 0");
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return Unavailable(Text("cannot reach rank 0 at ", address, " within ",
                              options.timeout.seconds(), " s: ", trouble));
    }
    if (!told && options.waiting &&
        now - begin >= Milliseconds(options.patience)) {
      told = true;
      options.waiting("rank 0");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

Result<void> Store::Barrier(std::string_view name, int count,
                            Duration timeout) {
  TESSERA_TRY(const int64_t arrived, Add(Text("barrier/", name), 1));
  const std::string done = Text("barrier/", name, "/done");
  if (arrived == count) {
    TESSERA_RETURN_IF_ERROR(Set(done, ""));
  }
  if (auto all = Get(done, timeout, Text("all ", count, " ranks")); !all) {
    return all.error();
  }
  return {};
}

Result<ListeningSocket> ListenOnLoopback() {
  FileDescriptor fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (fd.get() < 0 || bind(fd.get(), generic, length) != 0 ||
      listen(fd.get(), SOMAXCONN) != 0 ||
      getsockname(fd.get(), generic, &length) != 0) {
    return Unavailable(Text("cannot listen on the loopback interface: ",
                            std::strerror(errno)));
  }
  return ListeningSocket{fd.Release(), ntohs(address.sin_port)};
}

}  // namespace tessera
