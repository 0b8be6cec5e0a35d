#pragma once
// A few training steps of a task graph, and what of them tests compare.

#include <map>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/lower.h"
#include "planner/plan/evaluation.h"

namespace tessera {

struct Trained {
  std::vector<double> losses;  // by step
  // After the last step, whole, by name: the weights and AdamW's first moments.
  std::map<std::string, std::vector<double>> weights;
  std::map<std::string, std::vector<double>> first_moments;
  std::vector<MemoryUse> peaks;       // by rank
  std::vector<MemoryUse> host_peaks;  // of the host's memory
  std::vector<MemoryUse> files;       // the length of its file, as total
  // Of kernels with tensors whose rows lie apart, on all ranks; on queues.
  int64_t calls_with_gaps = 0;
};

// How a rank's streams run: all in issue order, beside each other on threads,
// or as queues of a device that works behind the host's back; and then with
// operations that go to the queues' own threads, or on memory that the ranks'
// devices share.
enum class StreamsRun : uint8_t {
  kInOrder,
  kOnThreads,
  kInQueues,
  kOnLoopback
};

struct TrainInMemoryOptions {
  TrainingOptions training = {.learning_rate = 0.01};
  int64_t steps = 5;
  uint64_t seed = 7;
  StreamsRun streams = StreamsRun::kOnThreads;
  bool graphs = false;         // in queues: RankExecutor::UseGraphs
  int threads = 1;             // of each rank's kernels
  std::string load_path = {};  // checkpoint to start from; empty: none
  std::string save_path = {};  // checkpoint to leave; empty: none
};

// On threads of this process. Tokens are a function of (step, sample,
// position); a fifth of the labels does not count. Errors: those of the ranks;
// ranks that have the loss, or elements of a weight, in common and disagree
// about a bit of them.
Result<Trained> TrainInMemory(const Graph& graph, const TaskGraph& tasks,
                              const TrainInMemoryOptions& options);

// The same on processes that share memory; the losses. REQUIRES: no other
// threads, as for any fork.
Result<std::vector<double>> TrainOverShm(const Graph& graph,
                                         const TaskGraph& tasks,
                                         const TrainInMemoryOptions& options);

// The first difference of `actual` from `expected`, or "": losses by more than
// 1e-9, a weight by more than 1e-9 of its norm. A weight whose gradient is
// mathematically zero (a key's bias: the softmax does not see it) has a norm
// that is rounding alone: 1e-12 is its bound.
std::string Difference(const Trained& actual, const Trained& expected);
// The same, with every bit.
std::string DifferenceInBits(const Trained& actual, const Trained& expected);

}  // namespace tessera
