#pragma once
// A large graph in which little repeats.

#include <cstdint>
#include <string>

#include "planner/base/rng.h"
#include "planner/ir/graph.h"

namespace tessera::testing {

// A network of so many operators, forward, of which hardly two are alike: dense
// layers of widths drawn from 2,048, each with its activation, in blocks of
// four.
inline Graph UnlikeGraph(int64_t operators) {
  constexpr int64_t kSamples = 1024;
  GraphBuilder builder("unlike", kSamples, 1, DType::kBFloat16);
  const auto width = [](int64_t layer) {
    return 64 +
           2 * static_cast<int64_t>(Mix64(static_cast<uint64_t>(layer)) % 2048);
  };
  builder.BeginBlock("layer.0");
  TensorId x = builder.Input("x", {kSamples, width(0)}, DType::kBFloat16);
  const TensorId labels = builder.Input("labels", {kSamples}, DType::kInt32);
  const int64_t layers = operators / 2;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    if (i % 2 == 0 && i > 0) builder.BeginBlock(name);
    const int64_t out = i + 1 == layers ? 1000 : width(i + 1);
    const TensorId w = builder.Weight(
        name + ".weight", {out, builder.shape(x)[1]}, {.stddev = 0.02}, true);
    x = builder.Add1("linear", name, {x, w}, "bi,oi->bo");
    if (i + 1 < layers) x = builder.Add1("relu", name + ".relu", {x}, "bh->bh");
  }
  const TensorId count = builder.Add1("count_labels", "count", {labels}, "b->");
  return Differentiate(
             builder
                 .Finish(builder.Add1("cross_entropy", "loss",
                                      {x, labels, count}, "bv,b,->,b"))
                 .value())
      .value();
}

}  // namespace tessera::testing
