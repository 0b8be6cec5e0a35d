#include "runtime/collect_values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "runtime/comm/peer_errors.h"
#include "runtime/device/cpu_device.h"
#include "runtime/device/staging.h"
#include "runtime/float16.h"
#include "runtime/reshard_exec.h"

namespace tessera {
namespace {

// What all ranks learn of rank 0's writing.
struct Verdict {
  int32_t failed = 0;
  int32_t code = 0;
  int32_t finite = 1;
  char message[248] = {};
};

// What is collected at a time: rank 0 stages it on its device, beside what the
// step keeps there.
constexpr int64_t kCollectedBytes = int64_t{16} << 20;

// A box in pieces of whole rows of at most kCollectedBytes, where a row is not
// larger.
std::vector<Box> InPieces(const Box& box, int64_t element_bytes) {
  if (box.empty() || box[0].size() == 0) return {box};
  const int64_t row = ElementsOf(box) / box[0].size() * element_bytes;
  const int64_t rows =
      std::max<int64_t>(1, kCollectedBytes / std::max<int64_t>(1, row));
  std::vector<Box> pieces;
  for (int64_t begin = box[0].begin; begin < box[0].end; begin += rows) {
    Box& piece = pieces.emplace_back(box);
    piece[0] = {begin, std::min(begin + rows, box[0].end)};
  }
  return pieces;
}

// What of `held` may be in `piece`, which has whole rows of the block that it
// is in: a run of the same block, so one of the same buffer.
Placement RowsOf(const Placement& held, const Box& piece) {
  if (held.elements() == 0 || piece.empty()) return held;
  const Range& rows = held.block[0];
  const int64_t row = ElementsOf(held.block) / rows.size();
  const auto begin = std::max(rows.begin, piece[0].begin) - rows.begin;
  const auto end = std::min(rows.end, piece[0].end) - rows.begin;
  Placement some = held;
  some.run.begin = std::clamp(begin * row, held.run.begin, held.run.end);
  some.run.end = std::clamp(end * row, some.run.begin, held.run.end);
  return some;
}

// Those elements of this rank's part of a value in the memory of its device: in
// the buffer itself, or in `copy` of what lies on another tier.
Result<const void*> OnDevice(const RankExecutor& executor, ValueId id,
                             const Placement& some,
                             std::optional<Staging>& copy) {
  if (!executor.Holds(id) || some.elements() == 0) return nullptr;
  const Value& value = executor.tasks().value(id);
  const int64_t size = SizeOf(value.dtype);
  const Bytes offset{(some.run.begin - executor.placement(id).run.begin) *
                     size};
  if (value.tier == MemoryTier::kDevice) {
    return static_cast<const std::byte*>(executor.data(id)) + offset.value;
  }
  const Bytes bytes{some.elements() * size};
  std::vector<std::byte> elements(static_cast<size_t>(bytes.value));
  TESSERA_RETURN_IF_ERROR(
      executor.ReadValue(id, elements.data(), offset, bytes));
  TESSERA_TRY(copy, Staging::Allocate(executor.device(), bytes));
  executor.device().Write(copy->data(), elements.data(), bytes);
  return copy->data();
}

// The blocks that a value is made of: all of the tensor, or what a tile has of
// each shard.
std::vector<Box> BlocksOf(const Value& value, const DeviceGroup& group) {
  if (value.layout.tile.count == 1) return {WholeBox(value.shape)};
  std::vector<Box> blocks;
  for (size_t i = 0; i < group.devices.size(); ++i) {
    Box block = BlockAt(value.layout, group, value.shape, static_cast<int>(i));
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) {
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

std::vector<float> Widened(std::span<const std::byte> from, DType dtype) {
  std::vector<float> to(from.size() / static_cast<size_t>(SizeOf(dtype)));
  if (Is16Bit(dtype)) {
    Widen(from.data(), dtype, std::ssize(to), to.data());
  } else if (dtype == DType::kFloat64) {
    std::vector<double> wide(to.size());
    std::memcpy(wide.data(), from.data(), from.size());
    std::ranges::transform(wide, to.begin(),
                           [](double x) { return static_cast<float>(x); });
  } else {
    std::memcpy(to.data(), from.data(), from.size());
  }
  return to;
}

template <typename Number>
bool AllFinite(std::span<const std::byte> bytes) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(Number)) {
    Number number;
    std::memcpy(&number, bytes.data() + at, sizeof(number));
    if (!std::isfinite(number)) return false;
  }
  return true;
}

bool AreFinite(std::span<const std::byte> bytes, DType dtype) {
  if (dtype == DType::kFloat64) return AllFinite<double>(bytes);
  if (dtype == DType::kFloat32) return AllFinite<float>(bytes);
  if (!Is16Bit(dtype)) return true;
  const std::vector<float> wide = Widened(bytes, dtype);
  return AllFinite<float>(std::as_bytes(std::span(wide)));
}

}  // namespace

bool IsRounded(const Value& value) {
  return value.what == "parameter" && Is16Bit(value.dtype);
}

std::string NameInFile(const TaskGraph& tasks, const Graph& graph, ValueId id) {
  const Value& value = tasks.value(id);
  if (!value.persistent) return "";
  if (value.what == "loss scale") return std::string(kLossScaleName);
  if (!value.tensor.valid()) return "";
  const std::string& name = graph.tensor(value.tensor).name;
  if (value.what == "parameter" || value.what == "master") return name;
  static constexpr std::array<std::string_view, 6> kStates = {
      "m", "v", "momentum", "row", "column", "mean"};
  if (std::ranges::find(kStates, value.what) != kStates.end()) {
    return "optimizer." + std::string(value.what) + "." + name;
  }
  return "";
}

std::map<std::string, std::vector<ValueId>> StoredValues(const TaskGraph& tasks,
                                                         const Graph& graph) {
  std::map<std::string, std::vector<ValueId>> values;
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    if (IsRounded(tasks.values[v])) continue;
    const std::string name = NameInFile(tasks, graph, ValueId(v));
    if (name.empty()) continue;
    // Of a tied weight the first copy is as good as any, and so is a parameter
    // in fp32 beside its master on the host.
    std::vector<ValueId>& parts = values[name];
    const Value& value = tasks.values[v];
    const auto is_like = [&](const Value& first) {
      return value.what == first.what && value.group == first.group &&
             value.layout.tile.count > 1;
    };
    if (parts.empty() || is_like(tasks.value(parts[0]))) {
      parts.push_back(ValueId(v));
    }
  }
  return values;
}

Result<void> CollectValue(ValueId id, RankExecutor& executor, Communicator& all,
                          const TakeBlock& take) {
  const Value& value = executor.tasks().value(id);
  const DeviceGroup& group = executor.tasks().group(value.group);
  RankDevice& device = executor.device();
  // By rank, of which those outside the group have nothing, and rank 0 alone is
  // to have something.
  CollectivePart part;
  part.dtype = value.dtype;
  part.from.resize(static_cast<size_t>(all.size()));
  part.to.resize(part.from.size());
  const auto self = static_cast<size_t>(all.rank());
  std::vector<Box> pieces;
  for (const Box& block : BlocksOf(value, group)) {
    for (Box& piece : InPieces(block, SizeOf(value.dtype))) {
      pieces.push_back(std::move(piece));
    }
  }
  std::vector<std::byte> received;
  for (const Box& block : pieces) {
    for (size_t i = 0; i < group.devices.size(); ++i) {
      part.from[group.devices[i].index()] = RowsOf(
          PlacementAt(value.layout, group, value.shape, static_cast<int>(i)),
          block);
    }
    part.to[0] = WholeBlock(block);
    const Collective gather(CommKind::kGather, all, {&part, 1});
    const Bytes bytes{part.to[self].elements() * SizeOf(value.dtype)};
    std::optional<Staging> staged;
    const void* here = nullptr;
    if (gather.sends()) {
      TESSERA_TRY(here, OnDevice(executor, id, part.from[self], staged));
    }
    TESSERA_TRY(const Staging staging,
                Staging::Allocate(device, gather.staging()));
    TESSERA_TRY(const Staging gathered, Staging::Allocate(device, bytes));
    const PartBuffers buffers = {here, gathered.data()};
    TESSERA_RETURN_IF_ERROR(gather.Run(device, {&buffers, 1}, staging.data()));
    if (all.rank() == 0) {
      received.resize(static_cast<size_t>(bytes.value));
      device.Read(received.data(), gathered.data(), bytes);
      take(block, std::span<const std::byte>(received));
    }
    // Ranks with nothing to send do not run ahead: their one wait for rank 0
    // would be as long as all that is collected.
    TESSERA_RETURN_IF_ERROR(all.Barrier());
  }
  return {};
}

Result<std::vector<float>> CollectFloats(const std::vector<ValueId>& parts,
                                         RankExecutor& executor,
                                         Communicator& all) {
  const Value& first = executor.tasks().value(parts[0]);
  std::vector<float> elements;
  if (all.rank() == 0) {
    elements.resize(static_cast<size_t>(ElementsOf(WholeBox(first.shape))));
  }
  for (ValueId id : parts) {
    TESSERA_RETURN_IF_ERROR(CollectValue(
        id, executor, all,
        [&](const Box& block, std::span<const std::byte> bytes) {
          const std::vector<float> piece = Widened(bytes, first.dtype);
          PutBlock(block, piece.data(), first.shape, sizeof(float),
                   elements.data());
        }));
  }
  return elements;
}

void PutBlock(const Box& block, const void* elements, const Shape& shape,
              int64_t element_bytes, void* tensor) {
  const BoxCopy copy = CopyOf(block, WholeBlock(block),
                              WholeBlock(WholeBox(shape)), element_bytes);
  CpuDevice().Copy(static_cast<std::byte*>(tensor) + copy.to_offset,
                   static_cast<const std::byte*>(elements) + copy.from_offset,
                   copy.strided);
}

std::vector<std::byte> Rounded(std::span<const float> from, DType dtype) {
  std::vector<std::byte> to(from.size() * static_cast<size_t>(SizeOf(dtype)));
  if (Is16Bit(dtype)) {
    Narrow(from.data(), std::ssize(from), dtype, to.data());
  } else if (dtype == DType::kFloat64) {
    const std::vector<double> wide(from.begin(), from.end());
    std::memcpy(to.data(), wide.data(), to.size());
  } else {
    std::memcpy(to.data(), from.data(), to.size());
  }
  return to;
}

Result<bool> WriteFinite(std::span<const std::byte> elements, DType dtype,
                         SafetensorsWriter& writer) {
  if (!AreFinite(elements, dtype)) return false;
  TESSERA_RETURN_IF_ERROR(writer.Write(elements));
  return true;
}

Result<bool> Announce(const Result<bool>& saved, const std::string& path,
                      HostMessages all) {
  Verdict verdict;
  if (saved) {
    verdict.finite = *saved ? 1 : 0;
  } else {
    verdict.failed = 1;
    verdict.code = static_cast<int32_t>(saved.error().code);
    std::strncpy(verdict.message, saved.error().message.c_str(),
                 sizeof(verdict.message) - 1);
  }
  TESSERA_RETURN_IF_ERROR(all.Broadcast(&verdict, sizeof(verdict), 0));
  if (verdict.failed == 0) return verdict.finite != 0;
  // The others tell whose error it is.
  return Error{static_cast<ErrorCode>(verdict.code),
               all.rank() == 0 ? verdict.message
                               : RankAborted(0, verdict.message).message,
               path};
}

}  // namespace tessera
