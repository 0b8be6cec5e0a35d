#pragma once
// Stack profiles: training software of the field by name. Figures are fitted by
// tools/fit_stacks.py, which holds out each source in turn; each row says what
// from.

#include <span>
#include <string_view>

#include "planner/base/result.h"
#include "planner/ir/stack.h"

namespace tessera {

std::span<const Stack> Stacks();

// REQUIRES: the table has it.
const Stack& StackNamed(std::string_view name);

// "NAME[,KEY=VALUE…]": a row of the table with some of its figures replaced,
// such as "megatron-2021,host=20e-6,attention=fused". Keys: host and
// host-per-shard (seconds), split-sends (never, forward or always), overlap,
// fuse and fuse-elementwise (0 or 1), attention (fused, flash1 or unfused),
// logits, traffic, optimizer, sustained, sharded (bytes per second, 0: no
// bound), tensor-exposed, experts-exposed, experts-once-per-host (0 or 1),
// products (as-values, fp8 or fp4); of its memory masks, fp16-gradients,
// bf16-gradients, gradient-copies and whole-gradients (0 or 1), keep-logits
// (as-values, fp32 or never), zero-bucket, context and communicator (bytes),
// fragmentation. Errors name the word and what is known.
Result<Stack> ParseStack(std::string_view text);

}  // namespace tessera
