#include "runtime/weight_export.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/json_string.h"
#include "planner/base/leftovers.h"
#include "planner/io/json_value.h"
#include "runtime/collect_values.h"
#include "runtime/comm/host_messages.h"
#include "runtime/descriptor_limit.h"
#include "runtime/published_files.h"
#include "runtime/safetensors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Whether one rank is told to stop.
Result<bool> AnyStops(const std::atomic<bool>* stop, HostMessages all) {
  const int32_t mine = stop != nullptr && stop->load() ? 1 : 0;
  std::vector<int32_t> each(static_cast<size_t>(all.size()));
  TESSERA_RETURN_IF_ERROR(all.AllGather(&mine, sizeof(mine), each.data()));
  return std::ranges::any_of(each, [](int32_t one) { return one != 0; });
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

// Of the files that FileName gives to one of several.
bool IsOneOfSeveral(const std::string& name) {
  return name.starts_with("model-") && name.ends_with(".safetensors") &&
         name.find('/') == std::string::npos;
}

constexpr std::string_view kIndex = "model.safetensors.index.json";

// {"metadata": {"total_size": N}, "weight_map": {"tensor": "file", …}}
std::string IndexText(const std::vector<PublishedTensor>& tensors,
                      const std::vector<size_t>& files, DType dtype) {
  int64_t total = 0;
  std::string map;
  for (size_t t = 0; t < tensors.size(); ++t) {
    total += ElementsOf(WholeBox(tensors[t].shape)) * SizeOf(dtype);
    map += (t == 0 ? "" : ",");
    map += "\n    " + JsonString(tensors[t].name) + ": \"" +
           FileName(files[t], files.back() + 1) + "\"";
  }
  return "{\n  \"metadata\": {\"total_size\": " + std::to_string(total) +
         "},\n  \"weight_map\": {" + map + "\n  }\n}\n";
}

// What runs of this host have left in a folder that were killed: their files
// that have no name yet and, of a run that was killed in Commit between the
// first of several files and their index, those that have, so that they are
// nobody's weights.
struct Remains {
  std::vector<fs::path> unplaced;
  std::set<std::string> placed;
};

// Whether a run that left `index`, which has these tensors in the file at
// `path`, put it there: what others put there later, of whatever name, is
// theirs. All files are whole before there is an index.
bool IsOfIndex(const fs::path& path, const std::set<std::string>& tensors,
               const fs::path& index) {
  std::error_code code;
  const auto written = fs::last_write_time(path, code);
  if (code) return false;
  const auto indexed = fs::last_write_time(index, code);
  if (code || written > indexed) return false;
  const auto file = SafetensorsFile::Open(path);
  if (!file) return false;
  const std::vector<std::string> names = file->names();
  return std::set(names.begin(), names.end()) == tensors;
}

Remains RemainsIn(const std::string& folder) {
  Remains remains;
  std::error_code code;
  if (fs::exists(folder + "/" + std::string(kIndex), code)) return remains;
  for (const Leftover& leftover : LeftoversIn(folder, IsNameOfWeights)) {
    remains.unplaced.push_back(leftover.path);
    if (leftover.name != kIndex) continue;
    // One that is not whole had no file put in place.
    const auto index = ReadJson(leftover.path);
    if (!index) continue;
    std::map<std::string, std::set<std::string>> files;
    for (const auto& [tensor, file] : index->Field("weight_map").fields) {
      if (IsOneOfSeveral(file.text)) files[file.text].insert(tensor);
    }
    for (const auto& [file, tensors] : files) {
      if (IsOfIndex(fs::path(folder) / file, tensors, leftover.path)) {
        remains.placed.insert(file);
      }
    }
  }
  return remains;
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
    written_.clear();
    std::error_code code;
    for (const std::string& path : placed_) fs::remove(path, code);
    index_.reset();
    for (const fs::path& folder : made_) fs::remove(folder, code);
  }

  // Before all else.
  Result<void> MakeFolder() {
    std::error_code code;
    for (fs::path folder = files_.folder;
         !folder.empty() && !fs::exists(folder, code);
         folder = folder.parent_path()) {
      made_.push_back(folder);
    }
    fs::create_directories(files_.folder, code);
    if (code) {
      return Error{ErrorCode::kUnavailable,
                   "cannot make the folder: " + code.message(), files_.folder};
    }
    TESSERA_RETURN_IF_ERROR(CheckHasNoWeights(files_.folder));
    const Remains remains = RemainsIn(files_.folder);
    for (const std::string& file : remains.placed) {
      fs::remove(files_.folder + "/" + file, code);
    }
    // The index, by which these are known, behind them.
    for (const fs::path& file : remains.unplaced) fs::remove(file, code);
    if (!remains.placed.empty()) {
      const size_t others = remains.placed.size() - 1;
      std::cerr << "tessera: " + files_.folder + ": removed " +
                       *remains.placed.begin() +
                       (others == 0 ? std::string()
                                    : " and " + std::to_string(others) +
                                          " more files of weights") +
                       ", of an export that was killed before its index\n";
    }
    // Files stay open until they are put in place.
    RaiseDescriptorLimit(static_cast<int64_t>(file_of_.back()) + 1);
    return {};
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
    // The disk may be full as late as this.
    TESSERA_RETURN_IF_ERROR(file_->Flush());
    written_.push_back(std::move(*file_));
    file_.reset();
    return true;
  }

  // Behind the last tensor. The index of several files, which is put in place
  // behind them, is on the disk before: by it RemainsIn knows them.
  Result<void> Commit() {
    if (written_.size() > 1) {
      const std::string text = IndexText(tensors_, file_of_, files_.dtype);
      TESSERA_TRY(AtomicFile index, AtomicFile::Create(files_.folder + "/" +
                                                       std::string(kIndex)));
      index_.emplace(std::move(index));
      TESSERA_RETURN_IF_ERROR(index_->Write(std::as_bytes(std::span(text))));
      TESSERA_RETURN_IF_ERROR(index_->Flush());
    }
    for (size_t file = 0; file < written_.size(); ++file) {
      // There may be another run's by now.
      TESSERA_RETURN_IF_ERROR(written_[file].CommitNew());
      placed_.push_back(PathOf(file));
    }
    if (index_) TESSERA_RETURN_IF_ERROR(index_->CommitNew());
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
  size_t next_ = 0;                         // tensor
  std::vector<SafetensorsWriter> written_;  // files that are whole
  std::vector<std::string> placed_;         // those that have their names
  std::optional<AtomicFile> index_;
  std::vector<fs::path> made_;  // folders, the innermost first
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

}  // namespace

bool IsNameOfWeights(std::string_view name) {
  // Of a run that was killed there may be "….tmp.HOST.PID.N" (AtomicFile), and
  // beside a checkpoint of any name its lock (CheckpointLock).
  return name.starts_with("model") &&
         name.find(".safetensors") != std::string_view::npos &&
         name.find(".tmp.") == std::string_view::npos &&
         !name.ends_with(".lock");
}

Result<void> CheckHasNoWeights(const std::string& folder) {
  std::error_code code;
  fs::directory_iterator entry(folder, code);
  if (code == std::errc::no_such_file_or_directory) return {};
  const Remains remains = RemainsIn(folder);
  const fs::directory_iterator end;
  for (; !code && entry != end; entry.increment(code)) {
    const std::string name = entry->path().filename();
    if (IsNameOfWeights(name) && !remains.placed.contains(name)) {
      return InvalidInput("has weights already: " + name, folder);
    }
  }
  if (!code) return {};
  return Error{ErrorCode::kUnavailable,
               "cannot read the folder: " + code.message(), folder};
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
  // All is there, or nothing, when the others learn of it; and nothing where
  // one of them has given up meanwhile.
  if (!saved || !*saved) writer.reset();
  TESSERA_TRY(const bool whole,
              Announce(saved, files.folder, {executor.device(), all}));
  if (!whole) return false;
  TESSERA_RETURN_IF_ERROR(all.Barrier());  // which waits for them all
  if (writer) {
    if (auto written = writer->Commit(); !written) saved = written.error();
  }
  writer.reset();
  return Announce(saved, files.folder, {executor.device(), all});
}

}  // namespace tessera
