#pragma once
// What published tables say in words: the vocabulary of their columns. Texts
// are expected in lower case.
//
// Functions without state; thread-safe.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/ir/dtype.h"
#include "planner/ir/stack.h"
#include "planner/plan/recompute.h"

namespace tessera {

bool Has(std::string_view text, std::string_view part);

// Whether `part` stands in `text` as a word: no letter beside its letters and
// no digit beside its digits. "a10" is in "a10-24gb" and "2xa10", not in
// "a100".
bool HasWord(std::string_view text, std::string_view part);

// Whether a word of `text` begins with `part`: "checkpoint" is in "gradient
// checkpointing", "stage 1" not in "stage 12", and "full" not in "carefully".
bool HasStem(std::string_view text, std::string_view part);

// ASCII letters only.
std::string Lower(std::string text);

// What is left of `text` without what it denies: of "bf16, no fp8" it is
// "bf16,", of "flash off" nothing. Clauses end at commas, semicolons and
// parentheses; a "no" or "without" denies the rest of its clause, an "off" or
// "disabled" at its end all of it, and a "no" alone what stands behind it in
// parentheses, too.
std::string Asserted(std::string_view text);

// Whether it says something, and denies all of that.
bool DeniesAll(std::string_view text);

// kInfeasible: a column says what has no counterpart here.
Error CannotMap(std::string what, std::string_view column);

// What the functions below read is what the text asserts; where it denies all,
// that is a no, or no stage, or nothing that is computed again.

// Yes or no, as of sequence parallelism; nothing for a blank or other words.
std::optional<bool> ReadYes(std::string_view text);

// How states of a replicated weight are cut: "3 (FSDP2, group 8)",
// "DeepSpeed ZeRO-2", "distributed optimizer", "FULL_SHARD", "HSDP".
struct ZeroWords {
  int stage = 0;
  bool within_node = false;  // ranks of a node share a cut
  int group = 0;             // so many ranks do; 0: all
  bool offloads_optimizer = false;
};
// Nothing for words that say nothing of it.
std::optional<ZeroWords> ReadZero(std::string_view text);

// What a layer's backward computes again: "full", "gradient checkpointing",
// "selective modules: mlp", a policy of JAX or of torchtitan.
struct RecomputeWords {
  RecomputeLevel level = RecomputeLevel::kNone;
  // Fragments of the names of nodes that the level computes again and these
  // words do not, and the other way round; "attention" is its core.
  std::span<const std::string_view> kept;
  std::span<const std::string_view> again;
  int every = 1;  // only one of so many layers
  // Only the first so many of each chunk of a stage (Megatron's method
  // "block"); 0: all.
  int of_chunk = 0;
};
std::optional<RecomputeWords> ReadRecompute(std::string_view text);

// Values and products: "bf16-mixed", "float8 tensorwise", "fp16 (O2)".
struct PrecisionWords {
  // Nothing: 16 bits, the device's own.
  std::optional<DType> values;
  ProductType products = ProductType::kAsValues;
  bool tf32 = false;  // products of fp32 values by TF32 (since Ampere)
};
std::optional<PrecisionWords> ReadPrecision(std::string_view text);

// What attention is, where the words tell: "no", "SDPA", "FA3", "flash v1".
std::optional<StackAttention> ReadAttention(std::string_view text);

}  // namespace tessera
