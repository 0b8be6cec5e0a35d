#include "planner/io/onnx.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <utility>

#include "planner/base/table.h"
#include "planner/io/onnx_file.h"
#include "planner/io/onnx_parameters.h"
#include "planner/io/onnx_transposes.h"
#include "planner/io/onnx_walk.h"

namespace tessera {

using onnx::Atoms;
using onnx::BoundInput;
using onnx::BoundSizes;
using onnx::Found;
using onnx::FrozenPatterns;
using onnx::kBatchNormGroups;
using onnx::kFewPlaces;
using onnx::kFrozen;
using onnx::kMostElements;
using onnx::Number;
using onnx::Walk;
using onnx::WordsOf;

namespace {

// The versions of the standard operators that are read.
constexpr int64_t kLeastOpset = 13;
constexpr int64_t kMostOpset = 21;

std::string ShowsAs(const OnnxDimension& dim, size_t d) {
  return dim.symbol.empty() ? "dimension " + std::to_string(d)
                            : "dimension '" + dim.symbol + "'";
}

// What the file and the options say of `what`; both must agree. `flag`: what
// sets it, up to the number; empty where nothing does but the file.
Result<int64_t> Agreed(const OnnxDimension& dim, int64_t given,
                       const std::string& where, const std::string& flag) {
  if (dim.extent > 0 && given > 0 && dim.extent != given) {
    return InvalidInput(
        "is " + std::to_string(dim.extent) + " in the file: expected " + flag +
            std::to_string(dim.extent) + ", or a file whose dimension is open",
        where);
  }
  if (dim.extent <= 0 && given <= 0) {
    std::string needs = flag.empty() ? "a size in the file" : flag + "N";
    if (flag.empty() && !dim.symbol.empty()) {
      needs += ": --set cannot name what has a '='";
    }
    return InvalidInput("is open: needs " + needs, where);
  }
  return dim.extent > 0 ? dim.extent : given;
}

bool Names(const std::string& name, std::initializer_list<const char*> parts) {
  return std::ranges::any_of(parts, [&](const char* part) {
    return name.find(part) != std::string::npos;
  });
}

// What inputs of whole numbers are, by their names.
bool IsMask(const std::string& name) {
  return Names(name, {"mask"});
}
bool IsPositions(const std::string& name) {
  return Names(name, {"position"});
}
bool IsSegments(const std::string& name) {
  return Names(name, {"token_type", "segment"});
}

// The inputs of an encoder and of its decoder: null where there is none such.
struct Texts {
  const OnnxInput* source = nullptr;
  const OnnxInput* tokens = nullptr;
};
Texts TextsOf(const std::vector<const OnnxInput*>& inputs) {
  std::vector<const OnnxInput*> texts;
  for (const OnnxInput* input : inputs) {
    const std::string& name = input->name;
    if (!IsOnnxFloat(input->type) && input->dims.size() == 2 && !IsMask(name) &&
        !IsPositions(name) && !IsSegments(name)) {
      texts.push_back(input);
    }
  }
  if (texts.empty()) return {};
  const auto decoder = std::ranges::find_if(texts, [](const OnnxInput* input) {
    return Names(input->name, {"decoder", "target", "tokens"});
  });
  if (texts.size() < 2 || decoder == texts.end()) return {nullptr, texts[0]};
  return {texts[*decoder == texts[0] ? 1 : 0], *decoder};
}

// Extents of all inputs: the first dimension is the batch, the second one of
// whole numbers the sequence; others, and an encoder's sequence, are in the
// file, or set by their symbols.
Result<BoundSizes> BindInputs(const OnnxModel& model, const std::string& path,
                              const ImportOptions& options, bool needs_inputs) {
  BoundSizes sizes;
  std::set<std::string> read;
  for (const OnnxNode& node : model.nodes) {
    read.insert(node.inputs.begin(), node.inputs.end());
  }
  std::vector<const OnnxInput*> inputs;
  for (const OnnxInput& input : model.inputs) {
    if (read.contains(input.name)) inputs.push_back(&input);
  }
  const Texts texts = TextsOf(inputs);
  std::set<std::string> symbols;
  bool any_sequence = false;
  for (const OnnxInput* of : inputs) {
    const OnnxInput& input = *of;
    BoundInput bound = {.input = &input,
                        .name = input.name,
                        .shape = {},
                        .is_float = IsOnnxFloat(input.type)};
    const size_t rank = input.dims.size();
    const std::string where = path + ": input '" + input.name + "'";
    if (rank < 1 || rank > 4) {
      return InvalidInput("has " + std::to_string(rank) +
                              " dimensions: expected a batch of tokens, "
                              "features or images",
                          where);
    }
    const bool sequence = !bound.is_float && rank == 2;
    any_sequence |= sequence;
    const bool source = of == texts.source;
    double elements = 1;
    for (size_t d = 0; d < rank; ++d) {
      const OnnxDimension& dim = input.dims[d];
      const std::string at = where + ": " + ShowsAs(dim, d);
      int64_t given = 0;
      std::string flag;
      if (d == 0) {
        given = sizes.batch > 0 ? sizes.batch : options.global_batch;
        flag = "--global-batch ";
      } else if (d == 1 && sequence &&
                 (!source || (dim.extent <= 0 &&
                              !options.overrides.contains(dim.symbol)))) {
        given = sizes.seq_len > 1 ? sizes.seq_len : options.seq_len;
        flag = "--seq-len ";
      } else if (!dim.symbol.empty()) {
        symbols.insert(dim.symbol);
        if (dim.symbol.find('=') == std::string::npos) {
          flag = "--set model." + dim.symbol + "=";
        }
        const auto set = options.overrides.find(dim.symbol);
        if (set != options.overrides.end()) {
          const double value = set->second.number;
          if (!(value >= 1 && value <= 0x1p40) || value != std::floor(value)) {
            return InvalidInput("is " + set->second.ToString() +
                                    ": expected a whole number of at least 1",
                                at);
          }
          given = static_cast<int64_t>(value);
        }
      }
      TESSERA_TRY(const int64_t extent, Agreed(dim, given, at, flag));
      if (d == 0) sizes.batch = extent;
      if (d == 1 && sequence && !source) sizes.seq_len = extent;
      elements *= Number(extent);
      bound.shape.push_back(extent);
    }
    if (elements > kMostElements) {
      return InvalidInput("has more than 2^50 elements", where);
    }
    sizes.inputs.push_back(std::move(bound));
  }
  for (const auto& [key, value] : options.overrides) {
    if (key == "output" || key == "loss" || key == kBatchNormGroups ||
        key == kFrozen || symbols.contains(key)) {
      continue;
    }
    std::vector<std::string_view> known = {"loss", "output", kBatchNormGroups,
                                           kFrozen};
    known.insert(known.end(), symbols.begin(), symbols.end());
    return Error{ErrorCode::kNotFound,
                 UnknownName("key or symbol", key, known).message, path};
  }
  if (sizes.inputs.empty() && needs_inputs) {
    return InvalidInput("has no inputs that its nodes read", path);
  }
  sizes.batch = std::max<int64_t>(1, sizes.batch);
  if (!any_sequence && options.seq_len > 1 && options.warnings != nullptr) {
    options.warnings->push_back(
        path + ": its inputs have no sequence: its length is left out");
  }
  // The names of the data.
  bool images = false;
  for (BoundInput& bound : sizes.inputs) {
    if (bound.is_float) {
      if (!std::exchange(images, true)) bound.name = "images";
    } else if (bound.input == texts.tokens) {
      bound.name = "tokens";
    } else if (bound.input == texts.source) {
      bound.name = "source";
    } else if (IsMask(bound.name)) {
      bound.all_ones = true;
      if (options.warnings != nullptr) {
        options.warnings->push_back(path + ": input '" + bound.name +
                                    "' is taken to be 1 everywhere");
      }
    } else if (IsPositions(bound.name)) {
      bound.name = "positions";
    } else if (IsSegments(bound.name)) {
      bound.name = "segments";
    }
  }
  return sizes;
}

// Each walk but the last finds dimensions that those before it left whole.
constexpr int kMostWalks = 100;

// finish(walk) of the last walk over the file's nodes.
// `all`: of all outputs, not of one.
template <typename T, typename Finish>
Result<T> Walked(const std::string& path, const ImportOptions& options,
                 bool all, Finish finish) {
  TESSERA_TRY(OnnxModel read, ReadOnnxFile(path));
  TellParametersApart(read, path);
  FindTransposes(read, path);
  const OnnxModel model = std::move(read);
  if (model.opset < kLeastOpset || model.opset > kMostOpset) {
    return InvalidInput("has operators of version " +
                            std::to_string(model.opset) + ": expected " +
                            std::to_string(kLeastOpset) + " to " +
                            std::to_string(kMostOpset),
                        path);
  }
  if (options.dtype.has_value() && !IsFloat(*options.dtype)) {
    return InvalidInput(
        "parameters cannot be " + std::string(NameOf(*options.dtype)), path);
  }
  TESSERA_TRY(const BoundSizes sizes, BindInputs(model, path, options, !all));
  if (const auto set = options.overrides.find(kBatchNormGroups);
      set != options.overrides.end()) {
    const double groups = set->second.number;
    if (!(groups >= 1) || groups != std::floor(groups) ||
        std::fmod(Number(sizes.batch), groups) != 0) {
      return InvalidInput("is " + set->second.ToString() +
                              ": expected a divisor of the global batch, " +
                              std::to_string(sizes.batch),
                          path + ": " + std::string(kBatchNormGroups));
    }
  }
  std::vector<std::string> outputs = model.outputs;
  if (!all && outputs.empty()) {
    return InvalidInput("has no outputs: expected one, which the loss is of",
                        path);
  }
  const auto chosen = options.overrides.find("output");
  if (!all && chosen != options.overrides.end()) {
    outputs = {WordsOf(chosen->second)};
  } else if (!all && !outputs.empty()) {
    outputs = {outputs.back()};
  }
  TESSERA_TRY(const std::vector<std::string> frozen,
              FrozenPatterns(model, options, path));
  Found found;
  // Masks are as large as the batch and the sequence squared. They are read in
  // a small one, where the file leaves these open.
  ImportOptions few = options;
  few.global_batch = std::min<int64_t>(2, sizes.batch);
  few.seq_len = std::min(kFewPlaces, sizes.seq_len);
  few.warnings = nullptr;
  auto small = BindInputs(model, path, few, !all);
  if (!small) {  // the file says how long it is
    few.seq_len = options.seq_len;
    small = BindInputs(model, path, few, !all);
  }
  if (small) {
    found.places = small->seq_len;
    Atoms atoms;
    for (int i = 0; i < kMostWalks; ++i) {
      Walk(model, path, *small, few, outputs, frozen, atoms, found).Run();
      if (!atoms.Changed()) break;
    }
  }
  Atoms atoms;
  for (int i = 0; i < kMostWalks; ++i) {
    Walk walk(model, path, sizes, options, outputs, frozen, atoms, found);
    walk.Run();
    if (atoms.Changed()) continue;
    if (!walk.HasProblems()) return finish(walk);
    // Others may be behind them.
    Atoms behind = atoms;
    for (int k = 0; k < kMostWalks; ++k) {
      Walk again(model, path, sizes, options, outputs, frozen, behind, found);
      again.LookBehindProblems();
      again.Run();
      if (!behind.Changed()) return finish(again.IsWhole() ? again : walk);
    }
    return finish(walk);
  }
  return InvalidInput("its reshapes take dimensions apart without end", path);
}

}  // namespace

bool IsOnnx(const std::string& path) {
  return path.ends_with(".onnx");
}

std::vector<OnnxOperator> OnnxOperators() {
  std::vector<OnnxOperator> operators;
  for (const Walk::Row& row : Walk::Rows()) {
    operators.push_back({row.name, row.summary});
  }
  return operators;
}

Result<Graph> ImportOnnx(const std::string& path,
                         const ImportOptions& options) {
  return Walked<Graph>(path, options, /*all=*/false,
                       [](Walk& walk) { return walk.Finish(); });
}

Result<OnnxComputation> ImportOnnxComputation(const std::string& path,
                                              const ImportOptions& options) {
  return Walked<OnnxComputation>(path, options, /*all=*/true, [](Walk& walk) {
    return walk.FinishComputation();
  });
}

}  // namespace tessera
