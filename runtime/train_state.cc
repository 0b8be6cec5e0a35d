#include "runtime/train_state.h"

#include <cstring>
#include <vector>

#include "runtime/float16.h"
#include "runtime/kernels/fill.h"
#include "runtime/loss_scale.h"

namespace tessera {

Result<void> InitialiseState(const Graph& graph, uint64_t seed,
                             RankExecutor& executor) {
  const TaskGraph& tasks = executor.tasks();
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const ValueId id(v);
    const Value& value = tasks.values[v];
    if (!value.persistent || !executor.Holds(id)) continue;
    const Placement here = executor.placement(id);
    const int64_t size = SizeOf(value.dtype);
    if (value.what == "loss scale") {
      const LossScale start;
      TESSERA_RETURN_IF_ERROR(executor.WriteValue(id, &start));
      continue;
    }
    if (value.what != "parameter" && value.what != "master") {
      const std::vector<std::byte> zeros(
          static_cast<size_t>(here.elements() * size));
      TESSERA_RETURN_IF_ERROR(executor.WriteValue(id, zeros.data()));
      continue;
    }
    // The whole block, of which a flat layout keeps a run. A 16-bit parameter
    // is its master, rounded.
    LocalTensor block;
    block.dtype = Is16Bit(value.dtype) ? DType::kFloat32 : value.dtype;
    block.global_shape = value.shape;
    for (const Range& range : here.block) {
      block.shape.push_back(range.size());
      block.offset.push_back(range.begin);
    }
    std::vector<std::byte> host(
        static_cast<size_t>(block.elements() * SizeOf(block.dtype)));
    block.data = host.data();
    const Tensor& tensor = graph.tensor(value.tensor);
    FillWeight(block, tensor.init, tensor.name, seed);
    if (Is16Bit(value.dtype)) {
      std::vector<std::byte> rounded(
          static_cast<size_t>(block.elements() * size));
      Narrow(block.as<const float>(), block.elements(), value.dtype,
             rounded.data());
      host = std::move(rounded);
    }
    TESSERA_RETURN_IF_ERROR(
        executor.WriteValue(id, host.data() + here.run.begin * size));
  }
  return {};
}

LoadInput LoadFrom(const TokenData& data, uint64_t seed, const Graph& graph) {
  const int64_t seq_len = graph.seq_len;
  const int64_t batch = graph.global_batch;
  return [&data, seed, seq_len, batch](const Tensor& tensor,
                                       const LocalTensor& block,
                                       int64_t first_sample) -> Result<void> {
    const int64_t step = first_sample / batch;
    const bool tokens = tensor.name == "tokens";
    if (!tokens && tensor.name != "labels" && tensor.name != "positions") {
      return InvalidInput(
          "no data for it: expected tokens, labels or positions",
          "input '" + tensor.name + "'");
    }
    const auto width = static_cast<size_t>(block.shape[1]);
    const int64_t first = block.offset[1];
    std::vector<int32_t> row(static_cast<size_t>(seq_len));
    std::vector<int32_t> next(static_cast<size_t>(seq_len));
    int32_t* out = block.as<int32_t>();
    for (int64_t i = 0; i < block.shape[0]; ++i) {
      if (tensor.name == "positions") {
        for (size_t j = 0; j < width; ++j) {
          out[j] = static_cast<int32_t>(first + static_cast<int64_t>(j));
        }
      } else {
        TESSERA_RETURN_IF_ERROR(data.Sample(seed, step, block.offset[0] + i,
                                            seq_len, row.data(), next.data()));
        const int32_t* from = (tokens ? row : next).data() + first;
        std::memcpy(out, from, width * sizeof(int32_t));
      }
      out += width;
    }
    return {};
  };
}

}  // namespace tessera
