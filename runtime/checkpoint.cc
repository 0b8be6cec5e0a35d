#include "runtime/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/append.h"
#include "planner/base/whole_number.h"
#include "planner/io/onnx.h"
#include "planner/ir/vocabulary.h"
#include "planner/lower/factored_update.h"
#include "runtime/collect_values.h"
#include "runtime/comm/host_messages.h"
#include "runtime/device/cpu_device.h"
#include "runtime/loss_scale.h"
#include "runtime/older_checkpoints.h"
#include "runtime/published_files.h"
#include "runtime/safetensors.h"

namespace tessera {
namespace {

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
  run.model = TextOf(file, "model");
  TESSERA_TRY(run.global_batch, Count(file, "global_batch", path));
  TESSERA_TRY(run.seq_len, Count(file, "seq_len", path));
  run.dtype = TextOf(file, "dtype");
  run.stochastic_rounding = TextOf(file, kRounding) == kStochastic;
  run.padding = TextOf(file, kPadding);
  return std::optional(std::move(run));
}

// Whether all that the file has belongs to the model: it may be one of more
// layers.
Result<void> CheckAllIsKept(const SafetensorsFile& file,
                            const std::string& path, const TaskGraph& tasks,
                            const Graph& graph) {
  const auto kept = StoredValues(tasks, graph);
  for (const std::string& name : file.names()) {
    // In other precisions nothing scales the loss.
    if (kept.contains(name) || name == kLossScaleName || name == kChecksums) {
      continue;
    }
    return InvalidInput("tensor '" + name +
                            "' is none that the model or its optimizer has: "
                            "expected a checkpoint of the same model",
                        path);
  }
  return {};
}

// Puts what was written and flushed in the place of the checkpoint at `path`,
// of which it keeps `keep` - 1 and those before it.
Result<bool> PutInPlace(SafetensorsWriter& writer, const std::string& path,
                        int64_t step, int keep) {
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

// Whatever it is, it is no bad input: it could be written when the run began.
Error NotWritten(Error error, int64_t step) {
  error.code = ErrorCode::kUnavailable;
  error.message +=
      "; the checkpoint of step " + std::to_string(step) + " is not written";
  return error;
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
        {"model", graph.name},
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
  const auto writes = [&] { return writer && saved && *saved; };
  for (const auto& [name, parts] : values) {
    const Value& first = tasks.value(parts[0]);
    const auto write = [&](std::span<const std::byte> elements) {
      if (!writes()) return;
      saved = WriteFinite(elements, first.dtype, *writer);
    };
    // Tiles are put together first.
    std::vector<std::byte> whole;
    const bool tiled = first.layout.tile.count > 1;
    if (tiled && writes()) {
      whole.resize(static_cast<size_t>(ElementsOf(WholeBox(first.shape)) *
                                       SizeOf(first.dtype)));
    }
    for (ValueId id : parts) {
      TESSERA_RETURN_IF_ERROR(CollectValue(
          id, executor, all,
          [&](const Box& block, std::span<const std::byte> elements) {
            if (!tiled) return write(elements);
            if (!writes()) return;
            PutBlock(block, elements.data(), first.shape, SizeOf(first.dtype),
                     whole.data());
          }));
    }
    if (tiled) write(whole);
  }
  if (writes()) {
    // The disk may be full as late as this.
    if (auto flushed = writer->Flush(); !flushed) saved = flushed.error();
  }
  if (!saved) saved = NotWritten(saved.error(), executor.step());
  // Ranks that have given up meanwhile return an error: nothing is replaced.
  TESSERA_TRY(const bool whole,
              Announce(saved, path, {executor.device(), all}));
  if (!whole) return false;
  TESSERA_RETURN_IF_ERROR(all.Barrier());  // which waits for them all
  if (writer) {
    saved = PutInPlace(*writer, path, executor.step(), keep);
    if (!saved) saved = NotWritten(saved.error(), executor.step());
  }
  return Announce(saved, path, {executor.device(), all});
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
