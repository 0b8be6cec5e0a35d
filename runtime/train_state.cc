#include "runtime/train_state.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "planner/base/threads.h"
#include "planner/ir/vocabulary.h"
#include "runtime/float16.h"
#include "runtime/kernels/fill.h"
#include "runtime/loss_scale.h"
#include "runtime/thread_pool.h"

namespace tessera {

namespace {

// Values are drawn and go where they lie in pieces: whole blocks of a file,
// also once rounded to 16 bits, and turns for the threads of many cores.
constexpr int64_t kPieceBytes = 8 << 20;
static_assert(kPieceBytes / 2 % kFileBlockBytes == 0);

// Of the elements of a block from the one at `first` on, those that are in its
// first `rows` rows, of which there are as many in the whole tensor.
int64_t ElementsInRows(const LocalTensor& block, int64_t rows, int64_t first) {
  const int64_t here =
      std::clamp<int64_t>(rows - block.offset[0], 0, block.shape[0]);
  const int64_t of_row =
      block.elements() / std::max<int64_t>(1, block.shape[0]);
  return std::max<int64_t>(0, here * of_row - first);
}

// Draws a value's elements, or makes them zero. `narrow` is a 16-bit parameter
// whose master the value is, in the same place; or invalid.
Result<void> Initialise(const Graph& graph,
                        const std::map<TensorId, int64_t>& padded,
                        uint64_t seed, ValueId id, ValueId narrow,
                        RankExecutor& executor, ThreadPool* threads,
                        StartUp& start) {
  const Value& value = executor.tasks().value(id);
  if (value.what == "loss scale") {
    const LossScale scale;
    return executor.WriteValue(id, &scale);
  }
  const bool drawn = value.what == "parameter" || value.what == "master";
  const Placement here = executor.placement(id);
  const int64_t size = SizeOf(value.dtype);
  if (!drawn && value.tier == MemoryTier::kDevice) {
    executor.ZeroValue(id);
    return start.Advance({here.elements() * size});
  }
  LocalTensor block = BlockOf(value, here);
  // A 16-bit parameter is its master, rounded.
  if (Is16Bit(value.dtype)) block.dtype = DType::kFloat32;
  const int64_t per_piece = kPieceBytes / SizeOf(block.dtype);
  std::vector<std::byte> piece;
  std::vector<std::byte> rounded;
  const auto write_rounded = [&](ValueId to, int64_t first, int64_t count) {
    const DType dtype = executor.tasks().value(to).dtype;
    const Bytes bytes{count * SizeOf(dtype)};
    rounded.resize(static_cast<size_t>(bytes.value));
    Narrow(block.as<const float>(), count, dtype, rounded.data());
    return executor.WriteValue(to, rounded.data(), {first * SizeOf(dtype)},
                               bytes);
  };
  for (int64_t first = 0; first < here.elements(); first += per_piece) {
    const int64_t count = std::min(per_piece, here.elements() - first);
    const Bytes bytes{count * size};
    TESSERA_RETURN_IF_ERROR(start.Advance(bytes));
    piece.resize(static_cast<size_t>(count * SizeOf(block.dtype)));
    block.data = piece.data();
    if (drawn) {
      const int64_t begin = here.run.begin + first;
      const Tensor& tensor = graph.tensor(value.tensor);
      FillWeight(block, {begin, begin + count}, tensor.init, tensor.name, seed,
                 threads);
      if (const auto rows = padded.find(value.tensor); rows != padded.end()) {
        const int64_t kept =
            std::min(count, ElementsInRows(block, rows->second, begin));
        std::fill(piece.begin() + kept * SizeOf(block.dtype), piece.end(),
                  std::byte{0});
      }
    }
    if (drawn && Is16Bit(value.dtype)) {
      TESSERA_RETURN_IF_ERROR(write_rounded(id, first, count));
      continue;
    }
    TESSERA_RETURN_IF_ERROR(
        executor.WriteValue(id, piece.data(), {first * size}, bytes));
    if (!narrow.valid()) continue;
    TESSERA_RETURN_IF_ERROR(write_rounded(narrow, first, count));
    TESSERA_RETURN_IF_ERROR(
        start.Advance({count * SizeOf(executor.tasks().value(narrow).dtype)}));
  }
  return {};
}

}  // namespace

Result<void> InitialiseState(const Graph& graph, uint64_t seed,
                             RankExecutor& executor, StartUp start) {
  start.total = PersistentBytes(executor);
  // Where the device has no threads of the host those of all cores draw for it.
  std::unique_ptr<ThreadPool> own;
  ThreadPool* threads = executor.device().threads();
  if (threads == nullptr) {
    own = std::make_unique<ThreadPool>(HostCores());
    threads = own.get();
  }
  const std::map<TensorId, int64_t> padded = PaddedWeights(graph);
  std::vector<ValueId> held;
  std::multimap<TensorId, ValueId> parameters;  // of 16 bits
  const TaskGraph& tasks = executor.tasks();
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (!value.persistent || !executor.Holds(ValueId(v))) continue;
    held.push_back(ValueId(v));
    if (value.what == "parameter" && Is16Bit(value.dtype)) {
      parameters.emplace(value.tensor, ValueId(v));
    }
  }
  // Drawing takes longest: a parameter is drawn with its master, where both are
  // in one place.
  std::map<ValueId, ValueId> with_master;
  std::set<ValueId> drawn;
  for (const ValueId id : held) {
    if (tasks.value(id).what != "master") continue;
    const auto [begin, end] = parameters.equal_range(tasks.value(id).tensor);
    for (auto it = begin; it != end; ++it) {
      if (executor.placement(it->second) != executor.placement(id)) continue;
      with_master[id] = it->second;
      drawn.insert(it->second);
      break;
    }
  }
  for (const ValueId id : held) {
    if (drawn.contains(id)) continue;
    const auto narrow = with_master.find(id);
    TESSERA_RETURN_IF_ERROR(
        Initialise(graph, padded, seed, id,
                   narrow == with_master.end() ? ValueId() : narrow->second,
                   executor, threads, start));
  }
  return {};
}

}  // namespace tessera
