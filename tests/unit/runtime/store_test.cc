// The store, and how the ranks of a host meet by it.

#include "runtime/comm/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/comm/job_failure.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/roll_call.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/store_wire.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

StoreOptions LocalStore(const ListeningSocket& socket, int rank) {
  StoreOptions options;
  options.port = socket.port;
  options.rank = rank;
  options.size = 2;
  options.listen_fd = rank == 0 ? socket.fd : -1;
  options.job_id = "job";
  options.timeout = Duration::FromSeconds(5);
  return options;
}

// A socket of a stranger.
int Connected(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  return fd;
}

TEST(StoreTest, SetGetAddBarrier) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store) << store.error().ToString();
  std::thread other([&] {
    auto client = Store::Open(LocalStore(socket, 1));
    ASSERT_TRUE(client) << client.error().ToString();
    EXPECT_EQ((*client)->Get("late", Duration::FromSeconds(10), "it").value(),
              "v");
    EXPECT_EQ((*client)->Add("counter", 5).value(), 5);
    EXPECT_TRUE((*client)->Barrier("b", 2, Duration::FromSeconds(10)));
  });
  const std::string large(1 << 20, 'y');
  EXPECT_TRUE((*store)->Set("large", large));
  EXPECT_EQ((*store)->Get("large", Duration{}, "it").value(), large);
  EXPECT_TRUE((*store)->Set("late", "v"));
  EXPECT_TRUE((*store)->Barrier("b", 2, Duration::FromSeconds(10)));
  EXPECT_EQ((*store)->Add("counter", -7).value(), -2);
  other.join();
  EXPECT_FALSE((*store)->Set("huge", large + "y"));
  EXPECT_FALSE((*store)->Set(std::string(257, 'k'), ""));
}

// With one file descriptor left it has that one.
TEST(StoreTest, ListensWithTheLastFileDescriptor) {
  const int next = dup(0);
  ASSERT_GE(next, 0);
  close(next);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto listen_with = [&](int descriptors) {
    const rlimit few = {static_cast<rlim_t>(descriptors), before.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    auto socket = ListenOnLoopback();
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    return socket;
  };
  const auto socket = listen_with(next + 1);
  ASSERT_TRUE(socket) << socket.error().ToString();
  EXPECT_EQ(socket->fd, next);
  EXPECT_GT(socket->port, 0);
  close(socket->fd);
  const auto none = listen_with(next);
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message, HasSubstr("Too many open files"));
}

TEST(StoreTest, GetTimesOutAndTheStoreLivesOn) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store);
  bool late = false;
  const auto missing =
      (*store)->Get("missing", Duration::FromSeconds(0.15), "rank 7", late);
  ASSERT_FALSE(missing);
  EXPECT_TRUE(late);
  EXPECT_EQ(missing.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(missing.error().message,
              HasSubstr("waited 0.15 s in vain for rank 7 (the job's"));
  const auto alone = (*store)->Barrier("b", 2, Duration::FromSeconds(0.05));
  ASSERT_FALSE(alone);
  EXPECT_THAT(alone.error().message, HasSubstr("in vain for all 2 ranks (the"));
  EXPECT_TRUE((*store)->Set("missing", "here"));
  EXPECT_EQ((*store)->Get("missing", Duration{}, "it").value(), "here");
}

// A process that serves as rank 0 with what this one has of it; stopped, it
// answers nothing.
class StoreProcess {
 public:
  template <typename Prepare>
  explicit StoreProcess(const StoreOptions& options, Prepare prepare)
      : pid_(fork()) {
    if (pid_ != 0) {
      close(options.listen_fd);
      return;
    }
    prepare();
    const auto store = Store::Open(options);
    if (store) (void)(*store)->Set("rank 0 has come", "");
    for (;;) pause();
  }
  explicit StoreProcess(const StoreOptions& options)
      : StoreProcess(options, [] {}) {}
  ~StoreProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  void Stop() const {
    kill(pid_, SIGSTOP);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void Continue() const { kill(pid_, SIGCONT); }

 private:
  const pid_t pid_;
};

TEST(StoreTest, ALostStoreTellsOfRankZero) {
  const ListeningSocket socket = ListenOnLoopback().value();
  std::optional<StoreProcess> server(std::in_place, LocalStore(socket, 0));
  const auto store = Store::Open(LocalStore(socket, 1));
  server.reset();
  ASSERT_TRUE(store) << store.error().ToString();
  bool late = true;
  const auto lost = (*store)->Get("key", Duration::FromSeconds(10), "it", late);
  ASSERT_FALSE(lost);
  EXPECT_FALSE(late);
  EXPECT_EQ(
      lost.error().ToString(),
      Text("rank 0's store at 127.0.0.1:", socket.port, ": connection lost"));
  EXPECT_EQ(RankToldOf(lost.error()), 0);
}

// An answer that comes too late is not that of the next request.
TEST(StoreTest, BehindARequestWithoutAnswerAllFail) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const StoreProcess server(LocalStore(socket, 0));
  const auto store = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(store) << store.error().ToString();
  EXPECT_TRUE((*store)->Set("key", "value"));
  (*store)->set_timeout(Duration::FromSeconds(0.2));
  server.Stop();
  const std::string expected =
      Text("rank 0's store at 127.0.0.1:", socket.port, ": does not answer");
  const auto unanswered = (*store)->Add("counter", 1);
  ASSERT_FALSE(unanswered);
  EXPECT_EQ(unanswered.error().message, expected);
  server.Continue();
  (*store)->set_timeout(Duration::FromSeconds(10));
  const auto value = (*store)->Get("key", Duration::FromSeconds(10), "it");
  ASSERT_FALSE(value) << *value;
  EXPECT_EQ(value.error().message, expected);
  EXPECT_FALSE((*store)->Set("key", "value"));
  EXPECT_FALSE((*store)->Add("counter", 1));
  EXPECT_FALSE((*store)->Poll("counter", 1));
}

// Questions of 5 MB, where Linux keeps at most 4 of what rank 0 does not take
// (net.ipv4.tcp_wmem). The rest follows.
TEST(StoreTest, SendingDoesNotWaitForRankZero) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const StoreProcess server(LocalStore(socket, 0));
  const auto store = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(store) << store.error().ToString();
  server.Stop();
  std::atomic<bool> ended = false;
  std::atomic<bool> woken = false;
  std::thread wakes([&] {  // a rank 1 that waits all the same
    for (int i = 0; i < 20'000 && !ended; ++i) usleep(1000);
    woken = !ended;
    server.Continue();
  });
  const std::string long_key(248, 'k');
  for (int i = 0; i < 20'000; ++i) {
    const auto answer = (*store)->Poll(Text(i, long_key), 1);
    if (!answer || *answer) ADD_FAILURE() << "poll " << i;
  }
  ended = true;
  wakes.join();
  EXPECT_FALSE(woken);
  (*store)->set_timeout(Duration::FromSeconds(60));
  EXPECT_EQ((*store)->Add(Text(19'999, long_key), 1).value(), 2);
}

// The connection of a rank of "job" that is welcome.
int Welcomed(int port, int rank, int size) {
  const int fd = Connected(port);
  std::string greeting;
  wire::Append(greeting, wire::kMagic);
  wire::Append(greeting, wire::kVersion);
  wire::Append(greeting, uint32_t{3});
  wire::Append(greeting, int32_t{rank});
  wire::Append(greeting, int32_t{size});
  greeting += "job";
  EXPECT_EQ(send(fd, greeting.data(), greeting.size(), 0),
            std::ssize(greeting));
  char welcome[wire::kWelcomeBytes];
  EXPECT_EQ(recv(fd, welcome, sizeof(welcome), MSG_WAITALL),
            std::ssize(welcome));
  return fd;
}

// A process that ends right behind what it asked.
TEST(StoreTest, TheLastWordOfARankCounts) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = 3;
    return result;
  };
  const StoreProcess server(options(0));
  const auto other = Store::Open(options(2));
  ASSERT_TRUE(other) << other.error().ToString();
  const int fd = Welcomed(socket.port, 1, 3);
  server.Stop();
  std::string request;
  wire::Append(request, static_cast<uint8_t>(wire::kSet));
  wire::Append(request, uint32_t{3});
  wire::Append(request, uint32_t{5});
  wire::Append(request, int64_t{0});
  request += "keyvalue";
  ASSERT_EQ(send(fd, request.data(), request.size(), 0), std::ssize(request));
  close(fd);
  server.Continue();
  EXPECT_EQ((*other)->Get("key", Duration::FromSeconds(5), "it").value(),
            "value");
}

// The first one that ends without a word is told of, and no other.
TEST(StoreTest, ARankThatEndsWithoutClosingItsStoreIsGone) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = 4;
    return result;
  };
  const auto store = Store::Open(options(0));
  ASSERT_TRUE(store) << store.error().ToString();
  const auto gone = [&] { return (*store)->Add(kGoneKey, 0).value(); };
  EXPECT_TRUE(Store::Open(options(1)));  // and closes it
  const std::atomic<bool> stop = true;
  {
    auto interrupted = Store::Open(options(2));
    ASSERT_TRUE(interrupted);
    (*interrupted)->set_stop(&stop);
    EXPECT_FALSE((*interrupted)->Get("never", Duration::FromSeconds(9), "it"));
  }
  EXPECT_EQ(gone(), 0);
  EXPECT_FALSE(GoneRank(**store, 0));
  close(Welcomed(socket.port, 3, 4));
  for (int wait = 0; wait < 500 && gone() == 0; ++wait) usleep(10'000);
  EXPECT_EQ(gone(), 3 + 1);
  EXPECT_EQ(GoneRank(**store, 0), RankLeft(3, 0));
}

TEST(JobFailureTest, ARankZeroWithoutAStoreIsGone) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto zero = std::make_unique<StoreProcess>(LocalStore(socket, 0));
  const auto one = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(one) << one.error().ToString();
  EXPECT_FALSE(GoneRank(**one, 1));
  zero.reset();
  const auto gone = GoneRank(**one, 1);
  ASSERT_TRUE(gone);
  EXPECT_EQ(RankToldOf(*gone), 0);
}

// Where a rank fails before it has a world the others learn of it in theirs.
TEST(JobFailureTest, TheFirstOneIsTheJobs) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto zero = Store::Open(LocalStore(socket, 0));
  const auto one = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(zero && one);
  const std::string prefix = NcclPrefix(1);
  EXPECT_EQ((*zero)->Add(FailuresKey(prefix), 0).value(), 0);
  const Error first = Unavailable("no memory");
  EXPECT_EQ(PublishFailure(**one, prefix, 1, first), first);
  EXPECT_EQ((*zero)->Add(FailuresKey(prefix), 0).value(), 1);
  EXPECT_EQ(PublishFailure(**zero, prefix, 0, Unavailable("another failed")),
            RankFailed(1, first));
}

// Ranks 1, 4 and 2 of 16 come, then all others but 3, then that.
TEST(RollCallTest, WhoHasNotComeIsNamed) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store) << store.error().ToString();
  RollCall call(**store, "came", 16);
  // What Missing asks is answered behind what AllCame asked before. Of three
  // calls one at least has the answer to what was asked in here: the first may
  // have that to an earlier question, and the second be who asks.
  const auto all_came = [&] {
    bool all = false;
    for (int look = 0; look < 3; ++look) {
      all = call.AllCame().value() || all;
      (void)call.Missing();
    }
    return all;
  };
  for (int rank : {1, 4, 2}) ASSERT_TRUE(call.Answer(rank));
  EXPECT_EQ(call.Missing(), "ranks 0, 3, 5, 6, 7, 8, 9, 10 and 5 more");
  for (int rank : {5, 6, 7, 8}) ASSERT_TRUE(call.Answer(rank));
  EXPECT_EQ(call.Missing(), "ranks 0, 3, 9, 10, 11, 12, 13, 14 and 15");
  for (int rank = 9; rank < 16; ++rank) ASSERT_TRUE(call.Answer(rank));
  EXPECT_EQ(call.Missing(), "ranks 0 and 3");
  ASSERT_TRUE(call.Answer(0));
  EXPECT_EQ(call.Missing(), "rank 3");
  EXPECT_FALSE(all_came());
  ASSERT_TRUE(call.Answer(3));
  EXPECT_EQ(call.Missing(), "the other ranks");
  EXPECT_TRUE(all_came());
}

// Another meeting is another key's.
TEST(RollCallTest, EachMeetingIsItsOwn) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store) << store.error().ToString();
  ASSERT_TRUE(RollCall(**store, "1/came", 1).Answer(0));
  EXPECT_EQ(RollCall(**store, "2/came", 1).Missing(), "rank 0");
}

TEST(StoreTest, PollDoesNotWait) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const StoreProcess server(LocalStore(socket, 0));
  const auto store = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(store) << store.error().ToString();
  server.Stop();
  (*store)->set_timeout(Duration::FromSeconds(0.01));
  for (int look = 0; look < 10; ++look) {
    for (const std::string key : {"a", "b"}) {
      const auto answer = (*store)->Poll(key, 5);
      ASSERT_TRUE(answer) << answer.error().ToString();
      EXPECT_FALSE(*answer);
    }
    usleep(10'000);
  }
  server.Continue();
  (*store)->set_timeout(Duration::FromSeconds(10));
  const auto await = [&](const std::string& key) {
    for (;;) {
      const auto answer = (*store)->Poll(key, 5).value();
      if (answer) return *answer;
      usleep(1000);
    }
  };
  EXPECT_EQ(await("b"), 5);
  EXPECT_EQ((*store)->Add("b", 1).value(), 6);
  EXPECT_EQ(await("a"), 5);
  EXPECT_EQ(await("b"), 11);
  // The answer to a question comes ahead of that to what follows it.
  server.Stop();
  EXPECT_FALSE((*store)->Poll("a", 5).value());
  server.Continue();
  EXPECT_TRUE((*store)->Set("key", "value"));
  EXPECT_EQ((*store)->Get("key", Duration{}, "it").value(), "value");
  EXPECT_EQ((*store)->Poll("a", 5).value(), 10);
  EXPECT_FALSE((*store)->Poll(std::string(257, 'k'), 5));
}

TEST(StoreTest, AnInterruptEndsEachWait) {
  const std::atomic<bool> stop = true;
  const ListeningSocket socket = ListenOnLoopback().value();
  StoreOptions options = LocalStore(socket, 1);
  options.timeout = Duration::FromSeconds(60);
  options.stop = &stop;
  const auto expect_interrupted = [](const auto& result, int rank,
                                     const std::string& who) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInterrupted);
    EXPECT_EQ(result.error().message,
              Text("interrupted as rank ", rank, " waited for ", who));
  };
  // The socket listens, and nobody serves it.
  expect_interrupted(Store::Open(options), 1, "rank 0");
  {
    const auto store = Store::Open(LocalStore(socket, 0));
    ASSERT_TRUE(store);
    EXPECT_TRUE((*store)->Set("key", "value"));
    (*store)->set_stop(&stop);
    // What is answered is no wait.
    EXPECT_EQ((*store)->Get("key", Duration{}, "it").value(), "value");
    expect_interrupted(
        (*store)->Get("missing", Duration::FromSeconds(60), "rank 1"), 0,
        "rank 1");
  }
  // Nobody listens.
  expect_interrupted(Store::Open(options), 1, "rank 0");
}

TEST(ShmWorldTest, AnInterruptEndsTheMeeting) {
  const std::atomic<bool> stop = true;
  const ListeningSocket socket = ListenOnLoopback().value();
  StoreOptions options = LocalStore(socket, 0);
  options.timeout = Duration::FromSeconds(60);
  options.stop = &stop;
  const auto store = Store::Open(options);
  ASSERT_TRUE(store) << store.error().ToString();
  const auto world = MakeShmWorld(0, 2, **store);
  ASSERT_FALSE(world);
  EXPECT_EQ(world.error().code, ErrorCode::kInterrupted);
  EXPECT_EQ(world.error().message, "interrupted as rank 0 waited for rank 1");
}

TEST(StoreTest, ALateRankZeroIsNamedOnce) {
  const ListeningSocket socket = ListenOnLoopback().value();
  close(socket.fd);
  std::atomic<bool> told = false;
  std::string who;
  StoreOptions options = LocalStore(socket, 1);
  options.timeout = Duration::FromSeconds(60);
  options.patience = Duration::FromSeconds(0.05);
  options.waiting = [&](const std::string& whom) {
    who += whom;
    told = true;
  };
  std::atomic<bool> met = false;
  std::thread late([&] {
    while (!told && !met) usleep(1000);
    usleep(200'000);
    StoreOptions zero = LocalStore(socket, 0);
    zero.listen_fd = -1;
    const auto store = Store::Open(zero);
    EXPECT_TRUE(store) << store.error().ToString();
    while (!met) usleep(1000);
  });
  const auto store = Store::Open(options);
  EXPECT_TRUE(store) << store.error().ToString();
  met = true;
  late.join();
  EXPECT_EQ(who, "rank 0");
}

// The time that a late rank took is not there for the next.
TEST(ShmWorldTest, ARankThatDoesNotComeIsAnErrorAtOneDeadline) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = 3;
    result.timeout = Duration::FromSeconds(2);
    return result;
  };
  const auto store = Store::Open(options(0));
  ASSERT_TRUE(store);
  std::thread rank1([&] {
    usleep(300'000);
    const auto mine = Store::Open(options(1));
    ASSERT_TRUE(mine);
    const auto world = MakeShmWorld(1, 3, **mine);
    ASSERT_FALSE(world);
    EXPECT_THAT(world.error().message,
                MatchesRegex("waited [01][.0-9]* s in vain for rank 0 and the "
                             "ranks that it waits for .*"));
  });
  const auto world = MakeShmWorld(0, 3, **store);
  ASSERT_FALSE(world);
  EXPECT_THAT(world.error().message,
              MatchesRegex("rank 2 has not come: waited [01][.0-9]* s in vain "
                           "\\(the job's store is at .*"));
  rank1.join();
}

// After 5 s it is named; these count, too.
TEST(ShmWorldTest, ARankThatWasNamedIsWaitedForSinceTheStart) {
  const ListeningSocket socket = ListenOnLoopback().value();
  StoreOptions options = LocalStore(socket, 0);
  options.size = 2;
  options.timeout = Duration::FromSeconds(5.5);
  const auto store = Store::Open(options);
  ASSERT_TRUE(store);
  const auto world = MakeShmWorld(0, 2, **store);
  ASSERT_FALSE(world);
  EXPECT_THAT(world.error().message,
              MatchesRegex("rank 1 has not come: waited [5-9][.0-9]* s in vain "
                           "\\(the job's store is at .*"));
}

std::vector<int> ConnectAndSayNothing(int port, int connections) {
  std::vector<int> fds;
  for (int i = 0; i < connections; ++i) fds.push_back(Connected(port));
  return fds;
}

// Leaves this process few more descriptors than it has.
void LimitDescriptors() {
  const int next = dup(0);
  close(next);
  const rlimit few = {static_cast<rlim_t>(next) + 8,
                      static_cast<rlim_t>(next) + 8};
  setrlimit(RLIMIT_NOFILE, &few);
}

// Of its own: the first is the server's, the next one that of who asks it.
TEST(StoreTest, RankZeroWithoutDescriptorsEndsAtOnce) {
  const auto open_with = [](int descriptors) {
    const ListeningSocket socket = ListenOnLoopback().value();
    const int next = dup(0);
    close(next);
    const rlimit few = {static_cast<rlim_t>(next + descriptors),
                        static_cast<rlim_t>(next + descriptors)};
    setrlimit(RLIMIT_NOFILE, &few);
    StoreOptions options = LocalStore(socket, 0);
    options.timeout = Duration::FromSeconds(60);
    alarm(30);
    const auto store = Store::Open(options);
    std::fputs(store ? "opened" : store.error().message.c_str(), stderr);
    _exit(store ? 0 : 1);
  };
  EXPECT_EXIT(open_with(0), ::testing::ExitedWithCode(1),
              "^rank 0 has no file descriptor for the job's store: Too many "
              "open files; raise its ulimit -n$");
  EXPECT_EXIT(open_with(1), ::testing::ExitedWithCode(1),
              "^no file descriptor is left for rank 0's store at 127.0.0.1:"
              "[0-9]+: Too many open files; raise ulimit -n$");
}

TEST(StoreTest, NoDescriptorForARankEndsTheJob) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = 100;
    result.timeout = Duration::FromSeconds(60);
    return result;
  };
  const StoreProcess server(options(0), LimitDescriptors);
  auto first = Store::Open(options(1));
  ASSERT_TRUE(first) << first.error().ToString();
  ASSERT_TRUE((*first)->Get("rank 0 has come", Duration::FromSeconds(10), ""));
  Error told;
  std::thread waits([&] {
    const auto got = (*first)->Get("key", Duration::FromSeconds(60), "it");
    if (!got) told = got.error();
    first->reset();  // gives its descriptor to one that waits
  });
  std::vector<std::unique_ptr<Store>> others;
  Error refused;
  for (int rank = 2; rank < 100; ++rank) {
    auto other = Store::Open(options(rank));
    if (!other) {
      refused = other.error();
      break;
    }
    others.push_back(*std::move(other));
  }
  waits.join();
  EXPECT_EQ(told.code, ErrorCode::kUnavailable);
  EXPECT_EQ(told.message,
            "rank 0 has no file descriptor for a further rank (" +
                std::to_string(2 + others.size()) +
                " of 100 have come): Too many open files; raise its ulimit -n");
  EXPECT_EQ(refused.message, told.message);
}

// Their descriptors are given back in time.
TEST(StoreTest, ARankComesBehindSilentStrangers) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = 3;
    result.timeout = Duration::FromSeconds(60);
    return result;
  };
  const StoreProcess server(options(0), LimitDescriptors);
  const auto store = Store::Open(options(1));
  ASSERT_TRUE(store) << store.error().ToString();
  ASSERT_TRUE((*store)->Get("rank 0 has come", Duration::FromSeconds(10), ""));
  const auto silent = ConnectAndSayNothing(socket.port, 5);
  const auto late = Store::Open(options(2));
  EXPECT_TRUE(late) << late.error().ToString();
  for (const int fd : silent) close(fd);
}

TEST(StoreTest, NoDescriptorForAStrangerHarmsNobody) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const StoreProcess server(LocalStore(socket, 0), LimitDescriptors);
  const auto store = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(store) << store.error().ToString();
  ASSERT_TRUE((*store)->Get("rank 0 has come", Duration::FromSeconds(10), ""));
  const auto silent = ConnectAndSayNothing(socket.port, 10);
  usleep(100'000);
  EXPECT_TRUE((*store)->Set("key", "value"));
  for (const int fd : silent) close(fd);
  StoreOptions options = LocalStore(socket, 1);
  options.job_id = "another";
  const auto refused = Store::Open(options);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("serves another job"));
  EXPECT_EQ((*store)->Get("key", Duration{}, "it").value(), "value");
}

// Where more are allowed.
TEST(StoreTest, RankZeroTakesTheDescriptorsThatItMayHave) {
  const ListeningSocket socket = ListenOnLoopback().value();
  const StoreProcess server(LocalStore(socket, 0), [] {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 64);
    setrlimit(RLIMIT_NOFILE, &limit);
  });
  const auto silent = ConnectAndSayNothing(socket.port, 80);
  const auto store = Store::Open(LocalStore(socket, 1));
  EXPECT_TRUE(store) << store.error().ToString();
  for (const int fd : silent) close(fd);
}

TEST(StoreTest, AnotherJobIsRefused) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store);
  StoreOptions options = LocalStore(socket, 1);
  options.job_id = "another";
  const auto other = Store::Open(options);
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message, HasSubstr("serves another job"));
  EXPECT_TRUE((*store)->Set("k", "v"));
}

// The store of a job that was started by hand, without an identity.
TEST(StoreTest, ARankComesOnce) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store);
  const auto first = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(first);
  const auto second = Store::Open(LocalStore(socket, 1));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().message,
              HasSubstr("has met a rank 1 already and may be another job's; "
                        "choose another MASTER_PORT"));
  EXPECT_TRUE((*first)->Set("k", "v"));
}

// All ranks learn of it, those too that wait or come later.
TEST(StoreTest, RanksThatCountOtherwiseEndTheJob) {
  const std::string expected =
      "ranks disagree: rank 2 has WORLD_SIZE 6, rank 0 has 3";
  const ListeningSocket socket = ListenOnLoopback().value();
  const auto options = [&](int rank, int size) {
    StoreOptions result = LocalStore(socket, rank);
    result.size = size;
    return result;
  };
  auto store = Store::Open(options(0, 3));
  ASSERT_TRUE(store);
  const auto expect_told = [&](const auto& result) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidInput);
    EXPECT_EQ(result.error().message, expected);
  };
  std::thread misfit([&] {
    usleep(50'000);  // rank 0 asks before
    expect_told(Store::Open(options(2, 6)));
  });
  expect_told((*store)->Get("key", Duration::FromSeconds(10), "it"));
  misfit.join();
  expect_told((*store)->Set("key", "value"));
  expect_told(Store::Open(options(1, 3)));
}

// Behind the start of a job who counts otherwise is not of it.
TEST(StoreTest, AStrangerEndsNoJobWhoseRanksHaveCome) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store);
  const auto other = Store::Open(LocalStore(socket, 1));
  ASSERT_TRUE(other);
  StoreOptions options = LocalStore(socket, 2);
  options.size = 3;
  const auto stranger = Store::Open(options);
  ASSERT_FALSE(stranger);
  EXPECT_EQ(stranger.error().message,
            "ranks disagree: rank 2 has WORLD_SIZE 3, rank 0 has 2");
  EXPECT_TRUE((*store)->Set("k", "v"));
  EXPECT_EQ((*other)->Get("k", Duration{}, "it").value(), "v");
}

TEST(StoreTest, PortInUseAndNobodyThere) {
  const ListeningSocket socket = ListenOnLoopback().value();
  StoreOptions options = LocalStore(socket, 0);
  options.listen_fd = -1;
  const auto second = Store::Open(options);
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr("Address already in use"));
  EXPECT_THAT(second.error().message, HasSubstr("MASTER_PORT"));

  close(socket.fd);
  options = LocalStore(socket, 1);
  options.timeout = Duration::FromSeconds(0.2);
  const auto lonely = Store::Open(options);
  ASSERT_FALSE(lonely);
  EXPECT_THAT(
      lonely.error().message,
      HasSubstr(Text("cannot reach rank 0 at 127.0.0.1:", socket.port)));
  EXPECT_THAT(lonely.error().message, HasSubstr("Connection refused"));
}

// Where the name by which others reach rank 0's host is none of its own, or has
// no address there, and where it has but there are other hosts.
TEST(StoreTest, RankZeroListensWhereOthersComeFrom) {
  for (const auto& [host, several] :
       {std::pair("192.0.2.1", false), std::pair("192.0.2.1", true),
        std::pair("no-such-host.invalid", true), std::pair("127.0.0.2", true),
        std::pair("::1", true)}) {
    const ListeningSocket free = ListenOnLoopback().value();
    close(free.fd);
    StoreOptions options = LocalStore(free, 0);
    options.listen_fd = -1;
    options.host = host;
    options.several_hosts = several;
    auto store = Store::Open(options);
    ASSERT_TRUE(store) << host << ": " << store.error().ToString();
    auto other = Store::Open(LocalStore(free, 1));
    ASSERT_TRUE(other) << host << ": " << other.error().ToString();
    EXPECT_TRUE((*store)->Set("k", "v"));
    EXPECT_EQ((*other)->Get("k", Duration{}, "it").value(), "v");
    other->reset();
  }
}

// A name may get its address when rank 0's host comes, or a while later.
TEST(StoreTest, AnUnknownHostIsWaitedFor) {
  const std::string trouble =
      "cannot find the host 'no-such-host.invalid' of "
      "rank 0: ";
  StoreOptions options;
  options.host = "no-such-host.invalid";
  options.port = 1;
  options.rank = 1;
  options.size = 2;
  options.timeout = Duration::FromSeconds(0.5);
  options.patience = Duration{};
  std::string told;
  options.waiting = [&](const std::string& who) { told += who; };
  const auto store = Store::Open(options);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(store.error().message,
              HasSubstr("cannot reach rank 0 at no-such-host.invalid:1 within "
                        "0.5 s: " +
                        trouble));
  EXPECT_THAT(told, HasSubstr("rank 0 (" + trouble));

  const std::atomic<bool> stop = true;
  options.timeout = Duration::FromSeconds(60);
  options.stop = &stop;
  const auto interrupted = Store::Open(options);
  ASSERT_FALSE(interrupted);
  EXPECT_EQ(interrupted.error().code, ErrorCode::kInterrupted);

  options.rank = 0;
  const auto zero_interrupted = Store::Open(options);
  ASSERT_FALSE(zero_interrupted);
  EXPECT_EQ(zero_interrupted.error().message,
            "interrupted as rank 0 waited for its host's address");

  options.stop = nullptr;
  options.timeout = Duration::FromSeconds(0.5);
  told.clear();
  const auto zero = Store::Open(options);
  ASSERT_FALSE(zero);
  EXPECT_THAT(zero.error().message,
              HasSubstr("cannot serve the job's store at "
                        "no-such-host.invalid:1 within 0.5 s: " +
                        trouble));
  EXPECT_THAT(told, HasSubstr("its host's address (" + trouble));
}

// Somebody else listens on the port and says something else.
TEST(StoreTest, WrongProtocolIsAnError) {
  const ListeningSocket socket = ListenOnLoopback().value();
  std::thread stranger([&] {
    const int fd = accept(socket.fd, nullptr, nullptr);
    const std::string text = "HTTP/1.1 400 Bad Request\r\n\r\n";
    EXPECT_GT(send(fd, text.data(), text.size(), MSG_NOSIGNAL), 0);
    char buffer[64];
    while (recv(fd, buffer, sizeof(buffer), 0) > 0) {
    }
    close(fd);
  });
  const auto store = Store::Open(LocalStore(socket, 1));
  stranger.join();
  close(socket.fd);
  ASSERT_FALSE(store);
  EXPECT_THAT(store.error().message, HasSubstr("not a store of Tessera"));
}

// It takes the connection and waits for more.
TEST(StoreTest, AListenerThatSaysNothingIsAnError) {
  const ListeningSocket socket = ListenOnLoopback().value();
  StoreOptions options = LocalStore(socket, 1);
  options.timeout = Duration::FromSeconds(0.2);
  const auto store = Store::Open(options);
  close(socket.fd);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().message,
            Text("what listens at 127.0.0.1:", socket.port,
                 " says nothing, unlike a store of Tessera; choose another "
                 "MASTER_PORT"));
}

TEST(StoreTest, GarbageHarmsNobody) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto store = Store::Open(LocalStore(socket, 0));
  ASSERT_TRUE(store);
  Rng rng(1);
  for (int trial = 0; trial < 200; ++trial) {
    const int fd = Connected(socket.port);
    std::string bytes;
    if (trial % 2 == 1) {
      // A good greeting first: magic, version, rank 1 of 2 and the job's id;
      // the first one is that rank.
      bytes.assign("TESSERA\0\2\0\0\0\3\0\0\0\1\0\0\0\2\0\0\0job", 27);
    }
    const uint32_t length = rng.Below(300);
    for (uint32_t i = 0; i < length; ++i) {
      // Small numbers too, so that lengths and operations may be valid.
      bytes +=
          static_cast<char>(rng.Below(2) == 0 ? rng.Below(4) : rng.Below(256));
    }
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  EXPECT_TRUE((*store)->Set("k", "v"));
  EXPECT_EQ((*store)->Get("k", Duration{}, "it").value(), "v");
}

}  // namespace
}  // namespace tessera
