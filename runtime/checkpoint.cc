#include "runtime/checkpoint.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/file.h"
#include "planner/base/whole_number.h"
#include "planner/io/json_value.h"
#include "planner/io/onnx.h"
#include "planner/ir/vocabulary.h"
#include "planner/lower/factored_update.h"
#include "runtime/comm/host_messages.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/device/cpu_device.h"
#include "runtime/device/staging.h"
#include "runtime/float16.h"
#include "runtime/loss_scale.h"
#include "runtime/older_checkpoints.h"
#include "runtime/published_files.h"
#include "runtime/safetensors.h"

namespace tessera {
namespace {

// Apart from the tasks' messages, which are numbered by values, of which there
// are fewer than 2^31.
constexpr uint64_t kCheckpointTag = uint64_t{1} << 41;

constexpr char kLossScale[] = "optimizer.loss_scale";

// A parameter that is its fp32 master, rounded.
bool IsRounded(const Value& value) {
  return value.what == "parameter" && Is16Bit(value.dtype);
}

// The name under which a value is stored; empty for what is not. Of a 16-bit
// weight it is the master that is stored.
std::string NameInFile(const TaskGraph& tasks, const Graph& graph, ValueId id) {
  const Value& value = tasks.value(id);
  if (!value.persistent) return "";
  if (value.what == "loss scale") return kLossScale;
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

constexpr std::string_view kStochasticCast = "stochastic_cast";

// In the metadata.
constexpr const char* kRounding = "rounding";
constexpr const char* kStochastic = "stochastic";

// Its kernel is of the same name, or those of a factored one begin with it.
std::string_view OptimizerOf(const TaskGraph& tasks) {
  for (const Task& task : tasks.tasks) {
    for (const OptimizerRow& row : Optimizers()) {
      if (task.kernel == row.name ||
          (row.factored && FindFactoredKernel(task.kernel) != nullptr)) {
        return row.name;
      }
    }
  }
  return "";
}

// Whether one rank is told to stop.
Result<bool> AnyStops(const std::atomic<bool>* stop, HostMessages all) {
  const int32_t mine = stop != nullptr && stop->load() ? 1 : 0;
  std::vector<int32_t> each(static_cast<size_t>(all.size()));
  TESSERA_RETURN_IF_ERROR(all.AllGather(&mine, sizeof(mine), each.data()));
  return std::ranges::any_of(each, [](int32_t one) { return one != 0; });
}

// What all ranks learn of rank 0's writing.
struct Verdict {
  int32_t failed = 0;
  int32_t code = 0;
  int32_t finite = 1;
  char message[248] = {};
};

// What rank 0 has `saved`, or its error, on all ranks.
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

// A text of the metadata; empty where there is none.
std::string TextOf(const SafetensorsFile& file, std::string_view key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? "" : found->second;
}

// A whole number of the metadata, if it is there.
template <typename Integer>
Result<std::optional<Integer>> Number(const SafetensorsFile& file,
                                      const std::string& key, Integer most,
                                      const std::string& expected,
                                      const std::string& path) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) return std::optional<Integer>();
  const auto value = ParseWhole<Integer>(found->second);
  if (!value || *value < Integer{0} || *value > most) {
    return InvalidInput(
        key + " '" + found->second + "': expected a number" + expected,
        path + ": __metadata__");
  }
  return value;
}

Result<std::optional<int64_t>> Count(const SafetensorsFile& file,
                                     const std::string& key,
                                     const std::string& path) {
  return Number<int64_t>(file, key, kMostRunSteps, " of at most 2^53", path);
}

// How many samples a run takes in its first steps.
Result<int64_t> SamplesBehind(int64_t step, int64_t global_batch,
                              const std::string& path) {
  int64_t samples = 0;
  if (!__builtin_mul_overflow(step, global_batch, &samples) &&
      samples <= kMostRunSteps) {
    return samples;
  }
  return InvalidInput("step '" + std::to_string(step) +
                          "': expected at most 2^53 samples behind it, " +
                          std::to_string(global_batch) + " a step",
                      path + ": __metadata__");
}

// In the metadata: which weights have rows that pad a vocabulary, and how many
// rows before those. Absent: none has.
constexpr char kPadding[] = "tokens_of_padded";

std::string PaddingText(const Graph& graph) {
  std::string text;
  for (const auto& [weight, tokens] : PaddedWeights(graph)) {
    AppendTo(text, ", ",
             graph.tensor(weight).name + ": " + std::to_string(tokens));
  }
  return text;
}

// A row that pads one model's vocabulary may be a token's in another one of the
// same shapes.
Result<void> CheckPadding(const std::string& theirs, const Graph& graph,
                          const std::string& path) {
  const std::string own = PaddingText(graph);
  if (theirs == own) return {};
  const auto named = [](const std::string& text) {
    return text.empty() ? std::string("all rows") : "'" + text + "'";
  };
  return InvalidInput("has rows of tokens " + named(theirs) + ": expected " +
                          named(own) + " (model.vocab_multiple)",
                      path + ": __metadata__");
}

// This rank's part of a value in the memory of its device: the buffer itself,
// or `copy` of what lies on another tier.
Result<const void*> OnDevice(const RankExecutor& executor, ValueId id,
                             std::optional<Staging>& copy) {
  const Value& value = executor.tasks().value(id);
  if (value.tier == MemoryTier::kDevice || !executor.Holds(id)) {
    return executor.data(id);
  }
  const Bytes bytes{executor.placement(id).elements() * SizeOf(value.dtype)};
  std::vector<std::byte> elements(static_cast<size_t>(bytes.value));
  TESSERA_RETURN_IF_ERROR(executor.ReadValue(id, elements.data()));
  TESSERA_TRY(copy, Staging::Allocate(executor.device(), bytes));
  executor.device().Write(copy->data(), elements.data(), bytes);
  return copy->data();
}

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

// Brings the elements of a value to rank 0 in pieces, where take(block, bytes)
// has each: of what is no tile they follow each other in the tensor. Senders do
// not run ahead: what is under way takes their memory.
template <typename Take>
Result<void> CollectValue(ValueId id, RankExecutor& executor, Communicator& all,
                          const Take& take) {
  const Value& value = executor.tasks().value(id);
  const DeviceGroup& group = executor.tasks().group(value.group);
  RankDevice& device = executor.device();
  std::vector<int> senders;
  std::vector<Placement> sources;
  for (size_t i = 0; i < group.devices.size(); ++i) {
    senders.push_back(group.devices[i].value);
    sources.push_back(
        PlacementAt(value.layout, group, value.shape, static_cast<int>(i)));
  }
  std::optional<Staging> staged;
  TESSERA_TRY(const void* const part, OnDevice(executor, id, staged));
  std::vector<Box> pieces;
  for (const Box& block : BlocksOf(value, group)) {
    for (Box& piece : InPieces(block, SizeOf(value.dtype))) {
      pieces.push_back(std::move(piece));
    }
  }
  std::vector<std::byte> received;
  for (const Box& block : pieces) {
    const Placement target = WholeBlock(block);
    const int receiver = 0;
    const GroupTransfer transfer(all, value.dtype, senders, sources,
                                 {&receiver, 1}, {target},
                                 /*positionwise=*/false);
    TESSERA_TRY(const Staging staging,
                Staging::Allocate(device, Max(transfer.send_staging(),
                                              transfer.receive_staging())));
    TESSERA_RETURN_IF_ERROR(
        transfer.Send(device, part, {kCheckpointTag}, staging.data()));
    if (all.rank() == 0) {
      const Bytes bytes{target.elements() * SizeOf(value.dtype)};
      TESSERA_TRY(const Staging gathered, Staging::Allocate(device, bytes));
      TESSERA_RETURN_IF_ERROR(transfer.Receive(
          device, gathered.data(), {kCheckpointTag}, staging.data()));
      received.resize(static_cast<size_t>(bytes.value));
      device.Read(received.data(), gathered.data(), bytes);
      take(block, std::span<const std::byte>(received));
    }
    TESSERA_RETURN_IF_ERROR(all.Barrier());
  }
  return {};
}

// Puts a block's elements in their places in the whole tensor.
void PutBlock(const Box& block, const void* elements, const Shape& shape,
              int64_t element_bytes, void* tensor) {
  const BoxCopy copy = CopyOf(block, WholeBlock(block),
                              WholeBlock(WholeBox(shape)), element_bytes);
  CpuDevice().Copy(static_cast<std::byte*>(tensor) + copy.to_offset,
                   static_cast<const std::byte*>(elements) + copy.from_offset,
                   copy.strided);
}

// What is stored under each name: one value, or the tiles of a weight. By name,
// so that files do not depend on the plan.
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

// Elements of fp32 in another type.
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

// The whole of what `parts` are, as fp32: on rank 0, nothing on the others.
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

// An error of the file at `path`, with what may be gone on from in its place.
Error WithOlder(Error error, const std::string& path) {
  if (error.code == ErrorCode::kInvalidInput) error.message += OlderText(path);
  return error;
}

// From which element of a tensor to which a box has some.
std::pair<int64_t, int64_t> SpanOf(const Box& box, const Shape& shape) {
  if (ElementsOf(box) == 0) return {0, 0};
  int64_t first = 0;
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    first = first * shape[d] + box[d].begin;
    last = last * shape[d] + box[d].end - 1;
  }
  return {first, last + 1};
}

// The part of a checkpoint's tensor that is placed `here`, as it was written.
Result<std::vector<std::byte>> ReadPart(const SafetensorsFile& file,
                                        const std::string& path,
                                        const SafetensorsEntry& entry,
                                        const Placement& here) {
  TESSERA_TRY(const std::byte* const stored, file.Find(entry));
  const Placement whole = WholeBlock(WholeBox(entry.shape));
  const int64_t size = SizeOf(entry.dtype);
  std::vector<std::byte> part(static_cast<size_t>(here.elements() * size));
  CpuDevice host;
  for (const Box& box : BoxesOf(here)) {
    const auto [first, behind] = SpanOf(box, entry.shape);
    if (auto intact = file.Check(entry.name, first * size, behind * size);
        !intact) {
      return WithOlder(intact.error(), path);
    }
    const BoxCopy copy = CopyOf(box, whole, here, size);
    host.Copy(part.data() + copy.to_offset, stored + copy.from_offset,
              copy.strided);
  }
  return part;
}

// The checkpoint at `path`, or a file of weights.
Result<SafetensorsFile> OpenSaved(const std::string& path) {
  auto file = SafetensorsFile::Open(path);
  if (!file) return WithOlder(file.error(), path);
  return file;
}

// Whether a file has what weights alone have not.
bool IsCheckpoint(const SafetensorsFile& file) {
  return file.metadata().contains("optimizer") ||
         std::ranges::any_of(file.names(), [](const std::string& name) {
           return name.starts_with("optimizer.");
         });
}

// The run that wrote a file; nothing where it is weights alone.
Result<std::optional<SavedRun>> RunOf(const SafetensorsFile& file,
                                      const std::string& path) {
  TESSERA_TRY(const auto step, Count(file, "step", path));
  if (!step && IsCheckpoint(file)) {
    return InvalidInput(
        "has no step, and the file has more than weights: expected the "
        "'step' of a checkpoint",
        path + ": __metadata__");
  }
  if (!step) return std::optional<SavedRun>();
  SavedRun run;
  run.step = *step;
  TESSERA_TRY(run.samples, Count(file, "samples", path));
  TESSERA_TRY(run.seed, Number(file, "seed",
                               std::numeric_limits<uint64_t>::max(), "", path));
  run.optimizer = TextOf(file, "optimizer");
  run.graph = TextOf(file, "graph");
  TESSERA_TRY(run.global_batch, Count(file, "global_batch", path));
  TESSERA_TRY(run.seq_len, Count(file, "seq_len", path));
  run.dtype = TextOf(file, "dtype");
  run.stochastic_rounding = TextOf(file, kRounding) == kStochastic;
  run.padding = TextOf(file, kPadding);
  return std::optional(std::move(run));
}

// Files of tensors one after the other, each of at most `most` bytes unless one
// tensor alone has more: by tensor the number of its file.
std::vector<size_t> FilesOf(const std::vector<PublishedTensor>& tensors,
                            DType dtype, Bytes most) {
  std::vector<size_t> files;
  size_t file = 0;
  int64_t used = 0;
  for (const PublishedTensor& tensor : tensors) {
    const int64_t bytes = ElementsOf(WholeBox(tensor.shape)) * SizeOf(dtype);
    if (used > 0 && used + bytes > most.value) {
      ++file;
      used = 0;
    }
    used += bytes;
    files.push_back(file);
  }
  return files;
}

std::string FileName(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors",
                file + 1, files);
  return name;
}

// {"metadata": {"total_size": N}, "weight_map": {"tensor": "file", …}}
std::string IndexText(const std::vector<PublishedTensor>& tensors,
                      const std::vector<size_t>& files, DType dtype) {
  int64_t total = 0;
  std::string map;
  for (size_t t = 0; t < tensors.size(); ++t) {
    total += ElementsOf(WholeBox(tensors[t].shape)) * SizeOf(dtype);
    map += (t == 0 ? "" : ",");
    JsonValue name;
    name.kind = JsonValue::Kind::kString;
    name.text = tensors[t].name;
    map += "\n    " + name.ToString() + ": \"" +
           FileName(files[t], files.back() + 1) + "\"";
  }
  return "{\n  \"metadata\": {\"total_size\": " + std::to_string(total) +
         "},\n  \"weight_map\": {" + map + "\n  }\n}\n";
}

// Writes elements, unless one of them is not finite: then it returns false.
Result<bool> WriteFinite(std::span<const std::byte> elements, DType dtype,
                         SafetensorsWriter& writer) {
  if (!AreFinite(elements, dtype)) return false;
  TESSERA_RETURN_IF_ERROR(writer.Write(elements));
  return true;
}

// The files of SaveWeights, and the folder where there is none. Destroyed
// before they are all there, it removes what it has made.
class WeightWriter {
 public:
  // Both outlive the writer.
  WeightWriter(const WeightFiles& files,
               const std::vector<PublishedTensor>& tensors)
      : files_(files),
        tensors_(tensors),
        file_of_(FilesOf(tensors, files.dtype, files.file_bytes)) {}
  WeightWriter(const WeightWriter&) = delete;
  WeightWriter& operator=(const WeightWriter&) = delete;
  ~WeightWriter() {
    if (committed_) return;
    file_.reset();
    std::error_code code;
    for (const std::string& path : written_) {
      std::filesystem::remove(path, code);
    }
    if (made_folder_) std::filesystem::remove(files_.folder, code);
  }

  // Before all else.
  Result<void> MakeFolder() {
    std::error_code code;
    made_folder_ = std::filesystem::create_directories(files_.folder, code);
    if (code) {
      return Error{ErrorCode::kUnavailable,
                   "cannot make the folder: " + code.message(), files_.folder};
    }
    return CheckHasNoWeights(files_.folder);
  }

  // The elements of the next tensor; false where one of them is not finite in
  // the files' type.
  Result<bool> Write(std::span<const float> elements) {
    if (!file_) TESSERA_RETURN_IF_ERROR(Begin());
    while (!elements.empty()) {
      const auto piece =
          elements.first(std::min(elements.size(), kPieceElements));
      TESSERA_TRY(const bool finite, WriteFinite(Rounded(piece, files_.dtype),
                                                 files_.dtype, *file_));
      if (!finite) return false;
      elements = elements.subspan(piece.size());
    }
    const size_t file = file_of_[next_++];
    if (next_ < tensors_.size() && file_of_[next_] == file) return true;
    // There may be another run's by now.
    TESSERA_RETURN_IF_ERROR(file_->CommitNew());
    file_.reset();
    written_.push_back(PathOf(file));
    return true;
  }

  // Behind the last tensor: the index of several files.
  Result<void> Commit() {
    if (written_.size() > 1) {
      const std::string text = IndexText(tensors_, file_of_, files_.dtype);
      TESSERA_TRY(
          AtomicFile index,
          AtomicFile::Create(files_.folder + "/model.safetensors.index.json"));
      TESSERA_RETURN_IF_ERROR(index.Write(std::as_bytes(std::span(text))));
      TESSERA_RETURN_IF_ERROR(index.CommitNew());
    }
    committed_ = true;
    return {};
  }

 private:
  static constexpr size_t kPieceElements = size_t{4} << 20;

  std::string PathOf(size_t file) const {
    return files_.folder + "/" + FileName(file, file_of_.back() + 1);
  }

  // The file of the next tensor.
  Result<void> Begin() {
    std::vector<SafetensorsEntry> entries;
    const size_t file = file_of_[next_];
    for (size_t t = next_; t < tensors_.size() && file_of_[t] == file; ++t) {
      entries.push_back({tensors_[t].name, files_.dtype, tensors_[t].shape});
    }
    TESSERA_TRY(
        SafetensorsWriter created,
        SafetensorsWriter::Create(PathOf(file), entries, {{"format", "pt"}}));
    file_.emplace(std::move(created));
    return {};
  }

  const WeightFiles& files_;
  const std::vector<PublishedTensor>& tensors_;
  const std::vector<size_t> file_of_;  // by tensor
  std::optional<SafetensorsWriter> file_;
  size_t next_ = 0;                   // tensor
  std::vector<std::string> written_;  // files that are whole
  bool made_folder_ = false;
  bool committed_ = false;
};

// Tensors to be published, on rank 0. A weight that several have parts of is
// collected once, and kept until the last of them.
class WeightCollector {
 public:
  WeightCollector(const std::vector<PublishedTensor>& tensors,
                  const Graph& graph, RankExecutor& executor, Communicator& all)
      : values_(StoredValues(executor.tasks(), graph)),
        executor_(executor),
        all_(all) {
    for (const PublishedTensor& tensor : tensors) {
      for (const PublishedTensor::Part& part : tensor.parts) {
        ++weights_[part.weight].left;
      }
    }
  }

  // The elements of a tensor; nothing on the other ranks, which all call this
  // with the same one.
  Result<std::vector<float>> Collect(const PublishedTensor& tensor) {
    std::vector<float> elements;
    if (all_.rank() == 0) {
      elements.resize(static_cast<size_t>(ElementsOf(WholeBox(tensor.shape))));
    }
    for (const auto& [weight, piece] : tensor.parts) {
      Weight& whole = weights_[weight];
      if (!std::exchange(whole.here, true)) {
        TESSERA_TRY(whole.elements,
                    CollectFloats(values_.at(weight->name), executor_, all_));
      }
      if (all_.rank() == 0) {
        PutPiece(piece, whole.elements.data(), elements.data());
      }
      if (--whole.left == 0) weights_.erase(weight);
    }
    return elements;
  }

 private:
  struct Weight {
    std::vector<float> elements;
    bool here = false;
    size_t left = 0;  // parts of it to come
  };

  const std::map<std::string, std::vector<ValueId>> values_;
  RankExecutor& executor_;
  Communicator& all_;
  std::map<const Tensor*, Weight> weights_;
};

// Whether all that the file has belongs to the model: it may be one of more
// layers.
Result<void> CheckAllIsKept(const SafetensorsFile& file,
                            const std::string& path, const TaskGraph& tasks,
                            const Graph& graph) {
  const auto kept = StoredValues(tasks, graph);
  for (const std::string& name : file.names()) {
    // In other precisions nothing scales the loss.
    if (kept.contains(name) || name == kLossScale || name == kChecksums) {
      continue;
    }
    return InvalidInput("tensor '" + name +
                            "' is none that the model or its optimizer has: "
                            "expected a checkpoint of the same model",
                        path);
  }
  return {};
}

// Puts what was written in the place of the checkpoint at `path`, of which it
// keeps `keep` - 1 and those before it.
Result<bool> PutInPlace(SafetensorsWriter& writer, const std::string& path,
                        int64_t step, int keep) {
  // The disk may be full as late as this.
  TESSERA_RETURN_IF_ERROR(writer.Flush());
  if (keep > 1) {
    // What has no header of a checkpoint is replaced, as without `keep`.
    const auto before = SavedRunOf(path);
    if (before && *before) {
      TESSERA_RETURN_IF_ERROR(KeepAsOlder(path, (*before)->step));
    }
  }
  TESSERA_RETURN_IF_ERROR(writer.Commit());
  if (keep > 1) RemoveOlder(path, step, keep - 1);
  return true;
}

}  // namespace

Result<bool> SaveCheckpoint(const std::string& path, const Graph& graph,
                            uint64_t seed, RankExecutor& executor,
                            Communicator& all, int keep) {
  const TaskGraph& tasks = executor.tasks();
  const auto values = StoredValues(tasks, graph);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, parts] : values) {
    const Value& value = tasks.value(parts[0]);
    entries.push_back({name, value.dtype, value.shape});
  }

  // Rank 0 keeps receiving where it writes no more, since its peers keep
  // sending.
  std::optional<SafetensorsWriter> writer;
  Result<bool> saved = true;
  if (all.rank() == 0) {
    std::map<std::string, std::string, std::less<>> metadata = {
        {"dtype", std::string(NameOf(graph.dtype))},
        {"global_batch", std::to_string(graph.global_batch)},
        {"graph", Fingerprint(graph)},
        {"optimizer", std::string(OptimizerOf(tasks))},
        {"samples", std::to_string(executor.samples())},
        {"seed", std::to_string(seed)},
        {"seq_len", std::to_string(graph.seq_len)},
        {"step", std::to_string(executor.step())}};
    if (std::ranges::find(tasks.tasks, kStochasticCast, &Task::kernel) !=
        tasks.tasks.end()) {
      metadata[kRounding] = kStochastic;
    }
    if (const std::string padded = PaddingText(graph); !padded.empty()) {
      metadata[kPadding] = padded;
    }
    auto created = SafetensorsWriter::Create(path, entries, metadata,
                                             /*checksums=*/true);
    if (created) {
      writer.emplace(std::move(*created));
    } else {
      saved = created.error();
    }
  }
  for (const auto& [name, parts] : values) {
    const Value& first = tasks.value(parts[0]);
    const auto write = [&](std::span<const std::byte> elements) {
      if (!writer || !saved || !*saved) return;
      saved = WriteFinite(elements, first.dtype, *writer);
    };
    // Tiles are put together first.
    std::vector<std::byte> whole;
    const bool tiled = first.layout.tile.count > 1;
    if (tiled && writer) {
      whole.resize(static_cast<size_t>(ElementsOf(WholeBox(first.shape)) *
                                       SizeOf(first.dtype)));
    }
    for (ValueId id : parts) {
      TESSERA_RETURN_IF_ERROR(CollectValue(
          id, executor, all,
          [&](const Box& block, std::span<const std::byte> elements) {
            if (!tiled) return write(elements);
            PutBlock(block, elements.data(), first.shape, SizeOf(first.dtype),
                     whole.data());
          }));
    }
    if (tiled) write(whole);
  }
  if (writer && saved && *saved) {
    saved = PutInPlace(*writer, path, executor.step(), keep);
  }
  return Announce(saved, path, {executor.device(), all});
}

Result<void> CheckHasNoWeights(const std::string& folder) {
  std::error_code code;
  for (const auto& entry : std::filesystem::directory_iterator(folder, code)) {
    const std::string name = entry.path().filename();
    // Of a run that was killed there may be "….tmp.HOST.PID.N" (AtomicFile).
    if (name.starts_with("model") &&
        name.find(".safetensors") != std::string::npos &&
        name.find(".tmp.") == std::string::npos) {
      return InvalidInput("has weights already: " + name, folder);
    }
  }
  return {};
}

Result<bool> SaveWeights(const WeightFiles& files, const Graph& graph,
                         RankExecutor& executor, Communicator& all) {
  const std::vector<PublishedTensor> tensors =
      PublishedTensors(files.layout, graph);
  WeightCollector collector(tensors, graph, executor, all);
  // Rank 0 keeps receiving where it writes no more, since its peers keep
  // sending.
  std::optional<WeightWriter> writer;
  Result<bool> saved = true;
  if (all.rank() == 0) {
    writer.emplace(files, tensors);
    if (auto made = writer->MakeFolder(); !made) saved = made.error();
  }
  for (const PublishedTensor& tensor : tensors) {
    TESSERA_TRY(const bool stops,
                AnyStops(files.stop, {executor.device(), all}));
    if (stops) {
      writer.reset();
      TESSERA_RETURN_IF_ERROR(executor.world().Flush());
      return Error{ErrorCode::kInterrupted,
                   "interrupted before all weights were written", files.folder};
    }
    TESSERA_TRY(const std::vector<float> elements, collector.Collect(tensor));
    if (writer && saved && *saved) saved = writer->Write(elements);
  }
  if (writer && saved && *saved) {
    if (auto written = writer->Commit(); !written) saved = written.error();
  }
  // All is there, or nothing, when the others learn of it.
  writer.reset();
  return Announce(saved, files.folder, {executor.device(), all});
}

Result<void> LoadCheckpoint(const std::string& path,
                            const PublishedLayout& layout, const Graph& graph,
                            RankExecutor& executor, StartUp start) {
  const TaskGraph& tasks = executor.tasks();
  std::optional<SafetensorsFile> file;
  std::optional<SavedRun> run;
  if (IsOneFile(path)) {
    TESSERA_TRY(SafetensorsFile one, OpenSaved(path));
    file.emplace(std::move(one));
    TESSERA_TRY(run, RunOf(*file, path));
  }
  int64_t samples = 0;
  std::optional<PublishedFiles> weights;
  if (run) {
    TESSERA_RETURN_IF_ERROR(
        CheckCheckpoint(*run, path, OptimizerOf(tasks), graph));
    TESSERA_RETURN_IF_ERROR(CheckAllIsKept(*file, path, tasks, graph));
    TESSERA_TRY(samples,
                run->samples
                    ? *run->samples
                    : SamplesBehind(run->step, graph.global_batch, path));
  } else {
    TESSERA_TRY(PublishedFiles opened,
                PublishedFiles::Open(path, layout, graph));
    weights.emplace(std::move(opened));
  }

  start.total = PersistentBytes(executor);
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const ValueId id(v);
    const Value& value = tasks.values[v];
    if (!value.persistent || !executor.Holds(id)) continue;
    const Placement here = executor.placement(id);
    const Bytes bytes{here.elements() * SizeOf(value.dtype)};
    TESSERA_RETURN_IF_ERROR(start.Advance(bytes));
    const std::string name = NameInFile(tasks, graph, id);
    if (value.what == "loss scale" && (weights || !file->Has(name))) {
      const LossScale start_scale;
      TESSERA_RETURN_IF_ERROR(executor.WriteValue(id, &start_scale));
      continue;
    }
    const bool weight = value.what == "parameter" || value.what == "master";
    std::vector<std::byte> part;
    if (name.empty() || (weights && !weight)) {
      part.resize(static_cast<size_t>(bytes.value));
    } else if (weights) {
      TESSERA_TRY(const std::vector<float> elements,
                  weights->Read(graph.tensor(value.tensor), here));
      part = Rounded(elements, value.dtype);
    } else if (IsRounded(value)) {
      TESSERA_TRY(
          std::vector<std::byte> master,
          ReadPart(*file, path, {name, DType::kFloat32, value.shape}, here));
      part = executor.RoundedMasters(id,
                                     {reinterpret_cast<float*>(master.data()),
                                      static_cast<size_t>(here.elements())},
                                     run->step);
    } else {
      TESSERA_TRY(
          part, ReadPart(*file, path, {name, value.dtype, value.shape}, here));
    }
    TESSERA_RETURN_IF_ERROR(executor.WriteValue(id, part.data()));
  }
  executor.set_progress(run ? run->step : 0, samples);
  return {};
}

Result<void> CheckCheckpoint(const SavedRun& run, const std::string& path,
                             std::string_view optimizer, const Graph& graph) {
  if (!run.optimizer.empty() && !optimizer.empty() &&
      run.optimizer != optimizer) {
    return InvalidInput("is a checkpoint of the optimizer '" + run.optimizer +
                            "', whose state is not that of '" +
                            std::string(optimizer) +
                            "' (its weights alone: --export)",
                        path);
  }
  return CheckPadding(run.padding, graph, path);
}

bool IsOneFile(const std::string& path) {
  std::error_code code;
  return !std::filesystem::is_directory(path, code) &&
         !path.ends_with(".json") && !IsOnnx(path);
}

Result<std::optional<SavedRun>> SavedRunOf(const std::string& path) {
  if (!IsOneFile(path)) return std::optional<SavedRun>();
  TESSERA_TRY(const SafetensorsFile file, OpenSaved(path));
  return RunOf(file, path);
}

}  // namespace tessera
