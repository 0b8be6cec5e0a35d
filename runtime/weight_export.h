#pragma once
// The weights of a run as published models have them.

#include <atomic>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/io/published_weights.h"
#include "planner/ir/graph.h"
#include "runtime/executor.h"

namespace tessera {

struct WeightFiles {
  std::string folder;
  PublishedLayout layout;
  DType dtype = DType::kFloat32;
  // What a file has at most, unless one tensor has more.
  Bytes file_bytes = {5'000'000'000};
  // Unless null: once true on any rank, nothing is left and all return
  // kInterrupted.
  const std::atomic<bool>* stop = nullptr;
};

// Whether a file of this name, without its folder, is one of weights or their
// index, of SaveWeights or of other programs.
bool IsNameOfWeights(std::string_view name);

// That no weights are in a folder, if there is one. What a run of this host has
// left that was killed before it had put their index in place is none.
Result<void> CheckHasNoWeights(const std::string& folder);

// Writes the weights as the layout has them into a folder, which is made where
// there is none: "model.safetensors", or "model-00001-of-00003.safetensors", …
// and their index, which comes last. Called by all ranks, as SaveCheckpoint;
// where there are weights already (at the end, too: two runs may write at
// once), a file cannot be written, or a weight is not finite in the files'
// type, nothing of this is left, and all return the error, or false. A run that
// is killed is not in the next one's way, which removes what it has left, and
// says on standard error what of that had its name.
Result<bool> SaveWeights(const WeightFiles& files, const Graph& graph,
                         RankExecutor& executor, Communicator& all);

}  // namespace tessera
