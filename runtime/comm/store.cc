#include "runtime/comm/store.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "planner/base/file_descriptor.h"
#include "runtime/comm/deadline.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/socket.h"
#include "runtime/comm/store_server.h"
#include "runtime/comm/store_wire.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How much longer than the server's clock a client waits for a value; less
// where it waits less for any answer.
constexpr auto kGrace = std::chrono::seconds(10);
// A store welcomes at once: who says nothing for so long is none. But a
// launcher's socket listens before rank 0, which a busy host delays, serves it.
constexpr auto kWelcomeTime = std::chrono::seconds(30);
// Rank 0 may have ended, or hang.
constexpr auto kGoodbyeTime = std::chrono::seconds(1);
// Between attempts to reach rank 0; longer where they ask the servers of names.
constexpr auto kAttemptPause = std::chrono::milliseconds(20);
constexpr auto kNamePause = std::chrono::seconds(1);

Error Interrupted(int rank, std::string_view who) {
  return {ErrorCode::kInterrupted,
          Text("interrupted as rank ", rank, " waited for ", who), ""};
}

// The error that a job ended with, if that is what a status says.
std::optional<Error> EndOf(uint8_t status, const std::string& text) {
  if (status == wire::kDisagreement) return InvalidInput(text);
  if (status == wire::kNoDescriptors) return Unavailable(text);
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

  ~Client() override {
    if (!welcome_) return;
    // An interrupted wait leaves the connection well.
    if (failure_ && failure_->code != ErrorCode::kInterrupted) return;
    failure_.reset();
    stop_ = nullptr;
    (void)Request(wire::kSet, wire::LeftKey(rank_), "", 0,
                  Clock::now() + kGoodbyeTime, kRankZero);
  }

  // Ends after the connection to it, with this object.
  void Own(std::unique_ptr<StoreServer> server) { server_ = std::move(server); }

  // Whether this rank is welcome; false where who listens closes the
  // connection.
  Result<bool> Greet(const StoreOptions& options) {
    wire::Append(out_, wire::kMagic);
    wire::Append(out_, wire::kVersion);
    wire::Append(out_, static_cast<uint32_t>(options.job_id.size()));
    wire::Append(out_, int32_t{options.rank});
    wire::Append(out_, int32_t{options.size});
    out_ += options.job_id;
    const auto deadline = std::min(deadline_, Clock::now() + kWelcomeTime);
    switch (Fill(wire::kWelcomeBytes, deadline)) {
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
    const std::string welcome = Take(wire::kWelcomeBytes);
    if (wire::Read<uint64_t>(welcome.data()) != wire::kMagic) {
      return Stranger("what listens", "is not a store of Tessera");
    }
    const auto status = static_cast<uint8_t>(welcome[12]);
    welcome_ = status == wire::kOk;
    if (welcome_) return true;
    if (status == wire::kCameBefore) {
      return Stranger("the store", Text("has met a rank ", options.rank,
                                        " already and may be another job's"));
    }
    if (EndOf(status, "")) {
      if (Fill(sizeof(uint32_t), deadline) != Filled::kYes) return false;
      const auto length = wire::Read<uint32_t>(Take(sizeof(uint32_t)).data());
      const size_t bytes = std::min(length, wire::kMaxValue);
      if (Fill(bytes, deadline) != Filled::kYes) return false;
      return *EndOf(status, Take(bytes));
    }
    return Stranger("the store", "serves another job or another version");
  }

  Result<void> Set(std::string_view key, std::string_view value) override {
    auto reply = Request(wire::kSet, key, value, 0,
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
    TESSERA_TRY(Reply reply, Request(wire::kGet, key, "", wait.count(),
                                     Clock::now() + longest, what));
    if (reply.status != wire::kTimeout) return std::move(reply.value);
    late = true;
    return Unavailable(Text("waited ", static_cast<double>(wait.count()) / 1e3,
                            " s in vain for ", what, " (the job's store is at ",
                            address_, ")"));
  }

  Result<int64_t> Add(std::string_view key, int64_t delta) override {
    TESSERA_TRY(const Reply reply,
                Request(wire::kAdd, key, "", delta,
                        Clock::now() + Milliseconds(timeout_), kRankZero));
    return SumOf(reply);
  }

  Result<std::optional<int64_t>> Poll(std::string_view key,
                                      int64_t delta) override {
    if (failure_) return *failure_;
    auto question = std::ranges::find(questions_, key, &Question::key);
    if (question == questions_.end()) {
      TESSERA_RETURN_IF_ERROR(Send(wire::kAdd, key, "", delta));
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
    uint8_t status = wire::kOk;
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

  Result<Reply> Request(wire::Operation operation, std::string_view key,
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

  // Does not wait: what rank 0 does not take yet is sent with what follows.
  Result<void> Send(wire::Operation operation, std::string_view key,
                    std::string_view value, int64_t argument) {
    if (failure_) return *failure_;
    if (key.size() > wire::kMaxKey || value.size() > wire::kMaxValue) {
      return InvalidInput(Text("key of ", key.size(), " bytes (at most ",
                               wire::kMaxKey, ") or value of ", value.size(),
                               " bytes (at most ", wire::kMaxValue, ")"));
    }
    wire::Append(out_, static_cast<uint8_t>(operation));
    wire::Append(out_, static_cast<uint32_t>(key.size()));
    wire::Append(out_, static_cast<uint32_t>(value.size()));
    wire::Append(out_, argument);
    out_ += key;
    out_ += value;
    if (!SendOut()) return Break("connection lost");
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
    Filled filled = Fill(wire::kReplyBytes, deadline);
    uint32_t length = 0;
    if (filled == Filled::kYes) {
      length = wire::Read<uint32_t>(in_.data() + 1);
      if (length > wire::kMaxValue) return Break("it answered nonsense");
      filled = Fill(wire::kReplyBytes + length, deadline);
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
    const std::string head = Take(wire::kReplyBytes);
    return std::optional<Reply>({static_cast<uint8_t>(head[0]), Take(length)});
  }

  Result<int64_t> SumOf(const Reply& reply) {
    if (reply.value.size() != sizeof(int64_t)) {
      return Break("it answered nonsense");
    }
    return wire::Read<int64_t>(reply.value.data());
  }

  // As much as rank 0 takes now; false where the connection is lost.
  bool SendOut() {
    while (!out_.empty()) {
      const ssize_t n = send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      out_.erase(0, static_cast<size_t>(n));
    }
    return true;
  }

  enum class Filled { kYes, kLate, kStopped, kLost };

  // Sends what is left, and receives until `in_` has so many bytes.
  Filled Fill(size_t bytes, Clock::time_point deadline) {
    while (in_.size() < bytes) {
      if (!SendOut()) return Filled::kLost;
      const int events = out_.empty() ? POLLIN : POLLIN | POLLOUT;
      const Event event =
          Await(fd_.get(), static_cast<short>(events), deadline, stop_);
      if (event == Event::kLate) return Filled::kLate;
      if (event == Event::kStopped) return Filled::kStopped;
      char buffer[1 << 12];
      const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
      if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK))
        continue;
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

  std::unique_ptr<StoreServer> server_;  // on rank 0; closed after fd_
  FileDescriptor fd_;                    // does not block
  const int rank_;
  const std::string address_;
  bool welcome_ = false;
  std::string out_;  // to be sent
  std::string in_;   // received and not yet taken
  std::vector<Question> questions_;
  std::optional<Error> failure_;
};

}  // namespace

Result<std::unique_ptr<Store>> Store::Open(const StoreOptions& options) {
  if (options.job_id.size() > wire::kMaxKey) {
    return InvalidInput(
        Text("the job id is longer than ", wire::kMaxKey, " bytes"));
  }
  Endpoint endpoint = {options.host, options.port};
  const auto serve = [&](FileDescriptor listener) {
    return StoreServer::Start(std::move(listener), options.job_id,
                              options.size);
  };
  std::unique_ptr<StoreServer> server;
  if (options.rank == 0 && options.listen_fd >= 0) {
    TESSERA_TRY(server, serve(FileDescriptor(options.listen_fd)));
  }
  const std::string address = Text(options.host, ":", options.port);
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = begin + Milliseconds(options.timeout);
  bool told = false;
  // Rank 0's host may have no address yet, also for rank 0 itself.
  const auto who = [&] {
    return options.rank == 0 && server == nullptr ? "its host's address"
                                                  : "rank 0";
  };
  for (;;) {
    Attempt attempt;
    if (options.rank == 0 && server == nullptr) {
      TESSERA_TRY(attempt, Listen(endpoint, options.several_hosts));
      if (attempt.fd.is_open()) {
        endpoint = OwnEndpoint(attempt.fd.get(), endpoint);
        TESSERA_TRY(server, serve(std::move(attempt.fd)));
      }
    }
    if (options.rank != 0 || server != nullptr) {
      TESSERA_TRY(attempt, Connect(endpoint, deadline, options.stop));
    }
    if (attempt.fd.is_open()) {
      auto client = std::make_unique<Client>(std::move(attempt.fd), options,
                                             address, deadline);
      TESSERA_TRY(const bool welcome, client->Greet(options));
      if (welcome) {
        client->Own(std::move(server));
        return std::unique_ptr<Store>(std::move(client));
      }
      // An earlier job's store that is ending, or another protocol.
      attempt.trouble = "who listens there closes the connection";
    }
    if (options.stop != nullptr && options.stop->load()) {
      return Interrupted(options.rank, who());
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return Unavailable(Text(options.rank == 0
                                  ? "cannot serve the job's store at "
                                  : "cannot reach rank 0 at ",
                              address, " within ", options.timeout.seconds(),
                              " s: ", attempt.trouble));
    }
    if (!told && options.waiting &&
        now - begin >= Milliseconds(options.patience)) {
      told = true;
      options.waiting(attempt.unresolved
                          ? Text(who(), " (", attempt.trouble, ")")
                          : std::string(who()));
    }
    const Clock::duration pause =
        attempt.unresolved ? Clock::duration(kNamePause) : kAttemptPause;
    if (Await(/*fd=*/-1, 0, std::min(deadline, now + pause), options.stop) ==
        Event::kStopped) {
      return Interrupted(options.rank, who());
    }
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
