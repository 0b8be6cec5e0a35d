// One conformance suite over every kind of world.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>

#include "planner/base/rng.h"
#include "runtime/comm/loopback_world.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/store.h"
#include "runtime/comm/text.h"
#include "runtime/comm/thread_world.h"
#include "runtime/float16.h"
#include "tests/support/queue_cpu_device.h"
#include "tests/support/rank_expect.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

enum class Kind { kThreads, kShm, kLoopback };

std::string NameOf(Kind kind) {
  return kind == Kind::kThreads ? "Threads"
         : kind == Kind::kShm   ? "Shm"
                                : "Loopback";
}

// What a rank found wrong; empty if nothing.
using RankBody = std::function<std::string(CommWorld&)>;

std::vector<std::string> RunThreads(int n, const RankBody& body,
                                    CommOptions options) {
  auto worlds = MakeThreadWorlds(n, options);
  std::vector<std::string> results(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back([&, r] {
      const auto world = std::move(worlds[r]);
      results[r] = body(*world);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// A world whose operations are enqueued, as one whose operations have run when
// they return.
class WaitingCommunicator : public Communicator {
 public:
  WaitingCommunicator(Communicator& inner, QueueDevice& device)
      : inner_(inner), device_(device) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Result<void> AllReduce(void* data, int64_t count, DType dtype) override {
    return Wait(inner_.AllReduce(data, count, dtype));
  }
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes_per_rank) override {
    return Wait(inner_.AllGather(send, send_bytes, recv, bytes_per_rank));
  }
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts_per_rank,
                             DType dtype) override {
    return Wait(inner_.ReduceScatter(send, recv, counts_per_rank, dtype));
  }
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override {
    return Wait(inner_.AllToAll(send, send_bytes, recv, recv_bytes));
  }
  Result<void> Broadcast(void* data, int64_t bytes, int root) override {
    return Wait(inner_.Broadcast(data, bytes, root));
  }
  Result<void> Barrier() override { return inner_.Barrier(); }
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return Wait(inner_.Send(data, bytes, peer, tag));
  }
  Result<void> Recv(void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return Wait(inner_.Recv(data, bytes, peer, tag));
  }

 private:
  Result<void> Wait(Result<void> enqueued) {
    return enqueued ? device_.Synchronize() : enqueued;
  }

  Communicator& inner_;
  QueueDevice& device_;
};

class WaitingWorld : public CommWorld {
 public:
  WaitingWorld(std::unique_ptr<CommWorld> inner, QueueDevice& device)
      : inner_(std::move(inner)), device_(device) {}

  int world_rank() const override { return inner_->world_rank(); }
  int world_size() const override { return inner_->world_size(); }
  Result<Communicator*> Group(std::span<const int> ranks) override {
    TESSERA_TRY(Communicator* const group, inner_->Group(ranks));
    auto& made = groups_[group];
    if (made == nullptr) {
      made = std::make_unique<WaitingCommunicator>(*group, device_);
    }
    return made.get();
  }
  Result<void> Flush() override { return inner_->Flush(); }
  void Abort(std::string_view reason) override { inner_->Abort(reason); }
  void SetCurrentTask(std::string_view task) override {
    inner_->SetCurrentTask(task);
  }

 private:
  const std::unique_ptr<CommWorld> inner_;
  QueueDevice& device_;
  std::map<Communicator*, std::unique_ptr<WaitingCommunicator>> groups_;
};

std::vector<std::string> RunLoopback(int n, const RankBody& body,
                                     CommOptions options) {
  std::vector<std::unique_ptr<QueueCpuDevice>> devices;
  std::vector<QueueDevice*> pointers;
  for (int r = 0; r < n; ++r) {
    devices.push_back(
        std::make_unique<QueueCpuDevice>(static_cast<uint64_t>(r)));
    pointers.push_back(devices.back().get());
  }
  auto worlds = MakeLoopbackWorlds(pointers, options);
  std::vector<std::string> results(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back([&, r] {
      WaitingWorld world(std::move(worlds[r]), *pointers[r]);
      results[r] = body(world);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::string RunShmRank(int rank, int n, const ListeningSocket& socket,
                       const RankBody& body, CommOptions options) {
  StoreOptions store_options;
  store_options.port = socket.port;
  store_options.rank = rank;
  store_options.size = n;
  store_options.listen_fd = rank == 0 ? socket.fd : -1;
  auto store = Store::Open(store_options);
  if (!store) return store.error().ToString();
  auto world = MakeShmWorld(rank, n, **store, options);
  if (!world) return world.error().ToString();
  store->reset();
  return body(**world);
}

// A rank that is killed yields "killed".
std::vector<std::string> RunProcesses(int n, const RankBody& body,
                                      CommOptions options) {
  const ListeningSocket socket = ListenOnLoopback().value();
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (int rank = 0; rank < n; ++rank) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      if (rank != 0) close(socket.fd);
      const std::string result = RunShmRank(rank, n, socket, body, options);
      const ssize_t written = write(ends[1], result.data(), result.size());
      _exit(written == static_cast<ssize_t>(result.size()) ? 0 : 1);
    }
    close(ends[1]);
    children.push_back(pid);
    pipes.push_back(ends[0]);
  }
  close(socket.fd);
  std::vector<std::string> results;
  for (size_t r = 0; r < children.size(); ++r) {
    std::string result;
    char buffer[4096];
    for (ssize_t got; (got = read(pipes[r], buffer, sizeof(buffer))) > 0;) {
      result.append(buffer, static_cast<size_t>(got));
    }
    close(pipes[r]);
    results.push_back(result);
  }
  // Reaped last, so that peers see the dead as zombies, as under launchers
  // that wait for the first rank first.
  for (size_t r = 0; r < children.size(); ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    if (WIFSIGNALED(status)) {
      results[r] = "killed";
    } else if (status != 0) {
      results[r] += Text(" exit status ", status);
    }
  }
  return results;
}

std::vector<std::string> RunRanks(Kind kind, int n, const RankBody& body,
                                  CommOptions options = {}) {
  switch (kind) {
    case Kind::kThreads:
      return RunThreads(n, body, options);
    case Kind::kShm:
      return RunProcesses(n, body, options);
    case Kind::kLoopback:
      return RunLoopback(n, body, options);
  }
  return {};
}

void ExpectAllRanks(Kind kind, int n, const RankBody& body) {
  const auto results = RunRanks(kind, n, body);
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_EQ(results[r], "") << "rank " << r;
  }
}

std::vector<int> Iota(int n) {
  std::vector<int> ranks(static_cast<size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Communicator& All(CommWorld& world) {
  return **world.Group(Iota(world.world_size()));
}

// Element `i` of rank `rank`'s data: of mixed signs and magnitudes, so that
// the order of a sum shows in its bits.
template <typename T>
T Element(int rank, int64_t i) {
  const double x =
      CounterNormal(static_cast<uint64_t>(rank) + 1, static_cast<uint64_t>(i));
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(x * 1000);
  } else {
    return static_cast<T>(x * ((i + rank) % 3 == 0 ? 1e4 : 1.0));
  }
}

template <typename T>
std::vector<T> Elements(int rank, int64_t count) {
  std::vector<T> data(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    data[static_cast<size_t>(i)] = Element<T>(rank, i);
  }
  return data;
}

// ((r0 + r1) + r2) + ... of the given ranks.
template <typename T>
std::vector<T> SerialSum(std::span<const int> ranks, int64_t count) {
  std::vector<T> sum = Elements<T>(ranks[0], count);
  for (const int r : ranks.subspan(1)) {
    const std::vector<T> more = Elements<T>(r, count);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
  }
  return sum;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() ||
          std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

int64_t Total(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Sizes around the limits of region.cc: at once, within a round, several
// rounds with a ragged last one; 300,001 floats are 1.2 MB.
constexpr int64_t kCounts[] = {0, 1, 5, 4096, 4097, 70'001, 300'001};

// Ragged, with an empty piece where there are several ranks.
std::vector<int64_t> RaggedCounts(int n, int64_t scale) {
  std::vector<int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(r == 1 ? 0 : scale * r + 3);
  return counts;
}

class CommTest : public ::testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  Kind kind() const { return std::get<0>(GetParam()); }
  int n() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, CommTest,
                         ::testing::Combine(::testing::Values(Kind::kThreads,
                                                              Kind::kShm,
                                                              Kind::kLoopback),
                                            ::testing::Range(1, 6)),
                         [](const auto& info) {
                           return Text(NameOf(std::get<0>(info.param)),
                                       std::get<1>(info.param));
                         });

template <typename T>
std::string CheckAllReduce(CommWorld& world, DType dtype) {
  const std::vector<int> ranks = Iota(world.world_size());
  for (const int64_t count : kCounts) {
    std::vector<T> data = Elements<T>(world.world_rank(), count);
    RANK_EXPECT_OK(All(world).AllReduce(data.data(), count, dtype));
    RANK_EXPECT(SameBits(data, SerialSum<T>(ranks, count)));
  }
  return "";
}

// Of 16-bit types the serial sum is that of fp32, rounded once.
std::string CheckAllReduce16Bit(CommWorld& world, DType dtype) {
  const auto narrow = [dtype](const std::vector<float>& values) {
    std::vector<uint16_t> narrowed(values.size());
    Narrow(values.data(), std::ssize(values), dtype, narrowed.data());
    return narrowed;
  };
  for (const int64_t count : kCounts) {
    std::vector<float> sum(static_cast<size_t>(count));
    for (int rank = 0; rank < world.world_size(); ++rank) {
      std::vector<float> term(sum.size());
      const auto stored = narrow(Elements<float>(rank, count));
      Widen(stored.data(), dtype, count, term.data());
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] = rank == 0 ? term[i] : sum[i] + term[i];
      }
    }
    auto data = narrow(Elements<float>(world.world_rank(), count));
    RANK_EXPECT_OK(All(world).AllReduce(data.data(), count, dtype));
    RANK_EXPECT(data == narrow(sum));
  }
  return "";
}

TEST_P(CommTest, AllReduceIsTheSerialSumBitForBit) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    std::string wrong = CheckAllReduce<float>(world, DType::kFloat32);
    if (wrong.empty()) wrong = CheckAllReduce<double>(world, DType::kFloat64);
    if (wrong.empty()) wrong = CheckAllReduce<int32_t>(world, DType::kInt32);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      if (wrong.empty()) wrong = CheckAllReduce16Bit(world, dtype);
    }
    return wrong;
  });
}

TEST_P(CommTest, ReduceScatterEqualsAllReduce) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    const auto me = static_cast<size_t>(world.world_rank());
    for (const int64_t scale : {1, 1000, 60'000}) {
      const std::vector<int64_t> counts = RaggedCounts(n, scale);
      const int64_t begin = Total(std::span(counts).first(me));
      std::vector<float> send =
          Elements<float>(world.world_rank(), Total(counts));
      const std::vector<float> sum = SerialSum<float>(Iota(n), Total(counts));
      const std::vector<float> expected(sum.begin() + begin,
                                        sum.begin() + begin + counts[me]);
      std::vector<float> recv(expected.size());
      RANK_EXPECT_OK(All(world).ReduceScatter(send.data(), recv.data(), counts,
                                              DType::kFloat32));
      RANK_EXPECT(SameBits(recv, expected));
      // In place.
      RANK_EXPECT_OK(All(world).ReduceScatter(send.data(), send.data() + begin,
                                              counts, DType::kFloat32));
      recv.assign(send.begin() + begin, send.begin() + begin + counts[me]);
      RANK_EXPECT(SameBits(recv, expected));
    }
    return "";
  });
}

TEST_P(CommTest, AllGatherConcatenatesRaggedPieces) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    const auto me = static_cast<size_t>(world.world_rank());
    for (const int64_t scale : {1, 1000, 400'001}) {  // up to 1.6 MB
      const std::vector<int64_t> counts = RaggedCounts(n, scale);
      std::vector<uint8_t> expected;
      for (int r = 0; r < n; ++r) {
        for (int64_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) {
          expected.push_back(static_cast<uint8_t>(r * 37 + i % 251));
        }
      }
      const int64_t begin = Total(std::span(counts).first(me));
      const std::vector<uint8_t> send(expected.begin() + begin,
                                      expected.begin() + begin + counts[me]);
      std::vector<uint8_t> recv(expected.size());
      RANK_EXPECT_OK(
          All(world).AllGather(send.data(), counts[me], recv.data(), counts));
      RANK_EXPECT(recv == expected);
      // In place.
      std::fill(recv.begin(), recv.end(), 0);
      std::copy(send.begin(), send.end(), recv.begin() + begin);
      RANK_EXPECT_OK(All(world).AllGather(recv.data() + begin, counts[me],
                                          recv.data(), counts));
      RANK_EXPECT(recv == expected);
    }
    return "";
  });
}

TEST_P(CommTest, AllToAllExchangesRaggedPieces) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    const int me = world.world_rank();
    for (const int64_t scale : {0, 1, 90'001}) {
      const auto bytes = [&](int from, int to) {
        return (from + to) % 3 == 1 ? 0 : scale * (from + 2 * to);
      };
      const auto byte = [](int from, int to, int64_t i) {
        return static_cast<uint8_t>(from * 16 + to + i % 97);
      };
      std::vector<int64_t> send_bytes, recv_bytes;
      std::vector<uint8_t> send, expected;
      for (int r = 0; r < n; ++r) {
        send_bytes.push_back(bytes(me, r));
        recv_bytes.push_back(bytes(r, me));
        for (int64_t i = 0; i < bytes(me, r); ++i) {
          send.push_back(byte(me, r, i));
        }
        for (int64_t i = 0; i < bytes(r, me); ++i) {
          expected.push_back(byte(r, me, i));
        }
      }
      std::vector<uint8_t> recv(expected.size());
      RANK_EXPECT_OK(All(world).AllToAll(send.data(), send_bytes, recv.data(),
                                         recv_bytes));
      RANK_EXPECT(recv == expected);
    }
    return "";
  });
}

TEST_P(CommTest, BroadcastFromEveryRoot) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    for (int root = 0; root < world.world_size(); ++root) {
      for (const int64_t count : kCounts) {
        std::vector<float> data = Elements<float>(world.world_rank(), count);
        RANK_EXPECT_OK(All(world).Broadcast(data.data(), count * 4, root));
        RANK_EXPECT(SameBits(data, Elements<float>(root, count)));
      }
    }
    return "";
  });
}

// Every pair and the whole, in ascending and descending order, many times and
// without barriers between them.
TEST_P(CommTest, GroupsInterleave) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    const int me = world.world_rank();
    for (int repeat = 0; repeat < 20; ++repeat) {
      for (int a = 0; a < n; ++a) {
        for (int b = 0; b < n; ++b) {
          if (a == b || (a != me && b != me)) continue;
          const std::vector<int> ranks = {a, b};
          auto group = world.Group(ranks);
          RANK_EXPECT_OK(group);
          RANK_EXPECT((*group)->rank() == (a == me ? 0 : 1));
          RANK_EXPECT(*group == *world.Group(ranks));
          const int64_t count = repeat % 2 == 0 ? 10 : 20'000;
          std::vector<float> data = Elements<float>(me, count);
          RANK_EXPECT_OK(
              (*group)->AllReduce(data.data(), count, DType::kFloat32));
          RANK_EXPECT(SameBits(data, SerialSum<float>(ranks, count)));
        }
      }
      std::vector<int> ranks = Iota(n);
      std::reverse(ranks.begin(), ranks.end());
      auto group = world.Group(ranks);
      RANK_EXPECT_OK(group);
      std::vector<float> data = Elements<float>(me, 1000);
      RANK_EXPECT_OK((*group)->AllReduce(data.data(), 1000, DType::kFloat32));
      RANK_EXPECT(SameBits(data, SerialSum<float>(ranks, 1000)));
    }
    return "";
  });
}

// A thread for every pair, one for the whole in descending order, and one that
// sends and one that receives round the ring: no order holds between them, and
// messages exceed the rings.
TEST_P(CommTest, GroupsRunBesideEachOther) {
  if (kind() == Kind::kLoopback) return;  // belongs to one thread
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    const int me = world.world_rank();
    constexpr int kRepeats = 5;
    std::vector<std::function<std::string()>> bodies;
    std::vector<std::vector<int>> groups;
    for (int other = 0; other < n; ++other) {
      if (other == me) continue;
      groups.push_back({std::min(me, other), std::max(me, other)});
    }
    groups.push_back(Iota(n));
    std::reverse(groups.back().begin(), groups.back().end());
    for (const std::vector<int>& ranks : groups) {
      bodies.push_back([&world, me, ranks]() -> std::string {
        auto group = world.Group(ranks);
        RANK_EXPECT_OK(group);
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
          const int64_t count = repeat % 2 == 0 ? 10 : 20'000;
          std::vector<float> data = Elements<float>(me, count);
          RANK_EXPECT_OK(
              (*group)->AllReduce(data.data(), count, DType::kFloat32));
          RANK_EXPECT(SameBits(data, SerialSum<float>(ranks, count)));
        }
        return "";
      });
    }
    const int64_t large = 400'000;
    Communicator& all = All(world);
    bodies.push_back([&all, me, n]() -> std::string {
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const std::vector<float> data = Elements<float>(me + repeat, large);
        RANK_EXPECT_OK(
            all.Send(data.data(), 4 * large, (me + 1) % n, repeat % 2));
      }
      return "";
    });
    // One thread for each tag.
    for (int tag = 0; tag < 2; ++tag) {
      bodies.push_back([&all, me, n, tag]() -> std::string {
        const int from = (me + n - 1) % n;
        std::vector<float> data(large);
        for (int repeat = tag; repeat < kRepeats; repeat += 2) {
          RANK_EXPECT_OK(all.Recv(data.data(), 4 * large, from, tag));
          RANK_EXPECT(SameBits(data, Elements<float>(from + repeat, large)));
        }
        return "";
      });
    }
    std::vector<std::string> results(bodies.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < bodies.size(); ++i) {
      threads.emplace_back([&, i] { results[i] = bodies[i](); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& result : results) {
      if (!result.empty()) return result;
    }
    RANK_EXPECT_OK(world.Flush());
    return "";
  });
}

TEST_P(CommTest, GroupsAreChecked) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int me = world.world_rank();
    const int n = world.world_size();
    RANK_EXPECT(!world.Group(std::vector<int>{me, n}));
    RANK_EXPECT(!world.Group(std::vector<int>{me, -1}));
    RANK_EXPECT(!world.Group(std::vector<int>{me, me}));
    RANK_EXPECT(!world.Group(std::vector<int>{}));
    RANK_EXPECT(n == 1 || !world.Group(std::vector<int>{(me + 1) % n}));
    // What is wrong by itself is an error and harms nothing.
    float x = 1;
    const std::vector<int64_t> counts(static_cast<size_t>(n) + 1, 1);
    RANK_EXPECT(!All(world).AllReduce(&x, -1, DType::kFloat32));
    RANK_EXPECT(!All(world).ReduceScatter(&x, &x, counts, DType::kFloat32));
    RANK_EXPECT(!All(world).AllGather(&x, 4, &x, counts));
    RANK_EXPECT(!All(world).Broadcast(&x, 4, n));
    RANK_EXPECT(!All(world).Send(&x, 4, n, 0));
    RANK_EXPECT(!All(world).Recv(&x, 4, -1, 0));
    RANK_EXPECT_OK(All(world).Barrier());
    return "";
  });
}

// All ranks send to all ranks, themselves included, before anyone receives;
// 40 messages of 100 KB are four times a ring of 1 MB.
TEST_P(CommTest, CrossingSendsLargerThanTheRing) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int n = world.world_size();
    Communicator& all = All(world);
    constexpr int kMessages = 40;
    constexpr int64_t kBytes = 100'000;
    std::vector<uint8_t> data(kBytes);
    for (int m = 0; m < kMessages; ++m) {
      for (int to = 0; to < n; ++to) {
        std::fill(data.begin(), data.end(),
                  static_cast<uint8_t>(all.rank() * 50 + m));
        RANK_EXPECT_OK(all.Send(data.data(), kBytes, to, 7));
      }
    }
    RANK_EXPECT_OK(all.Barrier());
    for (int from = n - 1; from >= 0; --from) {
      for (int m = 0; m < kMessages; ++m) {
        RANK_EXPECT_OK(all.Recv(data.data(), kBytes, from, 7));
        RANK_EXPECT(data.front() == static_cast<uint8_t>(from * 50 + m));
        RANK_EXPECT(data.back() == data.front());
      }
    }
    RANK_EXPECT_OK(world.Flush());
    return "";
  });
}

TEST_P(CommTest, AThousandCrossingSends) {
  if (n() < 2) return;  // needs a pair
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int peer = world.world_rank() ^ 1;
    if (peer >= world.world_size()) return "";
    Communicator& all = All(world);
    const int64_t count = 3000;  // 1000 x 12 KB are twelve rings of 1 MB
    std::vector<float> data;
    for (int m = 0; m < 1000; ++m) {
      data = Elements<float>(m, 3);
      data.resize(count, static_cast<float>(m));
      RANK_EXPECT_OK(all.Send(data.data(), count * 4, peer, m % 5));
    }
    // In another order than they were sent.
    for (int tag = 4; tag >= 0; --tag) {
      for (int m = tag; m < 1000; m += 5) {
        RANK_EXPECT_OK(all.Recv(data.data(), count * 4, peer, tag));
        RANK_EXPECT(data[0] == Element<float>(m, 0));
        RANK_EXPECT(data[count - 1] == static_cast<float>(m));
      }
    }
    return world.Flush() ? "" : "flush";
  });
}

TEST_P(CommTest, MessagesMatchByGroupAndTag) {
  if (n() < 2) return;  // needs a pair
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    if (world.world_rank() > 1) return "";
    const int peer = 1 - world.world_rank();
    Communicator& all = All(world);
    Communicator& pair = **world.Group(std::vector<int>{1, 0});
    RANK_EXPECT(pair.rank() == peer);
    const int in_all = 10, in_pair = 20;
    int got = 0;
    if (world.world_rank() == 0) {
      RANK_EXPECT_OK(all.Send(&in_all, 4, peer, 1));
      RANK_EXPECT_OK(all.Send(nullptr, 0, peer, 2));
      RANK_EXPECT_OK(pair.Send(&in_pair, 4, 0, 1));
    } else {
      RANK_EXPECT_OK(pair.Recv(&got, 4, 1, 1));
      RANK_EXPECT(got == 20);
      RANK_EXPECT_OK(all.Recv(nullptr, 0, peer, 2));
      // Another size is refused and the message kept.
      const auto wrong = all.Recv(&got, 3, peer, 1);
      RANK_EXPECT(!wrong && wrong.error().code == ErrorCode::kInvalidInput);
      RANK_EXPECT(wrong.error().message.find("sent 4 bytes") !=
                  std::string::npos);
      RANK_EXPECT_OK(all.Recv(&got, 4, peer, 1));
      RANK_EXPECT(got == 10);
    }
    return "";
  });
}

// The oldest message is refused for its size while the one behind it, of the
// same tag, has the size that is waited for.
TEST_P(CommTest, ARefusedReceiveTakesNoLaterMessage) {
  if (n() < 2) return;  // needs a pair
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    Communicator& all = All(world);
    const std::string first(100, 'A'), second(50, 'B');
    if (world.world_rank() == 0) {
      RANK_EXPECT_OK(all.Send(first.data(), 100, 1, 7));
      RANK_EXPECT_OK(all.Send(second.data(), 50, 1, 7));
    }
    RANK_EXPECT_OK(all.Barrier());
    if (world.world_rank() != 1) return "";
    const std::string untouched(50, 'z');
    std::string refused = untouched;
    const auto wrong = all.Recv(refused.data(), 50, 0, 7);
    RANK_EXPECT(!wrong && wrong.error().code == ErrorCode::kInvalidInput);
    std::string got(100, 'z');
    RANK_EXPECT_OK(all.Recv(got.data(), 100, 0, 7));
    RANK_EXPECT(got == first);
    got = untouched;
    RANK_EXPECT_OK(all.Recv(got.data(), 50, 0, 7));
    RANK_EXPECT(got == second);
    RANK_EXPECT(refused == untouched);
    return "";
  });
}

// Two channels to every rank, this one too, and messages of them by turns;
// those of one channel come in its order, whatever happens in the other.
TEST_P(CommTest, MessagesComeInTurn) {
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    const int me = world.world_rank();
    Communicator& all = All(world);
    std::set<ChannelEnd> ends;
    for (int peer = 0; peer < world.world_size(); ++peer) {
      for (int channel : {0, 1}) {
        ends.insert({channel, me, peer});
        ends.insert({channel, peer, me});
      }
    }
    const std::vector<ChannelEnd> list(ends.begin(), ends.end());
    RANK_EXPECT_OK(all.OpenChannels(
        list, std::vector<std::vector<int64_t>>(list.size(), {4, 8})));
    for (int peer = 0; peer < world.world_size(); ++peer) {
      for (const int message : {0, 1}) {
        for (int channel : {0, 1}) {
          const int data[2] = {100 * me + 10 * channel + message, me};
          RANK_EXPECT_OK(
              all.SendInTurn(data, 4 + 4 * message, {channel, me, peer}));
        }
      }
    }
    for (int peer = world.world_size() - 1; peer >= 0; --peer) {
      for (int channel : {1, 0}) {
        for (const int message : {0, 1}) {
          int got[2] = {-1, peer};
          RANK_EXPECT_OK(
              all.RecvInTurn(got, 4 + 4 * message, {channel, peer, me}));
          RANK_EXPECT(got[0] == 100 * peer + 10 * channel + message);
          RANK_EXPECT(got[1] == peer);
        }
      }
    }
    return world.Flush() ? "" : "flush";
  });
}

// A rank that only flushes and one that only waits in a collective of others
// still move what is between them.
TEST_P(CommTest, FlushIsHelpedByWaitingPeers) {
  if (n() < 2) return;  // needs a pair
  ExpectAllRanks(kind(), n(), [](CommWorld& world) -> std::string {
    Communicator& all = All(world);
    std::vector<char> data(5 << 20, 'x');
    const auto bytes = static_cast<int64_t>(data.size());
    if (all.rank() == 0) {
      RANK_EXPECT_OK(all.Send(data.data(), bytes, 1, 0));
      RANK_EXPECT_OK(world.Flush());
    }
    RANK_EXPECT_OK(all.Barrier());
    if (all.rank() == 1) {
      data.assign(data.size(), ' ');
      RANK_EXPECT_OK(all.Recv(data.data(), bytes, 0, 0));
      RANK_EXPECT(data == std::vector<char>(data.size(), 'x'));
    }
    return "";
  });
}

// ---- Failures
// -----------------------------------------------------------------

// What a launcher is to know of an error: whom it tells of, if of one rank.
std::string Told(const Error& error) {
  const std::optional<int> rank = RankToldOf(error);
  return Text(error.ToString(), rank ? Text(" (of ", *rank, ")") : "");
}

// The last rank aborts; whatever the others wait in, they return the reason,
// and go on returning it.
TEST_P(CommTest, AbortReachesEveryone) {
  const auto results = RunRanks(kind(), n(), [](CommWorld& world) {
    Communicator& all = All(world);
    float x = 0;
    if (world.world_rank() == world.world_size() - 1) {
      world.Abort("disk full");
    }
    const auto result = world.world_rank() == 1
                            ? all.Recv(&x, 4, 0, 0)
                            : all.AllReduce(&x, 1, DType::kFloat32);
    const auto again = world.Flush();
    if (result || again) return std::string("no error");
    if (result.error().code != ErrorCode::kUnavailable ||
        again.error().message != result.error().message) {
      return Text("another error: ", again.error().ToString());
    }
    return Told(result.error());
  });
  for (const std::string& result : results) {
    EXPECT_THAT(result,
                HasSubstr(Text("rank ", n() - 1, " aborted: disk full (of ",
                               n() - 1, ")")));
  }
}

class FailureTest : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Worlds, FailureTest,
                         ::testing::Values(Kind::kThreads, Kind::kShm,
                                           Kind::kLoopback),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(FailureTest, TimeoutNamesRankOperationAndTask) {
  CommOptions options;
  options.timeout = Duration::FromSeconds(0.3);
  std::atomic<bool> done = false;  // keeps the late thread from leaving early
  const auto results = RunRanks(
      GetParam(), 2,
      [&](CommWorld& world) {
        world.SetCurrentTask(Text("task", world.world_rank()));
        if (world.world_rank() == 1) {
          for (int i = 0; i < 50 && !done; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }
          return std::string();
        }
        const auto result = All(world).Barrier();
        done = true;
        return result ? "no error" : Told(result.error());
      },
      options);
  EXPECT_EQ(results[0],
            "rank 0, barrier of group {0,1}: rank 0 waited longer than 0.3 s "
            "for rank 1 (in task 'task1') (of 0)");
}

// A disagreement is bad input on whichever rank it shows first, on those that
// are told of it, and in what they do next.
TEST_P(FailureTest, DisagreementIsAnError) {
  const auto results = RunRanks(GetParam(), 3, [](CommWorld& world) {
    float x[2] = {};
    const auto result = All(world).AllReduce(x, world.world_rank() == 2 ? 2 : 1,
                                             DType::kFloat32);
    const auto next = All(world).Barrier();
    RANK_EXPECT(!result && result.error().code == ErrorCode::kInvalidInput);
    RANK_EXPECT(!next && next.error().code == ErrorCode::kInvalidInput);
    RANK_EXPECT(next.error().message == result.error().message);
    return Told(result.error());
  });
  for (const std::string& result : results) {
    EXPECT_THAT(result, HasSubstr("ranks disagree: rank "));
    EXPECT_THAT(result, HasSubstr("all-reduce of 8 bytes"));
    EXPECT_THAT(result, Not(HasSubstr("(of ")));
  }
}

TEST_P(FailureTest, AllToAllSizesAreCompared) {
  const auto results = RunRanks(GetParam(), 2, [](CommWorld& world) {
    char send[8] = {}, recv[8] = {};
    const std::vector<int64_t> four = {4, 4}, wrong = {3, 4};
    const auto result = All(world).AllToAll(
        send, four, recv, world.world_rank() == 1 ? wrong : four);
    const auto next = All(world).Barrier();  // rank 0 may have been served
    RANK_EXPECT(result || result.error().code == ErrorCode::kInvalidInput);
    RANK_EXPECT(!next && next.error().code == ErrorCode::kInvalidInput);
    return next.error().ToString();
  });
  for (const std::string& result : results) {
    EXPECT_THAT(result, HasSubstr("rank 0 sends 4 bytes to rank 1, which "
                                  "expects 3"));
  }
}

TEST_P(FailureTest, WaitingForARankThatLeftIsAnError) {
  const auto results = RunRanks(GetParam(), 3, [](CommWorld& world) {
    const int value = 5;
    int got = 0;
    if (world.world_rank() == 2) {
      (void)All(world).Send(&value, 4, 0, 0);
      return std::string();
    }
    if (world.world_rank() == 1) return std::string();
    // What was sent before is still there.
    if (!All(world).Recv(&got, 4, 2, 0) || got != 5) return std::string("lost");
    const auto result = All(world).Recv(&got, 4, 2, 0);
    return result ? "no error" : Told(result.error());
  });
  EXPECT_THAT(results[0], HasSubstr("rank 2 has left the job, and rank 0 "
                                    "waits for it (of 2)"));
}

// Also where the others wait in different operations, and one of them for a
// rank that is well.
TEST(ShmWorldTest, AKilledRankIsNamedWithItsTask) {
  const auto start = steady_clock::now();
  const auto results = RunRanks(Kind::kShm, 4, [](CommWorld& world) {
    Communicator& all = All(world);
    float x = 0;
    if (!all.Barrier()) return std::string("barrier");
    world.SetCurrentTask(Text("backward.", world.world_rank()));
    if (world.world_rank() == 2) {
      world.SetCurrentTask("block.3.mlp.backward");
      raise(SIGKILL);
    }
    const auto result = world.world_rank() == 0
                            ? all.Recv(&x, 4, 1, 0)
                            : all.AllReduce(&x, 1, DType::kFloat32);
    if (result) return std::string("no error");
    RANK_EXPECT(TaskOfDead(result.error()) == "in task 'block.3.mlp.backward'");
    return Told(result.error());
  });
  EXPECT_EQ(results[2], "killed");
  for (const size_t r : {0, 1, 3}) {
    EXPECT_THAT(results[r], HasSubstr(Text("rank ", r, ", ")));
    EXPECT_THAT(results[r], HasSubstr("rank 2 (pid "));
    EXPECT_THAT(results[r],
                HasSubstr(") died in task 'block.3.mlp.backward' (of 2)"));
  }
  // Not by the time limit of ten minutes.
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(60));
}

// Of ranks that wait for each other the one is named that does not wait, by one
// rank.
// Memory that the ranks of RunProcesses share.
template <typename T>
struct Shared {
  T* const value =
      static_cast<T*>(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ~Shared() { munmap(value, sizeof(T)); }
};

// Of each stall one rank tells, and ranks 0 and 1 wait for rank 2 until then.
TEST(ShmWorldTest, ARankThatStallsIsNamedOnce) {
  const Shared<std::atomic<int>> times_told;
  std::string told;  // of each process
  CommOptions options;
  options.patience = Duration::FromSeconds(2);
  options.timeout = Duration::FromSeconds(30);
  options.stalled = [&](const std::string& what) {
    told += what + "\n";
    times_told.value->fetch_add(1);
  };
  const auto results = RunRanks(
      Kind::kShm, 3,
      [&](CommWorld& world) {
        Communicator& all = All(world);
        const int rank = world.world_rank();
        world.SetCurrentTask(Text("task", rank));
        float x = 0;
        for (int stall = 0; stall < 2; ++stall) {
          RANK_EXPECT(all.Barrier());
          if (rank == 2) {
            for (int i = 0; i < 10'000 && *times_told.value == stall; ++i) {
              usleep(1000);
            }
            usleep(300'000);  // others might tell as well
          }
          RANK_EXPECT(rank == 2 || all.Recv(&x, 4, rank + 1, 0));
          RANK_EXPECT(rank == 0 || all.Send(&x, 4, rank - 1, 0));
        }
        RANK_EXPECT(all.Barrier());
        return told;
      },
      options);
  const std::string line =
      "rank 1 has waited ([2-9]|[12][0-9]) s for rank 2 \\(in task 'task2'\\); "
      "it gives up after 30 s\n";
  EXPECT_THAT(results, ElementsAre("", MatchesRegex(line + line), ""));
}

TEST(ShmWorldTest, RanksThatWaitForEachOtherAreNamedLater) {
  std::string told;            // of each process
  CommWorld* ranks = nullptr;  // that of this process
  CommOptions options;
  options.patience = Duration::FromSeconds(2);
  options.timeout = Duration::FromSeconds(30);
  options.stalled = [&](const std::string& what) {
    told += what;
    ranks->Abort("told");
  };
  const auto results = RunRanks(
      Kind::kShm, 2,
      [&](CommWorld& world) {
        ranks = &world;
        RANK_EXPECT(All(world).Barrier());
        float x = 0;
        RANK_EXPECT(!All(world).Recv(&x, 4, 1 - world.world_rank(), 0));
        return told;
      },
      options);
  EXPECT_THAT(
      results[0] + results[1],
      MatchesRegex("rank [01] has waited ([4-9]|[12][0-9]) s for rank [01] "
                   "\\(before its first task\\); it gives up after 30 s"));
}

// An interrupt ends a wait only as long as there is no step to be ended first.
TEST(ShmWorldTest, AnInterruptEndsAWaitBeforeTheFirstTask) {
  struct Flags {
    std::atomic<bool> stop, rank0_ended;
  };
  for (const std::string task : {"", "forward"}) {
    const Shared<Flags> flags;
    CommOptions options;
    options.stop = &flags.value->stop;
    options.timeout = Duration::FromSeconds(30);
    const auto results = RunRanks(
        Kind::kShm, 2,
        [&](CommWorld& world) {
          world.SetCurrentTask(task);
          RANK_EXPECT(All(world).Barrier());
          flags.value->stop = true;
          if (world.world_rank() == 1) {
            if (!task.empty()) usleep(1'500'000);
            while (task.empty() && !flags.value->rank0_ended) usleep(1000);
          }
          const auto result = All(world).Barrier();
          flags.value->rank0_ended = true;
          if (result) return std::string("done");
          RANK_EXPECT(result.error().code == ErrorCode::kInterrupted);
          return result.error().message;
        },
        options);
    const std::string expected = task.empty()
                                     ? "interrupted as rank 0 waited for rank "
                                       "1 (before its first task)"
                                     : "done";
    EXPECT_THAT(results, ElementsAre(expected, expected)) << task;
  }
}

TEST(ShmWorldTest, KilledAtRandomMoments) {
  for (int trial = 0; trial < 8; ++trial) {
    const auto results = RunRanks(Kind::kShm, 3, [&](CommWorld& world) {
      if (world.world_rank() == trial % 3) {
        std::thread([trial] {
          std::this_thread::sleep_for(std::chrono::milliseconds(3 * trial));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      std::vector<float> data(200'000);
      for (;;) {
        auto result =
            All(world).AllReduce(data.data(), 200'000, DType::kFloat32);
        const int next = (world.world_rank() + 1) % 3;
        const int previous = (world.world_rank() + 2) % 3;
        if (result) result = All(world).Send(data.data(), 800'000, next, 0);
        if (result) result = All(world).Recv(data.data(), 800'000, previous, 0);
        if (!result) return result.error().ToString();
      }
    });
    for (int r = 0; r < 3; ++r) {
      const std::string& result = results[static_cast<size_t>(r)];
      if (r == trial % 3) {
        EXPECT_EQ(result, "killed");
      } else {
        EXPECT_THAT(result, HasSubstr(Text("rank ", trial % 3, " (pid ")));
      }
    }
  }
}

// The sanitizers' own maps exceed any limit.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(LoneWorldTest, NoMemoryIsAnError) {
  const auto make = [] {
    const rlimit limit = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_AS, &limit);
    const auto world = MakeLoneWorld();
    std::fputs(world ? "made" : world.error().message.c_str(), stderr);
    _exit(world ? 0 : 1);
  };
  EXPECT_EXIT(make(), ::testing::ExitedWithCode(1),
              "cannot map memory for ranks: Cannot allocate memory");
}
#endif

}  // namespace
}  // namespace tessera
