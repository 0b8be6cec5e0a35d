// Which tensors of the file are trained. PyTorch's newer exporter says which
// are parameters; of other files all are that are not masks, tables of angles,
// sinusoids of places or what the user says (`frozen`), and what nothing tells
// is a warning.

#include <fnmatch.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/rng.h"
#include "planner/base/table.h"
#include "planner/io/onnx_parameters.h"
#include "planner/io/onnx_walk.h"

namespace tessera::onnx {
namespace {

bool IsOneOf(std::string_view op, std::initializer_list<std::string_view> ops) {
  return std::ranges::count(ops, op) > 0;
}

// Nodes that give elements other places.
bool Moves(const OnnxNode& node) {
  return IsOneOf(node.op,
                 {"Cast", "Concat", "Expand", "Gather", "Identity", "Reshape",
                  "Slice", "Squeeze", "Transpose", "Unsqueeze"});
}

// Nodes that compute element by element.
bool IsArithmetic(const OnnxNode& node) {
  return ApplyOnnx(node.op, 1, 1, true).has_value() ||
         IsOneOf(node.op, {"Max", "Mean", "Min", "ScatterElements", "ScatterND",
                           "Sum", "Where"});
}

// Nodes that read a tensor of the file, where it is no layer's, as they read
// what is computed.
bool ReadsNumbers(const OnnxNode& node) {
  return IsArithmetic(node) || IsOneOf(node.op, {"Einsum", "MatMul"});
}

bool ReadsScaleOrShift(const OnnxNode& node) {
  return IsOneOf(node.op, {"GroupNormalization", "InstanceNormalization",
                           "LayerNormalization"});
}

// Whether a table [places, features] has sines and cosines of its places: each
// column is x[p + 1] + x[p - 1] = 2 cos(w) x[p], by the sums of angles, and the
// squares of a row add up to half the features. Numbers are those of fp32, or
// of 16 bits. A learned table has neither.
bool AreSinusoids(const Shape& dims, const std::vector<double>& numbers) {
  constexpr double kRounding = 0x1p-7;
  const std::vector<int64_t> wide = [&] {
    std::vector<int64_t> extents;
    for (const int64_t extent : dims) {
      if (extent > 1) extents.push_back(extent);
    }
    return extents;
  }();
  constexpr int64_t kLeast = 4;  // places, of which three have a frequency
  if (wide.size() != 2 || wide[0] < kLeast) return false;
  const double features = Number(wide[1]);
  for (int64_t p = 0; p < wide[0]; ++p) {
    const auto row = numbers.begin() + p * wide[1];
    const double squares = std::inner_product(row, row + wide[1], row, 0.0);
    if (!(std::abs(squares - features / 2) <= kRounding * features)) {
      return false;
    }
  }
  for (int64_t c = 0; c < wide[1]; ++c) {
    const auto at = [&](int64_t place) {
      return numbers[static_cast<size_t>(place * wide[1] + c)];
    };
    double product = 0;
    double square = 0;
    for (int64_t p = 1; p + 1 < wide[0]; ++p) {
      product += (at(p + 1) + at(p - 1)) * at(p);
      square += at(p) * at(p);
    }
    const double turn = square > 0 ? product / square : 0;  // 2 cos(w)
    for (int64_t p = 1; p + 1 < wide[0]; ++p) {
      if (std::abs(at(p + 1) + at(p - 1) - turn * at(p)) > 4 * kRounding) {
        return false;
      }
    }
  }
  return true;
}

// Whether all places of dimension d have the same numbers; those that were
// computed may be rounded in other ways.
bool AreEqualAlong(const Shape& dims, const std::vector<double>& numbers,
                   size_t d) {
  constexpr double kRounding = 0x1p-20;
  int64_t behind = 1;
  for (size_t i = d + 1; i < dims.size(); ++i) behind *= dims[i];
  for (int64_t i = 0; i < std::ssize(numbers); ++i) {
    const int64_t first = i - i / behind % dims[d] * behind;
    const double expected = numbers[static_cast<size_t>(first)];
    if (!(std::abs(numbers[static_cast<size_t>(i)] - expected) <=
          kRounding * (1 + std::abs(expected)))) {
      return false;
    }
  }
  return !numbers.empty();
}

// "encoder.layer.gate": letters, digits, '_' and '.'.
bool IsPath(const std::string& name) {
  return !name.empty() && std::ranges::all_of(name, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '.';
  });
}

// "layers.*.gate" of "layers.7.gate". What is no path of a module, "val_7", is
// of no layer: such a pattern would be of others, too.
std::string Folded(const std::string& name) {
  std::string folded;
  if (name.find('.') == std::string::npos) return name;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit) {
      folded += c;
    } else if (!folded.ends_with('*')) {
      folded += '*';
    }
  }
  return folded;
}

// Of equal layers one, and the first of many.
std::string ListOf(const std::set<std::string>& names) {
  constexpr size_t kMost = 8;
  std::set<std::string> folded;
  for (const std::string& name : names) folded.insert(Folded(name));
  std::string text;
  size_t count = 0;
  for (const std::string& name : folded) {
    if (count++ == kMost) break;
    text += (count > 1 ? ", '" : "'") + name + "'";
  }
  if (folded.size() > kMost) {
    text += " and " + std::to_string(folded.size() - kMost) + " more";
  }
  return text;
}

// Tells numbers apart, in any order, as of one parameter that is laid out in
// two ways; 0: they are nowhere.
uint64_t DigestOf(const OnnxTensor& tensor) {
  uint64_t digest = 0;
  for (const double value : tensor.Values()) {
    digest += Mix64(std::bit_cast<uint64_t>(value));
  }
  return digest;
}

}  // namespace

std::string WordsOf(const JsonValue& value) {
  return value.kind == JsonValue::Kind::kString ? value.text : value.ToString();
}

Result<std::vector<std::string>> FrozenPatterns(const OnnxModel& model,
                                                const ImportOptions& options,
                                                const std::string& path) {
  std::vector<std::string> patterns;
  const auto set = options.overrides.find(kFrozen);
  if (set == options.overrides.end() || set->second.is_null()) return patterns;
  const std::string where = path + ": " + kFrozen;
  if (set->second.kind == JsonValue::Kind::kString) {
    std::string text = set->second.text + ",";
    for (size_t end = text.find(','); end != text.npos; end = text.find(',')) {
      patterns.push_back(text.substr(0, end));
      text.erase(0, end + 1);
    }
  }
  for (const JsonValue& item : set->second.items) patterns.push_back(item.text);
  if (patterns.empty()) {
    return InvalidInput("is " + set->second.ToString() +
                            ": expected names of tensors, or patterns of them",
                        where);
  }
  for (const std::string& pattern : patterns) {
    const bool any =
        std::ranges::any_of(model.initializers, [&](const OnnxTensor& tensor) {
          return IsOnnxFloat(tensor.type) &&
                 fnmatch(pattern.c_str(), tensor.name.c_str(), 0) == 0;
        });
    if (any) continue;
    std::vector<std::string_view> known;
    for (const OnnxTensor& tensor : model.initializers) {
      if (IsOnnxFloat(tensor.type)) known.push_back(tensor.name);
    }
    const std::string nearest = NearestName(pattern, known);
    return Error{
        ErrorCode::kNotFound,
        "no tensor of the file is called '" + pattern + "'" +
            (nearest.empty() ? "" : "; did you mean '" + nearest + "'?"),
        where};
  }
  return patterns;
}

void Walk::TieTransposes() {
  for (const OnnxTensor& tensor : model_.initializers) {
    if (!tensor.copy_of.empty() && tensor.transpose_of.empty()) {
      copies_[tensor.copy_of].push_back(&tensor);
    }
    const auto of = values_.find(tensor.transpose_of);
    if (tensor.transpose_of.empty() || of == values_.end() ||
        !of->second.Is(Value::Kind::kWeight) || IsFrozen(tensor.name) ||
        IsFrozen(tensor.transpose_of)) {
      continue;
    }
    Value turned = of->second;
    std::swap(turned.order[0], turned.order[1]);
    values_[tensor.name] = std::move(turned);
    tied_[tensor.transpose_of].push_back(&tensor);
  }
}

bool Walk::IsFrozen(const std::string& name) const {
  return std::ranges::any_of(frozen_, [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

bool Walk::IsTrainedNumber(const OnnxTensor& tensor) const {
  if (IsFrozen(tensor.name)) return false;
  if (tensor.is_parameter) return *tensor.is_parameter;
  // Numbers that a program needs are called otherwise. PyTorch's older exporter
  // has nodes of their own for them; it calls nodes by paths, "/body/Mul".
  const bool dotted = tensor.name.find('.') != std::string::npos;
  if (!IsPath(tensor.name) || !(dotted || IsOfOlderTorch(model_))) return false;
  const std::vector<double> values = tensor.Values();
  // What hides scores.
  return values.size() != 1 || values[0] > kHidden;
}

bool Walk::AreRead(const std::string& value,
                   const std::function<bool(const OnnxNode&)>& by) const {
  std::set<std::string_view> seen = {value};
  std::vector<const std::string*> behind = {&value};
  while (!behind.empty()) {
    const std::string& moved = *behind.back();
    behind.pop_back();
    const auto readers = readers_.find(moved);
    if (std::ranges::count(outputs_, moved) > 0 || readers == readers_.end()) {
      return false;
    }
    for (const OnnxNode* reader : readers->second) {
      if (reader->op == "Shape" || by(*reader)) continue;
      if (!Moves(*reader) || reader->inputs[0] != moved ||
          reader->outputs.size() != 1) {
        return false;
      }
      if (seen.insert(reader->outputs[0]).second) {
        behind.push_back(&reader->outputs[0]);
      }
    }
  }
  return true;
}

void Walk::FindNumbers() {
  const auto is_number = [&](const std::string& name) {
    const auto found = values_.find(name);
    return Producer(name, "Constant") != nullptr ||
           (found != values_.end() && found->second.Is(Value::Kind::kConstant));
  };
  for (auto& [name, value] : values_) {
    if (!value.Is(Value::Kind::kWeight) || value.weight != name) continue;
    const OnnxTensor& tensor = *value.source;
    // Tables of more places than are read are larger.
    double elements = 1;
    for (const int64_t extent : tensor.dims) elements *= Number(extent);
    const bool large = !OnnxElements(tensor.dims);
    const bool frozen = IsFrozen(name);
    if (elements > Number(kMostConstants)) {
      if (frozen) {
        problems_.push_back("tensor '" + name + "' is one of model.frozen: a " +
                            "graph's constants have at most " +
                            std::to_string(kMostConstants) + " numbers");
      }
      continue;
    }
    // Tables of angles, what is compared with numbers, and what is added to
    // scores.
    bool masks = false;
    const bool of_places = AreRead(name, [&](const OnnxNode& reader) {
      if (turns_.contains(&reader)) return true;
      if (reader.op == "Add" && IsSoftened(reader)) return masks = true;
      // Which of both operands it is does not matter.
      return !ComparisonOf(reader.op).empty() &&
             std::ranges::any_of(reader.inputs, is_number);
    });
    const bool of_elements =
        tensor.is_parameter != true && AreRead(name, IsArithmetic);
    const bool buffer =
        tensor.is_parameter == false && AreRead(name, ReadsNumbers);
    // What a norm without parameters has in the place of some.
    const bool of_norm =
        tensor.is_parameter == false && AreRead(name, ReadsScaleOrShift);
    if (!frozen && !of_places && !of_elements && !buffer && !of_norm) continue;
    std::vector<double> numbers = tensor.Values();
    if (numbers.empty()) continue;
    const bool hides = std::ranges::all_of(
        numbers, [](double v) { return v == 0 || v <= kHidden; });
    const bool equal =
        std::ranges::all_of(numbers, [&](double v) { return v == numbers[0]; });
    const bool sinusoids = of_elements && AreSinusoids(tensor.dims, numbers);
    if (large && !sinusoids && !frozen) continue;
    // A tensor of zeros, or of ones, alone may be how a parameter starts.
    const bool marks = !equal && std::ranges::all_of(numbers, [](double v) {
      return v == 0 || v == 1;
    });
    const bool neutral = equal && (numbers[0] == 0 || numbers[0] == 1);
    if (frozen || buffer || sinusoids || (of_norm && neutral) ||
        (of_places && tensor.is_parameter != true && (!masks || hides)) ||
        (of_elements && marks)) {
      value = ConstantValue({tensor.dims, std::move(numbers), true});
    }
  }
}

// An exporter that is given a batch writes what is repeated over the samples
// with a row for each of them.
void Walk::FindRows() {
  if (sizes_.batch < 2) return;
  const auto reads_rows = [](const OnnxNode& reader) {
    return IsArithmetic(reader) ||
           IsOneOf(reader.op, {"Concat", "LayerNormalization", "Split"});
  };
  for (const OnnxTensor& tensor : model_.initializers) {
    const Value value = values_[tensor.name];
    if (!tensor.is_folded || !value.Is(Value::Kind::kWeight) ||
        value.weight != tensor.name || !AreRead(tensor.name, reads_rows)) {
      continue;
    }
    const auto is_batch = [&](size_t d) {
      return tensor.dims.size() >= 2 && tensor.dims[d] == sizes_.batch;
    };
    if (!is_batch(0) && !is_batch(1)) continue;
    // A scale that begins as ones may have as many channels as there are
    // samples.
    if (!tensor.is_repeated && !tensor.made_of.empty() && IsUniform(tensor)) {
      continue;
    }
    const std::vector<double> numbers = tensor.Values();
    for (const size_t d : {0, 1}) {
      if (!is_batch(d) || !AreEqualAlong(tensor.dims, numbers, d)) {
        continue;
      }
      OnnxNode& expand = parts_.emplace_back();
      expand.name = tensor.name;
      expand.op = "Expand";
      expand.outputs = {tensor.name};
      expand.inputs = {tensor.name + "#row", IntsOf(expand, tensor.dims)};
      Value once = PieceOfWeight(value, d, {0, 1});
      once.copies = sizes_.batch;
      cut_tensors_.back().is_parameter = tensor.is_parameter;
      values_.erase(tensor.name);
      values_[expand.inputs[0]] = std::move(once);
      producers_[tensor.name] = &expand;
      rows_.push_back(&expand);
      break;
    }
  }
}

void Walk::WarnOfTrained() const {
  if (options_.warnings == nullptr) return;
  if (!buffers_.empty()) {
    options_.warnings->push_back(
        path_ +
        ": tensors are trained that the file says are no parameters, as "
        "layers read them; --set model.frozen=NAME,... says which are "
        "constants: " +
        ListOf(buffers_));
  }
  if (!doubtful_weights_.empty()) {
    options_.warnings->push_back(
        path_ +
        ": tensors are trained that no layer reads and the file does "
        "not call parameters; --set model.frozen=NAME,... says which "
        "are constants: " +
        ListOf(doubtful_weights_));
  }
  const auto trained = [&](const std::string& name) {
    const auto made = weights_.lower_bound(name);
    return made != weights_.end() &&
           (made->first == name || made->first.starts_with(name + "."));
  };
  std::set<std::string> apart;
  std::set<std::string> tied;
  std::set<std::string> computed;
  std::set<std::string> lost;  // the parameters that it was computed from
  std::map<std::string, std::set<uint64_t>> digests;  // by parameter
  for (const OnnxTensor& tensor : model_.initializers) {
    const Value& value = values_.at(tensor.name);
    const bool is_tied =
        value.Is(Value::Kind::kWeight) && value.weight != tensor.name;
    if (is_tied && tensor.made_of.empty()) tied.insert(tensor.name);
    if (is_tied || !trained(tensor.name)) continue;
    const uint64_t digest = tensor.made_of.empty() ? 0 : DigestOf(tensor);
    for (const std::string& parameter : tensor.made_of) {
      if (parameter == tensor.name) continue;
      const bool is_new =
          digest == 0 || digests[parameter].insert(digest).second;
      if (trained(parameter) || !is_new) apart.insert(tensor.name);
    }
    if (!tensor.arithmetic.empty() && !apart.contains(tensor.name)) {
      computed.insert(tensor.name);
      lost.insert(tensor.made_of.begin(), tensor.made_of.end());
    }
  }
  const auto warn = [&](const std::string& what, const std::string& names) {
    if (!names.empty())
      options_.warnings->push_back(path_ + ": " + what + names);
  };
  const auto list = [](const std::set<std::string>& names) {
    return names.empty() ? "" : ListOf(names);
  };
  const auto trained_of = [&](const std::vector<std::string>& names) {
    std::set<std::string> of;
    std::ranges::copy_if(names, std::inserter(of, of.end()), trained);
    return of;
  };
  warn(
      "tensors are trained apart from parameters that they were computed from "
      "when the file was written: ",
      list(apart));
  warn("tensors are trained as one with those whose transposes they are: ",
       list(tied));
  if (!computed.empty()) {
    warn(
        "the file has, and is trained in, what was computed of parameters "
        "when it was written, not these: " +
            ListOf(computed) + " of ",
        list(lost) + "; a graph file of tools/export_torch.py has them");
  }
  std::set<std::string> several = trained_of(model_.maybe_several);
  for (const auto& [name, readers] : readers_) {
    const auto value = values_.find(name);
    if (readers.size() < 2 || value == values_.end() ||
        !value->second.Is(Value::Kind::kWeight) || repeated_.contains(name) ||
        !trained(name)) {
      continue;
    }
    const OnnxTensor& tensor = *value->second.source;
    const bool is_bias = std::ranges::any_of(
        biases_, [&](const auto& bias) { return bias.first.second == name; });
    if (!tensor.is_one && !is_bias && tensor.dims.size() < 2 &&
        IsUniform(tensor)) {
      several.insert(name);
    }
  }
  std::set<std::string> one = trained_of(model_.maybe_one);
  one.insert(repeated_.begin(), repeated_.end());
  warn(
      "tensors that several nodes read are trained as one, but may be several "
      "that were equal when the file was written: ",
      list(several));
  warn(
      "tensors that several nodes read are trained apart, as if they were "
      "several that were equal when the file was written, but may be one: ",
      list(one));
}

void Walk::NoteTrained(const OnnxNode& node, const Value& value) {
  const std::string& name = value.weight;
  if (value.source->is_parameter || parts_deep_ > 0 || !ReadsNumbers(node) ||
      name.ends_with(".weight") || name.ends_with(".bias")) {
    return;
  }
  doubtful_weights_.insert(name);
}

}  // namespace tessera::onnx
