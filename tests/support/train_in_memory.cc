#include "tests/support/train_in_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <optional>

#include "planner/base/element_count.h"
#include "planner/base/rng.h"
#include "planner/ir/vocabulary.h"
#include "runtime/checkpoint.h"
#include "runtime/comm/loopback_world.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/store.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"
#include "runtime/executor.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/train_state.h"
#include "runtime/trainer.h"
#include "tests/support/queue_cpu_device.h"

namespace tessera {
namespace {

constexpr double kTolerance = 1e-9;
constexpr double kAbsoluteTolerance = 1e-12;

int64_t VocabularyOf(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (node.op->name == "cross_entropy") {
      return TokensOf(node.attributes,
                      graph.tensor(node.operands[0]).shape.back());
    }
  }
  return 2;
}

// What stands at a place of the data in one step.
int32_t TokenAt(int64_t step, int64_t sample, int64_t position,
                int64_t vocabulary) {
  const auto place =
      static_cast<uint64_t>((step * 4096 + sample) * 4096 + position);
  return static_cast<int32_t>(Mix64(place) % static_cast<uint64_t>(vocabulary));
}

int32_t LabelAt(int64_t step, int64_t sample, int64_t position,
                int64_t vocabulary) {
  // The first position always counts, so that some label does.
  const int32_t token = TokenAt(step, sample, position + 1, vocabulary);
  const bool counts =
      position == 0 || TokenAt(step, sample, position + 1000, 5) != 0;
  return counts ? token : -1;
}

// Numbers between -1 and 1, such as pixels.
void FillFloats(const LocalTensor& block, int64_t step) {
  for (int64_t i = 0; i < block.elements(); ++i) {
    int64_t place = step * 4096;  // of the element, in the whole
    int64_t rest = i;
    int64_t inner = block.elements();
    for (size_t d = 0; d < block.shape.size(); ++d) {
      inner /= block.shape[d];
      const int64_t extent = d == 0 ? 1 : block.global_shape[d];
      place = place * extent + block.offset[d] + rest / inner;
      rest %= inner;
    }
    Put(block, i, 2 * CounterUniform01(17, static_cast<uint64_t>(place)) - 1);
  }
}

LoadInput LoadRandom(const Graph& graph) {
  const int64_t vocabulary = VocabularyOf(graph);
  return [vocabulary](const Tensor& tensor, const LocalTensor& block,
                      int64_t step) -> Result<void> {
    if (IsFloat(tensor.dtype)) {  // images, patches, targets
      FillFloats(block, step);
      return {};
    }
    auto* out = block.as<int32_t>();
    for (int64_t i = 0; i < block.shape[0]; ++i) {
      if (block.shape.size() ==
          1) {  // labels of images: that of sample 0 counts
        const int64_t sample = block.offset[0] + i;
        *out++ = LabelAt(step, sample, sample, vocabulary);
        continue;
      }
      for (int64_t j = 0; j < block.shape[1]; ++j) {
        const int64_t sample = block.offset[0] + i;
        const int64_t position = block.offset[1] + j;
        // Padding behind the first places.
        const bool padding = position > 1 + sample % 5;
        // Some are padding, some beyond what they address.
        *out++ = (tensor.name.ends_with("ids") ||
                  tensor.name.starts_with("categories"))
                     ? TokenAt(step, sample, position + 3000, 6) - 1
                 : tensor.name == "tokens"
                     ? TokenAt(step, sample, position, vocabulary)
                 : tensor.name == "source"
                     ? TokenAt(step, sample, position + 2000, vocabulary)
                 : tensor.name == "labels"
                     ? LabelAt(step, sample, position, vocabulary)
                 : tensor.name == "next_token"  // as of images
                     ? LabelAt(step, sample, sample, vocabulary)
                     : tensor.name == "source_positions" && padding ? -1
                       : tensor.name == "patch_rows"
                           ? (position == 0 ? -1 : 0)
                           : static_cast<int32_t>(position);
      }
    }
    return {};
  };
}

// The elements of a floating-point value that a rank holds; of a 16-bit type
// their bits, as whole numbers.
std::vector<double> ReadValue(const RankExecutor& executor, ValueId id) {
  const Value& value = executor.tasks().value(id);
  const int64_t n = executor.placement(id).elements();
  std::vector<std::byte> bytes(static_cast<size_t>(n * SizeOf(value.dtype)));
  const auto read = executor.ReadValue(id, bytes.data());
  TESSERA_CHECK(read.has_value()) << read.error().ToString();
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) {
    if (value.dtype == DType::kFloat64) {
      double x = 0;
      std::memcpy(&x, bytes.data() + i * 8, 8);
      values.push_back(x);
    } else if (value.dtype == DType::kFloat32) {
      float x = 0;
      std::memcpy(&x, bytes.data() + i * 4, 4);
      values.push_back(x);
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes.data() + i * 2, 2);
      values.push_back(bits);
    }
  }
  return values;
}

bool SameBits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// What the ranks have in the end, put together element by element.
class Gathered {
 public:
  // Called by all ranks at any time.
  void Add(const RankExecutor& executor, const Graph& graph) {
    const std::lock_guard lock(mutex_);
    const TaskGraph& tasks = executor.tasks();
    for (size_t v = 0; v < tasks.values.size(); ++v) {
      const ValueId id(static_cast<int64_t>(v));
      const Value& value = tasks.value(id);
      const bool weight = value.what == "parameter";
      if ((!weight && value.what != "m") || !value.persistent ||
          !executor.Holds(id)) {
        continue;
      }
      const Tensor& tensor = graph.tensor(value.tensor);
      AddElements(tensor, executor.placement(id), ReadValue(executor, id),
                  executor.world().world_rank(),
                  (weight ? weights_ : moments_)[tensor.name]);
    }
  }

  void AddLoss(int64_t step, int rank, double loss) {
    const std::lock_guard lock(mutex_);
    losses_.resize(std::max(losses_.size(), static_cast<size_t>(step) + 1));
    std::optional<double>& known = losses_[static_cast<size_t>(step)];
    if (known && !SameBits(*known, loss)) {
      Disagree("the loss of step " + std::to_string(step), rank);
    }
    known = loss;
  }

  std::vector<double> losses() const {
    std::vector<double> losses;
    for (const auto& loss : losses_) {
      losses.push_back(loss.value_or(std::nan("")));
    }
    return losses;
  }

  Result<Trained> Take() {
    if (!disagreement_.empty()) return InvalidInput(disagreement_);
    Trained trained;
    trained.losses = losses();
    TESSERA_TRY(trained.weights, Whole(weights_));
    TESSERA_TRY(trained.first_moments, Whole(moments_));
    return trained;
  }

 private:
  using Elements = std::vector<std::optional<double>>;

  static Result<std::map<std::string, std::vector<double>>> Whole(
      const std::map<std::string, Elements>& tensors) {
    std::map<std::string, std::vector<double>> whole;
    for (const auto& [name, elements] : tensors) {
      for (const std::optional<double>& element : elements) {
        if (!element) return InvalidInput("no rank has all of it", name);
        whole[name].push_back(*element);
      }
    }
    return whole;
  }

  void AddElements(const Tensor& tensor, const Placement& placement,
                   const std::vector<double>& values, int rank,
                   Elements& whole) {
    whole.resize(static_cast<size_t>(ElementCount(tensor.shape)));
    for (size_t i = 0; i < values.size(); ++i) {
      int64_t local = placement.run.begin + static_cast<int64_t>(i);
      int64_t global = 0;
      int64_t stride = 1;
      for (size_t d = tensor.shape.size(); d-- > 0;) {
        const Range& range = placement.block[d];
        global += stride * (range.begin + local % range.size());
        local /= range.size();
        stride *= tensor.shape[d];
      }
      std::optional<double>& element = whole[static_cast<size_t>(global)];
      if (element && !SameBits(*element, values[i])) {
        Disagree(tensor.name + "[" + std::to_string(global) + "]", rank);
      }
      element = values[i];
    }
  }

  void Disagree(const std::string& what, int rank) {
    if (!disagreement_.empty()) return;
    disagreement_ = "rank " + std::to_string(rank) +
                    " has other bits than another rank: " + what;
  }

  std::mutex mutex_;
  Elements losses_;
  std::map<std::string, Elements> weights_;
  std::map<std::string, Elements> moments_;
  std::string disagreement_;
};

struct Peaks {
  MemoryUse device;
  MemoryUse host;
  MemoryUse file;
  int64_t calls_with_gaps = 0;
};

Result<Peaks> TrainRank(const Graph& graph, const TaskGraph& tasks,
                        const TrainInMemoryOptions& options, CommWorld& world,
                        RankDevice& device, Gathered& gathered) {
  TESSERA_TRY(
      const auto executor,
      RankExecutor::Create(
          tasks, graph, options.training, options.seed, world, device,
          LoadRandom(graph),
          {.directory = std::filesystem::temp_directory_path().string()}));
  if (options.load_path.empty()) {
    TESSERA_RETURN_IF_ERROR(InitialiseState(graph, options.seed, *executor));
  } else {
    TESSERA_RETURN_IF_ERROR(
        LoadCheckpoint(options.load_path, {}, graph, *executor));
  }
  if (options.graphs) TESSERA_RETURN_IF_ERROR(executor->UseGraphs());
  for (int64_t i = 0; i < options.steps; ++i) {
    TESSERA_RETURN_IF_ERROR(executor->Run(tasks));
    if (executor->position(tasks.value(tasks.loss).group) >= 0) {
      gathered.AddLoss(i, world.world_rank(),
                       ReadValue(*executor, tasks.loss)[0]);
    }
  }
  gathered.Add(*executor, graph);
  if (!options.save_path.empty()) {
    std::vector<int> everyone(static_cast<size_t>(world.world_size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    TESSERA_TRY(Communicator* const all, world.Group(everyone));
    TESSERA_TRY([[maybe_unused]] const bool finite,
                SaveCheckpoint(options.save_path, graph, options.seed,
                               *executor, *all));
  }
  TESSERA_RETURN_IF_ERROR(world.Flush());
  Peaks peaks{device.account().peak(), executor->host_peak(), {}};
  if (const auto* queues = dynamic_cast<const QueueCpuDevice*>(&device)) {
    peaks.calls_with_gaps = queues->calls_with_gaps();
  }
  if (executor->file() != nullptr) {
    peaks.file.total = executor->file()->length();
  }
  return peaks;
}

Result<Peaks> TrainRank(const Graph& graph, const TaskGraph& tasks,
                        const TrainInMemoryOptions& options, CommWorld& world,
                        Gathered& gathered) {
  if (options.streams == StreamsRun::kInQueues) {
    QueueCpuDevice device(static_cast<uint64_t>(world.world_rank()));
    const auto queue_world = MakeQueueWorld(world, device);
    return TrainRank(graph, tasks, options, *queue_world, device, gathered);
  }
  CpuDevice device(options.threads, options.streams == StreamsRun::kOnThreads);
  return TrainRank(graph, tasks, options, world, device, gathered);
}

}  // namespace

Result<Trained> TrainInMemory(const Graph& graph, const TaskGraph& tasks,
                              const TrainInMemoryOptions& options) {
  const int ranks = static_cast<int>(tasks.group(tasks.world).devices.size());
  const CommOptions comm{Duration::FromSeconds(60)};
  std::vector<std::unique_ptr<QueueCpuDevice>> devices;
  std::vector<std::unique_ptr<CommWorld>> worlds;
  if (options.streams == StreamsRun::kOnLoopback) {
    std::vector<QueueDevice*> queues;
    for (int rank = 0; rank < ranks; ++rank) {
      devices.push_back(
          std::make_unique<QueueCpuDevice>(static_cast<uint64_t>(rank)));
      queues.push_back(devices.back().get());
    }
    worlds = MakeLoopbackWorlds(queues, comm);
  } else {
    worlds = MakeThreadWorlds(ranks, comm);
  }
  std::vector<std::optional<Result<Peaks>>> results(static_cast<size_t>(ranks));
  Gathered gathered;
  RunThreads(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    results[r] = devices.empty()
                     ? TrainRank(graph, tasks, options, *worlds[r], gathered)
                     : TrainRank(graph, tasks, options, *worlds[r], *devices[r],
                                 gathered);
    if (!*results[r]) worlds[r]->Abort(results[r]->error().ToString());
    worlds[r].reset();
  });
  for (const auto& result : results) {
    if (!*result) return result->error();
  }
  TESSERA_TRY(Trained trained, gathered.Take());
  for (const auto& result : results) {
    trained.peaks.push_back((*result)->device);
    trained.host_peaks.push_back((*result)->host);
    trained.files.push_back((*result)->file);
    trained.calls_with_gaps += (*result)->calls_with_gaps;
  }
  return trained;
}

namespace {

// A rank's losses, or none where it has none of them.
Result<std::vector<double>> TrainShmRank(int rank,
                                         const ListeningSocket& socket,
                                         const Graph& graph,
                                         const TaskGraph& tasks,
                                         const TrainInMemoryOptions& options) {
  StoreOptions store_options;
  store_options.port = socket.port;
  store_options.rank = rank;
  const int ranks = static_cast<int>(tasks.group(tasks.world).devices.size());
  store_options.size = ranks;
  store_options.listen_fd = rank == 0 ? socket.fd : -1;
  TESSERA_TRY(auto store, Store::Open(store_options));
  TESSERA_TRY(const auto world,
              MakeShmWorld(rank, ranks, *store, {Duration::FromSeconds(60)}));
  store.reset();
  Gathered gathered;
  TESSERA_RETURN_IF_ERROR(TrainRank(graph, tasks, options, *world, gathered));
  return gathered.losses();
}

}  // namespace

Result<std::vector<double>> TrainOverShm(const Graph& graph,
                                         const TaskGraph& tasks,
                                         const TrainInMemoryOptions& options) {
  const size_t ranks = tasks.group(tasks.world).devices.size();
  TESSERA_TRY(const ListeningSocket socket, ListenOnLoopback());
  std::vector<pid_t> children(ranks);
  std::vector<int> pipes(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    int ends[2];
    TESSERA_CHECK(pipe(ends) == 0);
    pipes[r] = ends[0];
    children[r] = fork();
    TESSERA_CHECK(children[r] >= 0);
    if (children[r] == 0) {
      if (r != 0) close(socket.fd);
      const auto losses =
          TrainShmRank(static_cast<int>(r), socket, graph, tasks, options);
      if (!losses) _exit(1);
      const auto bytes = losses->size() * sizeof(double);
      const ssize_t written = write(ends[1], losses->data(), bytes);
      _exit(written == static_cast<ssize_t>(bytes) ? 0 : 1);
    }
    close(ends[1]);
  }
  close(socket.fd);
  std::vector<double> losses;
  bool failed = false;
  for (size_t r = 0; r < ranks; ++r) {
    std::vector<double> theirs(static_cast<size_t>(options.steps));
    const size_t bytes = theirs.size() * sizeof(double);
    // Less than a pipe holds: written, and read, in one piece.
    const ssize_t n = read(pipes[r], theirs.data(), bytes);
    if (n == static_cast<ssize_t>(bytes)) losses = theirs;
    close(pipes[r]);
    int status = 0;
    waitpid(children[r], &status, 0);
    failed = failed || status != 0;
  }
  if (failed) return InvalidInput("a rank failed");
  return losses;
}

std::string Difference(const Trained& actual, const Trained& expected) {
  char text[160];
  if (actual.losses.size() != expected.losses.size()) return "numbers of steps";
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    if (std::abs(actual.losses[i] - expected.losses[i]) <= kTolerance) continue;
    std::snprintf(text, sizeof(text), "loss of step %zu: %.17g, expected %.17g",
                  i, actual.losses[i], expected.losses[i]);
    return text;
  }
  for (const auto& [name, wanted] : expected.weights) {
    const auto found = actual.weights.find(name);
    if (found == actual.weights.end()) return "no " + name;
    double square = 0;
    double difference = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double d = found->second[i] - wanted[i];
      square += wanted[i] * wanted[i];
      difference += d * d;
    }
    const double bound =
        std::max(kTolerance * std::sqrt(square), kAbsoluteTolerance);
    if (std::sqrt(difference) <= bound) continue;
    std::snprintf(text, sizeof(text), "%.80s is off by %.3g of %.3g",
                  name.c_str(), std::sqrt(difference), std::sqrt(square));
    return text;
  }
  return "";
}

std::string DifferenceInBits(const Trained& actual, const Trained& expected) {
  const auto same = [](const std::vector<double>& a,
                       const std::vector<double>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), SameBits);
  };
  if (!same(actual.losses, expected.losses)) return "losses";
  for (const auto& [name, wanted] : expected.weights) {
    const auto found = actual.weights.find(name);
    if (found == actual.weights.end()) return "no " + name;
    if (!same(found->second, wanted)) return name;
  }
  return "";
}

}  // namespace tessera
