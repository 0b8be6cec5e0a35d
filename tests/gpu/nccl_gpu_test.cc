// The communicator's contract over NCCL, with all ranks on GPU 0.
//
// NCCL refuses two ranks on one GPU of one host. So each rank is a process with
// an NCCL_HOSTID of its own: a host of its own to NCCL, which then takes the
// network, here the loopback interface. Without MPS the GPU gives each process
// its slices of time, so every operation takes milliseconds.
//
// A process that has used CUDA cannot fork one that does: ranks are this
// program again, with one case to run.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/comm/job_failure.h"
#include "runtime/comm/nccl_world.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/store.h"
#include "runtime/comm/text.h"
#include "runtime/launch/backend.h"
#include "tests/support/rank_expect.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One rank: its world, its device, and vectors that live there.
class Rank {
 public:
  Rank(CommWorld& world, CudaDevice& device) : world(world), device(device) {}

  int me() const { return world.world_rank(); }
  int n() const { return world.world_size(); }
  Communicator& all() const {
    std::vector<int> ranks(static_cast<size_t>(n()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return **world.Group(ranks);
  }

  template <typename T>
  T* Upload(const std::vector<T>& values) const {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    void* const data =
        device.Allocate({bytes}, MemoryCategory::kActivation).value();
    device.Write(data, values.data(), {bytes});
    return static_cast<T*>(data);
  }
  template <typename T>
  std::vector<T> Download(const T* data, size_t count) const {
    std::vector<T> values(count);
    device.Read(values.data(), data, {static_cast<int64_t>(count * sizeof(T))});
    return values;
  }

  CommWorld& world;
  CudaDevice& device;
};

template <typename T>
std::vector<T> Elements(int rank, int64_t count) {
  std::vector<T> data;
  for (int64_t i = 0; i < count; ++i) {
    data.push_back(
        static_cast<T>(1000 * CounterNormal(static_cast<uint64_t>(rank) + 1,
                                            static_cast<uint64_t>(i))));
  }
  return data;
}

template <typename T>
std::vector<T> SumOf(std::span<const int> ranks, int64_t count) {
  std::vector<T> sum(static_cast<size_t>(count), 0);
  for (int rank : ranks) {
    const std::vector<T> more = Elements<T>(rank, count);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
  }
  return sum;
}

// Sums of k values below 5000 in another order: k roundings of at most
// 5000 k 2^-24 each, for k <= 4 less than 0.01. Integers are exact.
template <typename T>
bool Near(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart =
        std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(apart <= (std::is_integral_v<T> ? 0 : 0.01))) return false;
  }
  return true;
}

std::vector<int> Iota(int n) {
  std::vector<int> ranks(static_cast<size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

int64_t Total(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Equal where `ragged` is false; else with an empty part where there are
// several ranks.
std::vector<int64_t> Counts(int n, int64_t scale, bool ragged) {
  std::vector<int64_t> counts;
  for (int r = 0; r < n; ++r) {
    counts.push_back(!ragged ? scale : r == 1 ? 0 : scale * r + 3);
  }
  return counts;
}

// ---- The cases --------------------------------------------------------------

template <typename T>
std::string CheckAllReduce(const Rank& rank, DType dtype) {
  for (const int64_t count : {0, 1, 5, 4097, 300'001}) {
    T* const data = rank.Upload(Elements<T>(rank.me(), count));
    RANK_EXPECT_OK(rank.all().AllReduce(data, count, dtype));
    RANK_EXPECT(Near(rank.Download(data, static_cast<size_t>(count)),
                     SumOf<T>(Iota(rank.n()), count)));
  }
  return "";
}

std::string AllReduce(Rank& rank) {
  std::string wrong = CheckAllReduce<float>(rank, DType::kFloat32);
  if (wrong.empty()) wrong = CheckAllReduce<double>(rank, DType::kFloat64);
  if (wrong.empty()) wrong = CheckAllReduce<int32_t>(rank, DType::kInt32);
  return wrong;
}

std::string ReduceScatter(Rank& rank) {
  const auto me = static_cast<size_t>(rank.me());
  for (const bool ragged : {false, true}) {
    for (const int64_t scale : {1, 60'000}) {
      const auto counts = Counts(rank.n(), scale, ragged);
      const int64_t begin = Total(std::span(counts).first(me));
      const auto sum = SumOf<float>(Iota(rank.n()), Total(counts));
      const std::vector<float> expected(sum.begin() + begin,
                                        sum.begin() + begin + counts[me]);
      float* const send =
          rank.Upload(Elements<float>(rank.me(), Total(counts)));
      float* const recv = rank.Upload(std::vector<float>(expected.size(), 0));
      RANK_EXPECT_OK(
          rank.all().ReduceScatter(send, recv, counts, DType::kFloat32));
      RANK_EXPECT(Near(rank.Download(recv, expected.size()), expected));
      RANK_EXPECT_OK(rank.all().ReduceScatter(send, send + begin, counts,
                                              DType::kFloat32));
      RANK_EXPECT(Near(rank.Download(send + begin, expected.size()), expected));
    }
  }
  return "";
}

std::string AllGather(Rank& rank) {
  const auto me = static_cast<size_t>(rank.me());
  for (const bool ragged : {false, true}) {
    for (const int64_t scale : {1, 400'001}) {
      const auto counts = Counts(rank.n(), scale, ragged);
      std::vector<uint8_t> expected;
      for (int r = 0; r < rank.n(); ++r) {
        for (int64_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) {
          expected.push_back(static_cast<uint8_t>(r * 37 + i % 251));
        }
      }
      const int64_t begin = Total(std::span(counts).first(me));
      const std::vector<uint8_t> mine(expected.begin() + begin,
                                      expected.begin() + begin + counts[me]);
      uint8_t* const send = rank.Upload(mine);
      uint8_t* const recv =
          rank.Upload(std::vector<uint8_t>(expected.size(), 0));
      RANK_EXPECT_OK(rank.all().AllGather(send, counts[me], recv, counts));
      RANK_EXPECT(rank.Download(recv, expected.size()) == expected);
      // In place.
      rank.device.Zero(recv, {static_cast<int64_t>(expected.size())});
      rank.device.Copy(recv + begin, send, {.run_bytes = counts[me]});
      RANK_EXPECT_OK(
          rank.all().AllGather(recv + begin, counts[me], recv, counts));
      RANK_EXPECT(rank.Download(recv, expected.size()) == expected);
    }
  }
  return "";
}

std::string AllToAll(Rank& rank) {
  const int me = rank.me();
  for (const int64_t scale : {0, 1, 90'001}) {
    const auto bytes = [&](int from, int to) {
      return (from + to) % 3 == 1 ? 0 : scale * (from + 2 * to);
    };
    const auto byte = [](int from, int to, int64_t i) {
      return static_cast<uint8_t>(from * 16 + to + i % 97);
    };
    std::vector<int64_t> send_bytes, recv_bytes;
    std::vector<uint8_t> send, expected;
    for (int r = 0; r < rank.n(); ++r) {
      send_bytes.push_back(bytes(me, r));
      recv_bytes.push_back(bytes(r, me));
      for (int64_t i = 0; i < bytes(me, r); ++i) send.push_back(byte(me, r, i));
      for (int64_t i = 0; i < bytes(r, me); ++i) {
        expected.push_back(byte(r, me, i));
      }
    }
    uint8_t* const recv = rank.Upload(std::vector<uint8_t>(expected.size(), 0));
    RANK_EXPECT_OK(
        rank.all().AllToAll(rank.Upload(send), send_bytes, recv, recv_bytes));
    RANK_EXPECT(rank.Download(recv, expected.size()) == expected);
  }
  return "";
}

std::string Broadcast(Rank& rank) {
  for (int root = 0; root < rank.n(); ++root) {
    for (const int64_t count : {0, 1, 70'001}) {
      float* const data = rank.Upload(Elements<float>(rank.me(), count));
      RANK_EXPECT_OK(rank.all().Broadcast(data, count * 4, root));
      RANK_EXPECT(rank.Download(data, static_cast<size_t>(count)) ==
                  Elements<float>(root, count));
    }
  }
  return "";
}

// Every pair in both orders; all ranks make the groups in one order.
std::string Groups(Rank& rank) {
  const int me = rank.me();
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (int a = 0; a < rank.n(); ++a) {
      for (int b = 0; b < rank.n(); ++b) {
        if (a == b || (a != me && b != me)) continue;
        const std::vector<int> ranks = {a, b};
        auto group = rank.world.Group(ranks);
        RANK_EXPECT_OK(group);
        RANK_EXPECT((*group)->rank() == (a == me ? 0 : 1));
        RANK_EXPECT(*group == *rank.world.Group(ranks));
        float* const data = rank.Upload(Elements<float>(me, 1000));
        RANK_EXPECT_OK((*group)->AllReduce(data, 1000, DType::kFloat32));
        RANK_EXPECT(Near(rank.Download(data, 1000), SumOf<float>(ranks, 1000)));
      }
    }
  }
  return "";
}

std::string BadArguments(Rank& rank) {
  const int me = rank.me();
  const int n = rank.n();
  RANK_EXPECT(!rank.world.Group(std::vector<int>{me, n}));
  RANK_EXPECT(!rank.world.Group(std::vector<int>{me, me}));
  RANK_EXPECT(!rank.world.Group(std::vector<int>{}));
  float* const x = rank.Upload(std::vector<float>{1});
  const std::vector<int64_t> counts(static_cast<size_t>(n) + 1, 1);
  RANK_EXPECT(!rank.all().AllReduce(x, -1, DType::kFloat32));
  RANK_EXPECT(!rank.all().ReduceScatter(x, x, counts, DType::kFloat32));
  RANK_EXPECT(!rank.all().AllGather(x, 4, x, counts));
  RANK_EXPECT(!rank.all().Broadcast(x, 4, n));
  RANK_EXPECT(!rank.all().Send(x, 4, n, 0));
  RANK_EXPECT(!rank.all().Recv(x, 4, -1, 0));
  RANK_EXPECT_OK(rank.all().Barrier());
  return "";
}

// All ranks send to all, themselves included, before anyone receives, more
// than NCCL's buffers hold (4 MB, NCCL_BUFFSIZE); the buffer is overwritten at
// once.
std::string CrossingSends(Rank& rank) {
  constexpr int64_t kBytes = 3'000'000;
  constexpr int kMessages = 4;
  uint8_t* const data = rank.Upload(std::vector<uint8_t>(kBytes, 0));
  for (int m = 0; m < kMessages; ++m) {
    const std::vector<uint8_t> values(kBytes,
                                      static_cast<uint8_t>(rank.me() * 50 + m));
    for (int to = 0; to < rank.n(); ++to) {
      rank.device.Write(data, values.data(), {kBytes});
      RANK_EXPECT_OK(rank.all().Send(data, kBytes, to, 7));
      rank.device.Zero(data, {kBytes});
    }
  }
  RANK_EXPECT_OK(rank.all().Barrier());
  for (int from = rank.n() - 1; from >= 0; --from) {
    for (int m = 0; m < kMessages; ++m) {
      RANK_EXPECT_OK(rank.all().Recv(data, kBytes, from, 7));
      RANK_EXPECT(
          rank.Download(data, kBytes) ==
          std::vector<uint8_t>(kBytes, static_cast<uint8_t>(from * 50 + m)));
    }
  }
  RANK_EXPECT_OK(rank.world.Flush());
  return "";
}

std::string MessagesMatch(Rank& rank) {
  if (rank.n() < 2) return "";  // needs a pair
  std::vector<int> first_two = {1, 0};
  if (rank.me() > 1) return "";
  const int peer = 1 - rank.me();
  Communicator& pair = **rank.world.Group(first_two);
  Communicator& all = rank.all();
  if (rank.me() == 0) {
    RANK_EXPECT_OK(all.Send(rank.Upload(std::vector<int>{10}), 4, peer, 1));
    RANK_EXPECT_OK(all.Send(nullptr, 0, peer, 2));
    RANK_EXPECT_OK(pair.Send(rank.Upload(std::vector<int>{20}), 4, 0, 1));
    return "";
  }
  int* const got = rank.Upload(std::vector<int>{0});
  RANK_EXPECT_OK(pair.Recv(got, 4, 1, 1));
  RANK_EXPECT(rank.Download(got, 1)[0] == 20);
  RANK_EXPECT_OK(all.Recv(nullptr, 0, peer, 2));
  // Another size is refused and the message kept.
  const auto wrong = all.Recv(got, 3, peer, 1);
  RANK_EXPECT(!wrong && wrong.error().code == ErrorCode::kInvalidInput);
  RANK_EXPECT_OK(all.Recv(got, 4, peer, 1));
  RANK_EXPECT(rank.Download(got, 1)[0] == 10);
  return "";
}

// Round the ring, from one queue and into another, twice.
std::string MessagesInTurn(Rank& rank) {
  const int me = rank.me();
  const int next = (me + 1) % rank.n();
  const int previous = (me + rank.n() - 1) % rank.n();
  const std::vector<int64_t> sizes = {4000, 8, 5'000'000, 0, 12};
  std::vector<ChannelEnd> ends = {{1, me, next}};
  if (next != me) ends.push_back({1, previous, me});
  std::sort(ends.begin(), ends.end());
  RANK_EXPECT_OK(rank.all().OpenChannels(
      ends, std::vector<std::vector<int64_t>>(ends.size(), sizes)));
  const auto out = rank.device.MakeQueue(StreamRole::kSendForward);
  const auto in = rank.device.MakeQueue(StreamRole::kRecvForward);
  RANK_EXPECT_OK(out);
  RANK_EXPECT_OK(in);
  const auto bytes = [&](int from, size_t message) {
    return std::vector<uint8_t>(static_cast<size_t>(sizes[message]),
                                static_cast<uint8_t>(from * 20 + message + 1));
  };
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::vector<uint8_t*> sent;
    std::vector<uint8_t*> received;
    for (size_t m = 0; m < sizes.size(); ++m) {
      sent.push_back(rank.Upload(bytes(me, m)));
      received.push_back(rank.Upload(std::vector<uint8_t>(bytes(me, m))));
    }
    RANK_EXPECT_OK(rank.device.Synchronize());
    for (size_t m = 0; m < sizes.size(); ++m) {
      rank.device.UseQueue(*out);
      RANK_EXPECT_OK(rank.all().SendInTurn(sent[m], sizes[m], {1, me, next}));
      rank.device.UseQueue(*in);
      RANK_EXPECT_OK(
          rank.all().RecvInTurn(received[m], sizes[m], {1, previous, me}));
    }
    const auto came = rank.device.RecordEvent();
    RANK_EXPECT_OK(came);
    rank.device.UseQueue(0);
    rank.device.AwaitEvent(*came);
    for (size_t m = 0; m < sizes.size(); ++m) {
      const auto expected = bytes(previous, m);
      RANK_EXPECT(rank.Download(received[m], expected.size()) == expected);
    }
  }
  RANK_EXPECT_OK(rank.world.Flush());
  return "";
}

// Hands back the error that it met.
std::string OtherSizes(Rank& rank) {
  const std::vector<ChannelEnd> ends = {{0, 0, 1}};
  const std::vector<std::vector<int64_t>> sizes = {{4, rank.me() == 0 ? 4 : 8}};
  auto result = rank.all().OpenChannels(ends, sizes);
  // The receiver's GPU tells it; the sender may have gone on.
  if (result) result = rank.all().Barrier();
  RANK_EXPECT(!result && result.error().code == ErrorCode::kInvalidInput);
  return result.error().ToString();
}

// Hands back the error that it met, which may come to a rank that has not yet
// seen the end of the barrier.
std::string Aborted(Rank& rank) {
  if (auto barrier = rank.all().Barrier(); !barrier) {
    return barrier.error().ToString();
  }
  if (rank.me() == rank.n() - 1) rank.world.Abort("disk full");
  float* const x = rank.Upload(std::vector<float>{1});
  auto result = rank.all().AllReduce(x, 1, DType::kFloat32);
  if (result) result = rank.world.Flush();
  return result ? "no error" : result.error().ToString();
}

// What is behind an operation that was cut off runs in the end, and may use
// what its rank frees then.
std::string CutOff(Rank& rank) {
  RANK_EXPECT_OK(rank.all().Barrier());
  if (rank.me() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    return "";
  }
  float* const x = rank.Upload(std::vector<float>{1});
  RANK_EXPECT_OK(rank.all().AllReduce(x, 1, DType::kFloat32));
  std::atomic<bool> ran = false;
  rank.device.EnqueueOnHost([&]() -> Result<void> {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ran = true;
    return {};
  });
  rank.world.Abort("disk full");
  RANK_EXPECT(!rank.device.Synchronize());
  rank.device.WaitForAll();
  RANK_EXPECT(ran);
  return "";
}

std::string LateRank(Rank& rank) {
  if (auto barrier = rank.all().Barrier(); !barrier) return "barrier";
  rank.world.SetCurrentTask(Text("task", rank.me()));
  if (rank.me() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    return "";
  }
  const auto result = rank.all().Barrier();
  return result ? "no error" : result.error().ToString();
}

std::string KilledRank(Rank& rank) {
  if (auto barrier = rank.all().Barrier(); !barrier) return "barrier";
  if (rank.me() == 1) raise(SIGKILL);
  const auto result = rank.all().Barrier();
  if (result) return "no error";
  return Text(result.error().ToString(), " (of ",
              RankToldOf(result.error()).value_or(rank.me()), ")");
}

// Work of several communicators waits when a peer dies: what is sent on behind
// what never comes, and a sum of a communicator made earlier behind both.
std::string KilledBefore(Rank& rank) {
  const ChannelEnd in = {.channel = 0, .from = 1, .to = 0};
  const ChannelEnd out = {.channel = 1, .from = 0, .to = 1};
  const ChannelEnd ends[] = {in, out};
  const std::vector<int64_t> sizes[] = {{4}, {4}};
  if (auto barrier = rank.all().Barrier(); !barrier) return "barrier";
  if (auto opened = rank.all().OpenChannels(ends, sizes); !opened) {
    return opened.error().ToString();
  }
  if (auto barrier = rank.all().Barrier(); !barrier) return "barrier";
  if (rank.me() == 1) raise(SIGKILL);
  float* const x = rank.Upload(std::vector<float>{1});
  auto result = rank.all().RecvInTurn(x, 4, in);
  if (result) result = rank.all().SendInTurn(x, 4, out);
  if (result) result = rank.all().AllReduce(x, 1, DType::kFloat32);
  if (result) result = rank.world.Flush();
  rank.device.WaitForAll();
  return result ? "no error" : "ended";
}

// Stands still for longer than a round trip to its store may ever take.
std::string StoppedRankZero(Rank& rank) {
  RANK_EXPECT_OK(rank.all().Barrier());
  if (rank.me() == 0) {
    const std::string wake =
        Text("(sleep 15; kill -CONT ", getpid(), ") >/dev/null 2>&1 &");
    RANK_EXPECT(std::system(wake.c_str()) == 0);
    raise(SIGSTOP);
  }
  RANK_EXPECT_OK(rank.all().Barrier());
  return "";
}

struct Case {
  const char* name;
  std::string (*run)(Rank&);
};
constexpr Case kCases[] = {
    {"AllReduce", AllReduce},         {"ReduceScatter", ReduceScatter},
    {"AllGather", AllGather},         {"AllToAll", AllToAll},
    {"Broadcast", Broadcast},         {"Groups", Groups},
    {"BadArguments", BadArguments},   {"CrossingSends", CrossingSends},
    {"MessagesMatch", MessagesMatch}, {"MessagesInTurn", MessagesInTurn},
};
constexpr Case kFailureCases[] = {
    {"Aborted", Aborted},           {"CutOff", CutOff},
    {"LateRank", LateRank},         {"KilledRank", KilledRank},
    {"KilledBefore", KilledBefore}, {"StoppedRankZero", StoppedRankZero},
    {"OtherSizes", OtherSizes}};

// ---- The processes ----------------------------------------------------------

constexpr unsigned kAlarmSeconds = 150;

std::string RunCase(const std::string& name, int rank, int n, int port,
                    int listen_fd, double timeout) {
  StoreOptions store_options;
  store_options.port = port;
  store_options.rank = rank;
  store_options.size = n;
  store_options.listen_fd = rank == 0 ? listen_fd : -1;
  auto store = Store::Open(store_options);
  if (!store) return store.error().ToString();
  auto device = MakeCudaDevice(0);
  if (!device) return device.error().ToString();
  CommOptions options;
  options.timeout = Duration::FromSeconds(timeout);
  std::string waited_for;
  options.waiting = [&](const std::string& who) { waited_for += who; };
  // Rank 0 says so 5 s after it has come.
  const bool late = name == "LateToMeet";
  if (late && rank == 1) {
    const std::string key = NcclPrefix(1) + "came/0";
    for (Result<int64_t> came = 0; came && *came == 0;
         came = (*store)->Add(key, 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::this_thread::sleep_for(std::chrono::seconds(7));
  }
  auto world = MakeNcclWorld(rank, n, **store, **device, options);
  if (!world) return world.error().ToString();
  if (late) return waited_for;
  Rank here(**world, **device);
  for (const auto& cases :
       {std::span<const Case>(kCases), std::span<const Case>(kFailureCases)}) {
    for (const Case& one : cases) {
      if (name == one.name) return one.run(here);
    }
  }
  return "no such case";
}

// Not a test: what the other tests run as a rank. Its suite's name does not end
// in Test, so that tools/gpu_check.sh leaves it out.
TEST(NcclRank, Body) {
  const char* const arguments = std::getenv("TESSERA_NCCL_RANK");
  if (arguments == nullptr) GTEST_SKIP() << "run by the other tests";
  alarm(kAlarmSeconds);
  std::istringstream words(arguments);
  std::string name, path;
  int rank = 0, n = 0, port = 0, listen_fd = -1;
  double timeout = 0;
  words >> name >> rank >> n >> port >> listen_fd >> timeout >> path;
  ASSERT_TRUE(words) << arguments;
  const std::string result = RunCase(name, rank, n, port, listen_fd, timeout);
  std::ofstream(path) << result;
}

// What each rank handed back; "killed by signal S" for one that was.
std::vector<std::string> RunRanks(const std::string& name, int n,
                                  double timeout = 60) {
  const ListeningSocket socket = ListenOnLoopback().value();
  std::vector<pid_t> children;
  std::vector<std::string> paths;
  for (int rank = 0; rank < n; ++rank) {
    paths.push_back(
        Text(::testing::TempDir(), "nccl-", getpid(), "-", name, "-", rank));
    std::vector<std::string> environment = {
        Text("TESSERA_NCCL_RANK=", name, " ", rank, " ", n, " ", socket.port,
             " ", socket.fd, " ", timeout, " ", paths.back()),
        "NCCL_SOCKET_IFNAME=lo"};
    for (const Variable& variable : SharedGpuVariables(rank)) {
      environment.push_back(variable.name + "=" + variable.value);
    }
    std::vector<char*> pointers;
    for (std::string& entry : environment) pointers.push_back(entry.data());
    for (char** entry = environ; *entry != nullptr; ++entry) {
      if (std::strncmp(*entry, "NCCL_", 5) != 0) pointers.push_back(*entry);
    }
    pointers.push_back(nullptr);
    std::string program = "/proc/self/exe";
    std::string filter = "--gtest_filter=NcclRank.Body";
    std::string brief = "--gtest_brief=1";
    char* argv[] = {program.data(), filter.data(), brief.data(), nullptr};
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, program.c_str(), nullptr, nullptr, argv,
                          pointers.data()),
              0);
    children.push_back(pid);
  }
  close(socket.fd);
  std::vector<std::string> results;
  for (size_t r = 0; r < children.size(); ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    std::stringstream text;
    text << std::ifstream(paths[r]).rdbuf();
    unlink(paths[r].c_str());
    if (WIFSIGNALED(status)) {
      results.push_back(Text("killed by signal ", WTERMSIG(status)));
    } else if (status != 0) {
      results.push_back(Text(text.str(), " exit status ", status));
    } else {
      results.push_back(text.str());
    }
  }
  return results;
}

class NcclGpuTest : public ::testing::TestWithParam<std::tuple<Case, int>> {
 protected:
  // For the log, and for tools/gpu_check.sh.
  static void SetUpTestSuite() {
    std::cout << "NCCL " << NcclVersion() << std::endl;
  }
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, NcclGpuTest,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Range(1, 4)),
                         [](const auto& info) {
                           return Text(std::get<0>(info.param).name,
                                       std::get<1>(info.param));
                         });

TEST_P(NcclGpuTest, Conforms) {
  const auto [one, n] = GetParam();
  const auto results = RunRanks(one.name, n);
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_EQ(results[r], "") << "rank " << r;
  }
}

class NcclFailureGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(NcclFailureGpuTest, AbortReachesEveryone) {
  for (const std::string& result : RunRanks("Aborted", 2)) {
    EXPECT_THAT(result, HasSubstr("rank 1 aborted: disk full"));
  }
}

TEST_F(NcclFailureGpuTest, WorkBehindWhatWasCutOffIsWaitedFor) {
  EXPECT_EQ(RunRanks("CutOff", 2)[0], "");
}

TEST_F(NcclFailureGpuTest, SidesOfAChannelMustExpectTheSame) {
  for (const std::string& result : RunRanks("OtherSizes", 2)) {
    EXPECT_THAT(result, HasSubstr("ranks disagree: rank 0"));
  }
}

TEST_F(NcclFailureGpuTest, TimeoutNamesRankOperationAndTask) {
  const auto results = RunRanks("LateRank", 2, /*timeout=*/2);
  EXPECT_THAT(results[0], HasSubstr("rank 0, in task 'task0', barrier"));
  EXPECT_THAT(results[0], HasSubstr("group {0,1}"));
  EXPECT_THAT(results[0], HasSubstr("waited longer than 2 s"));
}

TEST_F(NcclFailureGpuTest, ARankThatHasNotComeIsNamed) {
  EXPECT_THAT(RunRanks("LateToMeet", 2), ElementsAre("rank 1", ""));
}

// Who waits asks its store again and again.
TEST_F(NcclFailureGpuTest, AStoppedRankZeroIsWaitedFor) {
  for (const std::string& result : RunRanks("StoppedRankZero", 2)) {
    EXPECT_EQ(result, "");
  }
}

TEST_F(NcclFailureGpuTest, AKilledRankEndsTheOthers) {
  const auto results = RunRanks("KilledRank", 2, /*timeout=*/20);
  EXPECT_EQ(results[1], Text("killed by signal ", SIGKILL));
  EXPECT_THAT(results[0], HasSubstr("barrier of "));
}

// A rank that hangs is killed by its alarm.
TEST_F(NcclFailureGpuTest, AKilledRankEndsWorkOfSeveralCommunicators) {
  EXPECT_EQ(RunRanks("KilledBefore", 2, /*timeout=*/20)[0], "ended");
}

// NCCL does not say who died, which the store does.
TEST_F(NcclFailureGpuTest, AFailureNamesTheRankThatDied) {
  const auto results = RunRanks("KilledRank", 3, /*timeout=*/20);
  EXPECT_THAT(results[0], HasSubstr("(of 1)"));
  EXPECT_THAT(results[2], HasSubstr("(of 1)"));
}

}  // namespace
}  // namespace tessera
