#pragma once
// The data that `run` trains on, by the unit of its model.

#include <cstdint>
#include <memory>
#include <optional>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/data/batches.h"
#include "runtime/data/clicks.h"
#include "runtime/data/images.h"
#include "runtime/trainer.h"
#include "tools/options.h"

namespace tessera {

struct RunData {
  std::unique_ptr<TokenData> tokens;  // of a model of tokens
  std::optional<Batches> batches;     // of these
  std::optional<Images> images;       // of a model of images
  std::optional<Clicks> clicks;       // of a model of clicks
};

// Opens --data, or where images and clicks have none makes them up. Errors: a
// flag, file or model that the others do not go with.
Result<RunData> ReadData(const Options& options, const Graph& graph,
                         uint64_t seed);

// Whether tokens of 16 bits look like those of 32, each with an upper half that
// is near 0: as in vocabularies of fewer than 2^18 tokens.
bool LooksWider(const TokenData& tokens);

// Sets what `training` loads. REQUIRES: `data` outlives it.
void SetData(const RunData& data, TrainingJob& training);

}  // namespace tessera
