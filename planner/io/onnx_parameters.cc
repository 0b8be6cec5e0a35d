#include "planner/io/onnx_parameters.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/io/onnx_elements.h"

namespace tessera {
namespace {

std::string LastOf(const std::string& parameter) {
  return parameter.substr(parameter.rfind('.') + 1);
}

// Which initializers there are, by name. Those that are added do not move the
// others.
class Initializers {
 public:
  explicit Initializers(OnnxModel& model) : model_(model) {
    for (size_t i = 0; i < model.initializers.size(); ++i) {
      places_.emplace(model.initializers[i].name, i);
    }
    for (const OnnxNode& node : model.nodes) {
      made_.insert(node.outputs.begin(), node.outputs.end());
    }
  }

  // Null where there is none of floating-point numbers.
  OnnxTensor* Find(const std::string& name) {
    const auto found = places_.find(name);
    if (found == places_.end()) return nullptr;
    OnnxTensor& tensor = model_.initializers[found->second];
    return IsOnnxFloat(tensor.type) ? &tensor : nullptr;
  }

  // One with the numbers of `of`, called `name` where nothing is yet.
  OnnxTensor& Add(const std::string& of, std::string name) {
    while (places_.contains(name) || made_.contains(name)) {
      name = of + ":" + name;
    }
    return Replace(of, name);
  }

  // The same, called `name` in any case: what makes that is taken away.
  OnnxTensor& Replace(const std::string& of, const std::string& name) {
    OnnxTensor tensor = *Find(of);
    if (tensor.stored_as.empty()) tensor.stored_as = of;
    tensor.name = name;
    places_.emplace(tensor.name, model_.initializers.size());
    return model_.initializers.emplace_back(std::move(tensor));
  }

 private:
  OnnxModel& model_;
  std::map<std::string, size_t> places_;
  std::set<std::string> made_;
};

// What PyTorch's older exporter has in front of the others: an Identity of an
// initializer for each other one that is equal. Parameters keep their names;
// what it has computed is called "onnx::MatMul_7", which equal numbers say to
// be of one parameter, unless several begin as them. Matrices of other numbers
// are left one, as a head is that was tied by its numbers alone.
void FollowIdentities(OnnxModel& model) {
  Initializers initializers(model);
  std::erase_if(model.nodes, [&](const OnnxNode& node) {
    if (node.op != "Identity" || node.inputs.size() != 1 ||
        node.outputs.size() != 1 ||
        std::ranges::count(model.outputs, node.outputs[0]) > 0) {
      return false;
    }
    const OnnxTensor* const of = initializers.Find(node.inputs[0]);
    if (of == nullptr) return false;
    const bool computed = node.outputs[0].find("::") != std::string::npos;
    if (!IsUniform(*of) && (computed || of->dims.size() > 1)) {
      if (!computed) model.maybe_several.push_back(of->name);
      return false;
    }
    if (computed) model.maybe_one.push_back(node.outputs[0]);
    initializers.Replace(node.inputs[0], node.outputs[0]);
    return true;
  });
  for (OnnxTensor& tensor : model.initializers) tensor.is_one = true;
}

// Operand `slot` of a node, which is an initializer.
struct Reading {
  size_t node = 0;
  size_t slot = 0;
  std::string tensor;
  std::string parameter;  // empty: not known
};

// What is read of a model's initializers as PyTorch's calls say.
class Readings {
 public:
  explicit Readings(OnnxModel& model) : model_(model), initializers_(model) {
    Collect();
    for (const auto& [call, readings] : of_calls_) NameByCall(readings);
    for (const OnnxTensor& tensor : model.initializers) {
      seen_.insert(tensor.name);
      seen_.insert(tensor.made_of.begin(), tensor.made_of.end());
    }
    FindUnseen();
    std::map<std::string, std::vector<Reading*>> unnamed;  // by tensor
    for (Reading& reading : readings_) {
      if (reading.parameter.empty())
        unnamed[reading.tensor].push_back(&reading);
    }
    for (const auto& [tensor, of_tensor] : unnamed) NameByModule(of_tensor);
  }

  void Divide() {
    for (OnnxTensor& tensor : model_.initializers) tensor.is_one = true;
    std::map<std::pair<std::string, std::string>, std::string> added;
    for (const Reading& reading : readings_) {
      if (reading.parameter == OwnOf(reading.tensor)) continue;
      std::string& name = added[{reading.tensor, reading.parameter}];
      if (name.empty()) {
        OnnxTensor& tensor =
            initializers_.Add(reading.tensor, reading.parameter);
        tensor.is_parameter = is_parameter_[reading.parameter];
        if (tensor.is_folded) tensor.made_of = {reading.parameter};
        name = tensor.name;
      }
      model_.nodes[reading.node].inputs[reading.slot] = name;
    }
  }

 private:
  // The parameter that the tensor is by its name, or was computed from.
  std::string OwnOf(const std::string& name) {
    const OnnxTensor& tensor = *initializers_.Find(name);
    return tensor.is_folded && !tensor.made_of.empty() ? tensor.made_of[0]
                                                       : tensor.name;
  }

  void Collect() {
    for (const auto& [as, tensor] : model_.torch_tensors) {
      is_parameter_[tensor.name] = tensor.is_parameter;
    }
    for (const OnnxInput& input : model_.inputs) made_.insert(input.name);
    for (size_t n = 0; n < model_.nodes.size(); ++n) {
      const OnnxNode& node = model_.nodes[n];
      made_.insert(node.call.name);
      modules_.insert(node.call.module);
      made_.insert(node.outputs.begin(), node.outputs.end());
      for (size_t i = 0; i < node.inputs.size(); ++i) {
        const OnnxTensor* const tensor = initializers_.Find(node.inputs[i]);
        // Numbers that a call needs are no tensors of the model.
        if (tensor == nullptr || !tensor->is_parameter ||
            (tensor->is_folded && tensor->made_of.empty())) {
          continue;
        }
        readings_.push_back({n, i, tensor->name, ""});
      }
    }
    for (Reading& reading : readings_) {
      const TorchCall& call = model_.nodes[reading.node].call;
      if (call.name.empty()) {  // of several calls
        reading.parameter = OwnOf(reading.tensor);
      } else {
        of_calls_[call.name].push_back(&reading);
      }
    }
  }

  // Names of the model's tensors that a call reads, in its order.
  std::vector<std::string> ReadBy(const TorchCall& call) const {
    std::vector<std::string> names;
    for (const std::string& as : call.reads) {
      const auto found = model_.torch_tensors.find(as);
      if (found != model_.torch_tensors.end()) {
        names.push_back(found->second.name);
      }
    }
    return names;
  }

  void NameByCall(const std::vector<Reading*>& readings) {
    const std::vector<std::string> names =
        ReadBy(model_.nodes[readings[0]->node].call);
    const auto is_read = [&](const std::string& name) {
      return std::ranges::count(names, name) > 0;
    };
    std::set<std::string> left(names.begin(), names.end());
    for (const Reading* reading : readings) left.erase(OwnOf(reading->tensor));
    std::vector<std::string> found;
    for (const Reading* reading : readings) {
      const std::string own = OwnOf(reading->tensor);
      found.push_back(is_read(own) ? own
                                   : OneOf({left.begin(), left.end()}, own));
    }
    if (std::ranges::count(found, "") > 0 && AreInOrder(readings, names)) {
      found = names;
    }
    for (size_t i = 0; i < readings.size(); ++i) {
      readings[i]->parameter = found[i];
      if (found[i].empty() && !left.empty()) {
        model_.maybe_several.push_back(readings[i]->tensor);
      }
    }
  }

  // Whether one node has what a call reads at the same places, unless one that
  // is known is at another. (addmm begins with the bias, Gemm ends with it.)
  bool AreInOrder(const std::vector<Reading*>& readings,
                  const std::vector<std::string>& names) {
    if (names.size() != readings.size() ||
        model_.nodes[readings[0]->node].call.name.starts_with("addmm")) {
      return false;
    }
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string own = OwnOf(readings[i]->tensor);
      if (readings[i]->node != readings[0]->node ||
          (own != names[i] && std::ranges::count(names, own) > 0)) {
        return false;
      }
    }
    return true;
  }

  // The one of `names`, or that which ends as `own` does; empty: none.
  static std::string OneOf(std::vector<std::string> names,
                           const std::string& own) {
    if (names.size() > 1) {
      std::erase_if(names, [&](const std::string& name) {
        return LastOf(name) != LastOf(own);
      });
    }
    return names.size() == 1 ? names[0] : "";
  }

  // Parameters that no initializer is called by, nor a call reads itself.
  void FindUnseen() {
    for (const OnnxNode& node : model_.nodes) {
      for (std::string& name : ReadBy(node.call)) seen_.insert(std::move(name));
    }
    for (const auto& [as, tensor] : model_.torch_tensors) {
      if (tensor.is_parameter && !seen_.contains(tensor.name)) {
        unseen_[ModuleOf(tensor.name)].push_back(tensor.name);
      }
    }
  }

  // The innermost module of a parameter that calls are in: "layers.0" of
  // "layers.0.scales.1", a list's.
  std::string ModuleOf(std::string parameter) const {
    do {
      const size_t dot = parameter.rfind('.');
      parameter.resize(dot == std::string::npos ? 0 : dot);
    } while (!parameter.empty() && !modules_.contains(parameter));
    return parameter;
  }

  // Of a call, what no node of the file makes.
  std::string FoldedReadsOf(const Reading& reading) const {
    std::string reads;
    for (const std::string& name : model_.nodes[reading.node].call.reads) {
      if (!made_.contains(name)) reads += name + " ";
    }
    return reads;
  }

  // Readings of one tensor by calls that read none of the model's themselves.
  void NameByModule(const std::vector<Reading*>& readings) {
    const std::string& tensor = readings[0]->tensor;
    const std::string own = OwnOf(tensor);
    std::map<std::string, std::vector<Reading*>> of_modules;
    std::set<std::string> folded;
    for (Reading* reading : readings) {
      of_modules[model_.nodes[reading->node].call.module].push_back(reading);
      folded.insert(FoldedReadsOf(*reading));
      reading->parameter = own;
    }
    bool divided = false;
    bool doubtful = false;
    for (const auto& [module, in_module] : of_modules) {
      std::vector<std::string>& unseen = unseen_[module];
      std::vector<std::string> names = unseen;
      if (names.empty()) continue;
      std::vector<std::string> reads;  // different ones, in their order
      for (const Reading* reading : in_module) {
        std::string read = FoldedReadsOf(*reading);
        if (std::ranges::count(reads, read) == 0) reads.push_back(read);
      }
      const bool has_own = ModuleOf(own) == module;
      if (has_own && reads.size() == 1) continue;
      if (has_own) {
        names.insert(names.begin(), own);
      } else if (const std::string one = OneOf(names, own); !one.empty()) {
        names = {one};
        reads = {""};
      }
      if (names.size() != reads.size()) {
        doubtful = true;
        continue;
      }
      divided = true;
      for (Reading* reading : in_module) {
        const auto at = std::ranges::find(reads, FoldedReadsOf(*reading));
        reading->parameter =
            reads.size() == 1 ? names[0]
                              : names[static_cast<size_t>(at - reads.begin())];
      }
      std::erase_if(unseen, [&](const std::string& name) {
        return std::ranges::count(names, name) > 0;
      });
    }
    // Of different numbers, two parameters that were tied may be one.
    if (divided && !IsUniform(*initializers_.Find(tensor))) {
      model_.maybe_one.push_back(tensor);
    }
    doubtful |= !divided && folded.size() > 1 &&
                std::ranges::any_of(unseen_, [](const auto& of_module) {
                  return !of_module.second.empty();
                });
    if (doubtful) model_.maybe_several.push_back(tensor);
  }

  OnnxModel& model_;
  Initializers initializers_;
  std::map<std::string, bool> is_parameter_;
  std::vector<Reading> readings_;
  std::map<std::string, std::vector<Reading*>> of_calls_;
  std::set<std::string> made_;     // by calls that are there, and inputs
  std::set<std::string> modules_;  // that calls are in
  std::set<std::string> seen_;
  std::map<std::string, std::vector<std::string>> unseen_;  // by ModuleOf
};

// What was computed of the same parameters several times is read as the first.
void JoinCopies(OnnxModel& model, const std::string& path) {
  // By the parameters.
  std::map<std::vector<std::string>, std::vector<const OnnxTensor*>> firsts;
  std::map<std::string, std::string> first_of;
  for (OnnxTensor& tensor : model.initializers) {
    if (tensor.made_of.empty() || !IsOnnxFloat(tensor.type)) continue;
    std::vector<const OnnxTensor*>& others = firsts[tensor.made_of];
    const bool uniform = !others.empty() && IsUniform(tensor);
    const auto first =
        std::ranges::find_if(others, [&](const OnnxTensor* other) {
          // Several steps may take places of it, which may be equal.
          const bool same = tensor.is_copy && other->is_copy;
          return other->dims == tensor.dims && other->type == tensor.type &&
                 (same || !uniform) &&
                 AreEqualElements(tensor, *other, path).value_or(same);
        });
    if (first == others.end()) {
      others.push_back(&tensor);
    } else {
      tensor.copy_of = (*first)->name;
      first_of[tensor.name] = tensor.copy_of;
      if (!tensor.is_copy) model.maybe_several.push_back(tensor.copy_of);
    }
  }
  for (OnnxNode& node : model.nodes) {
    for (std::string& input : node.inputs) {
      if (const auto first = first_of.find(input); first != first_of.end()) {
        input = first->second;
      }
    }
  }
}

}  // namespace

bool IsUniform(const OnnxTensor& tensor) {
  const std::vector<double> values = tensor.Values();
  return !values.empty() && std::ranges::all_of(values, [&](double value) {
    return value == values[0];
  });
}

bool IsOfOlderTorch(const OnnxModel& model) {
  return model.producer == "pytorch" &&
         std::ranges::any_of(model.nodes, [](const OnnxNode& node) {
           return node.name.starts_with('/');
         });
}

void TellParametersApart(OnnxModel& model, const std::string& path) {
  if (IsOfOlderTorch(model)) FollowIdentities(model);
  const bool has_calls = std::ranges::any_of(
      model.nodes,
      [](const OnnxNode& node) { return !node.call.name.empty(); });
  if (has_calls && !model.torch_tensors.empty()) Readings(model).Divide();
  JoinCopies(model, path);
}

}  // namespace tessera
