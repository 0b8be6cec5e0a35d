#pragma once
// Published measurements of training steps: rows of a table in CSV, and what
// each says of the model, the cluster and the strategy.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// A blank column is zero or empty: the source does not say.
struct PublishedRun {
  std::string id, source, locator, model;
  int64_t layers = 0, hidden = 0, heads = 0;
  std::string kv_heads, ffn;  // a number; or words, such as "MLA"
  std::string ffn_kind;       // "gelu", "swiglu", …
  int64_t vocab = 0, seq = 0, experts = 0, topk = 0;
  std::string gpu;
  int64_t gpus = 0, gpus_per_node = 0;
  std::string intra_link, inter_link;
  int64_t global_batch = 0, micro_batch = 0;
  int64_t tp = 0, pp = 0, vp = 0, cp = 0, ep = 0, dp = 0;
  std::string zero_stage, seq_parallel, recompute, precision, flash_attn;
  std::string overlap_notes, notes;
  double time_s = 0;  // of a step; printed, or derived by the source's formula
  double mem_gb = 0;  // of a device
  std::string status, group;  // same model on the same cluster
  bool full_config = false;
  int line = 0;  // of the table
  // Of a cell that should have been a number; `where` is its column.
  std::optional<Error> unread;
};

// Reads the columns above by their names ("time_any_s" for the time); others
// are skipped. A number may have its thousands apart ("50,257"). A row with
// words where a number should be keeps the others, and `unread`. Errors name
// the line and the column: one of these that is missing.
Result<std::vector<PublishedRun>> ReadPublishedRuns(const std::string& path);

}  // namespace tessera
