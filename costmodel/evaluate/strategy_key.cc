#include "costmodel/evaluate/strategy_key.h"

#include <algorithm>
#include <string>

namespace tessera {

// Taken apart whole: a new field does not compile until it has been looked at
// here.
IntKey StrategyKey(const Strategy& strategy) {
  const auto& [dp, tp, pp, vp, cp, cp_kind, zigzag, ep, etp, mbs, zero, dp_kind,
               zero_group, bucket, prefetch, tiles, parameter_tier,
               optimizer_tier, gradient_tier, activation_tier,
               offload_directory, by_speed, sp, split_branches, recompute,
               recompute_layers, schedule, actions, order] = strategy;
  const auto pair = [](int64_t a, int64_t b) { return a << 32 | b; };
  IntKey key;
  key.reserve(20);
  key.push_back(pair(dp, tp));
  key.push_back(pair(pp, vp));
  key.push_back(pair(cp, ep));
  key.push_back(pair(mbs, prefetch));
  key.push_back(pair(tiles, recompute_layers));
  key.push_back(pair(zero_group, etp));
  key.push_back(bucket.value);
  int64_t small = zero;
  for (int64_t value :
       {int64_t{zigzag}, static_cast<int64_t>(dp_kind),
        static_cast<int64_t>(parameter_tier),
        static_cast<int64_t>(optimizer_tier),
        static_cast<int64_t>(gradient_tier),
        static_cast<int64_t>(activation_tier), int64_t{by_speed}, int64_t{sp},
        int64_t{split_branches}, static_cast<int64_t>(recompute)}) {
    small = small << 4 | value;
  }
  key.push_back(small);
  auto dimensions = static_cast<int64_t>(order.size());
  for (MeshDimension dimension : order) {
    dimensions = dimensions << 4 | static_cast<int64_t>(dimension);
  }
  key.push_back(dimensions);
  for (const std::string* text : {&schedule, &cp_kind}) {
    key.push_back(static_cast<int64_t>(text->size()));
    for (size_t i = 0; i < text->size(); i += 8) {
      int64_t word = 0;
      for (size_t c = i; c < std::min(i + 8, text->size()); ++c) {
        word = word << 8 | static_cast<unsigned char>((*text)[c]);
      }
      key.push_back(word);
    }
  }
  return key;
}

}  // namespace tessera
