#pragma once
// Checkpoints of a training run: one safetensors file with every weight whole
// under its name, the optimizer's state under "optimizer.m.NAME" and
// "optimizer.v.NAME", of momentum under "optimizer.momentum.NAME", of Adafactor
// under "optimizer.row.NAME", "optimizer.column.NAME" and "optimizer.mean.NAME"
// (of what is no matrix "optimizer.v.NAME"), and in the metadata "step",
// "samples" (how many the run has taken: the state of sampling), "seed",
// "optimizer", "rounding" ("stochastic", or none), and of the graph
// "model" (its name), "global_batch", "seq_len", "dtype" and "graph" (its
// fingerprint). Of 16-bit
// weights the file holds the fp32 masters, of which the parameters are made
// when they are loaded; of fp16 runs the state of the loss scale, too
// ("optimizer.loss_scale"). Any plan's run can load what any other plan's run
// has saved, in bf16, fp16 or fp32; under the same plan the run goes on bit by
// bit. The file has checksums (runtime/safetensors.h), of which a rank checks
// those of what it reads; files that have none are loaded as they are.

#include <optional>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/io/published_weights.h"
#include "planner/ir/graph.h"
#include "runtime/executor.h"
#include "runtime/start_up.h"

namespace tessera {

// Called by all ranks, which are those of `all`, between steps. Rank 0 gathers
// the tensors one by one and writes the file beside `path`; where all ranks
// have learnt that it is whole and on the disk, it is renamed. On an error,
// which names the step and all ranks return, `path` is as it was, unless a rank
// is lost in the moment of the renaming. So it is where a number to be saved is
// not finite: then all return false. Of the checkpoints that were at `path`
// before, `keep` - 1 stay beside it (runtime/older_checkpoints.h).
Result<bool> SaveCheckpoint(const std::string& path, const Graph& graph,
                            uint64_t seed, RankExecutor& executor,
                            Communicator& all, int keep = 1);

// Sets weights, optimizer state, the step and the samples of this rank, which
// reads only its own shards of the file. Files whose metadata have no "step"
// are weights alone, which may be a model's published ones
// (runtime/published_files.h), laid out as `layout` says: the run starts at
// step 0 with zero state. Errors name the tensor that is missing, or
// has another type or shape, or both optimizers (CheckCheckpoint). Those of a
// damaged file name an older checkpoint beside it, where there is one.
Result<void> LoadCheckpoint(const std::string& path,
                            const PublishedLayout& layout, const Graph& graph,
                            RankExecutor& executor, StartUp start = {});

// The most steps and samples of a run: what is exact in a double.
inline constexpr int64_t kMostRunSteps = int64_t{1} << 53;

// Whether `path` may name a checkpoint: not a folder, the index of several
// files, or a model, where published weights are looked for.
bool IsOneFile(const std::string& path);

// The run that wrote a checkpoint, as far as the file says.
struct SavedRun {
  int64_t step = 0;  // behind which it was written
  std::optional<int64_t> samples;
  std::optional<uint64_t> seed;  // with which it goes on
  std::string optimizer;         // its name; or empty
  std::string model;             // its name; or empty
  std::string graph;             // the fingerprint; or empty
  std::optional<int64_t> global_batch;
  std::optional<int64_t> seq_len;
  std::string dtype;  // of the graph; or empty
  bool stochastic_rounding = false;
  std::string padding;  // which rows pad a vocabulary
};
// Nothing where the files are weights alone. kInvalidInput where a number is
// none or, but for the seed, above kMostRunSteps, or what has an optimizer's
// state has no step.
Result<std::optional<SavedRun>> SavedRunOf(const std::string& path);

// An error that names both where the checkpoint at `path` is of a run of
// another optimizer, whose state is not this one's, or has other rows that pad
// a vocabulary. Checkpoints that do not say are any optimizer's.
Result<void> CheckCheckpoint(const SavedRun& run, const std::string& path,
                             std::string_view optimizer, const Graph& graph);

}  // namespace tessera
