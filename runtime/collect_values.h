#pragma once
// What is stored of a run, and how its elements come to rank 0 from wherever
// they lie.

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"
#include "runtime/comm/communicator.h"
#include "runtime/comm/host_messages.h"
#include "runtime/executor.h"
#include "runtime/safetensors.h"

namespace tessera {

inline constexpr std::string_view kLossScaleName = "optimizer.loss_scale";

// A parameter that is its fp32 master, rounded.
bool IsRounded(const Value& value);

// The name under which a value is stored; empty for what is not. Of a 16-bit
// weight it is the master that is stored.
std::string NameInFile(const TaskGraph& tasks, const Graph& graph, ValueId id);

// What is stored under each name: one value, or the tiles of a weight. By name,
// so that files do not depend on the plan.
std::map<std::string, std::vector<ValueId>> StoredValues(const TaskGraph& tasks,
                                                         const Graph& graph);

// Brings the elements of a value to rank 0 in pieces, where take(block, bytes)
// has each: of what is no tile they follow each other in the tensor. Called by
// all ranks, which are those of `all`.
using TakeBlock =
    std::function<void(const Box& block, std::span<const std::byte> elements)>;
Result<void> CollectValue(ValueId id, RankExecutor& executor, Communicator& all,
                          const TakeBlock& take);

// The whole of what `parts` are, as fp32: on rank 0, nothing on the others.
Result<std::vector<float>> CollectFloats(const std::vector<ValueId>& parts,
                                         RankExecutor& executor,
                                         Communicator& all);

// Puts a block's elements in their places in the whole tensor.
void PutBlock(const Box& block, const void* elements, const Shape& shape,
              int64_t element_bytes, void* tensor);

// Elements of fp32 in another type.
std::vector<std::byte> Rounded(std::span<const float> from, DType dtype);

// Writes elements, unless one of them is not finite: then it returns false.
Result<bool> WriteFinite(std::span<const std::byte> elements, DType dtype,
                         SafetensorsWriter& writer);

// What rank 0 has `saved`, or its error, which is of the file at `path`, on all
// ranks.
Result<bool> Announce(const Result<bool>& saved, const std::string& path,
                      HostMessages all);

}  // namespace tessera
