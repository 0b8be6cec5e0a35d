// Rotary position embeddings, as exporters write them for Hugging Face's
// models.

#include <algorithm>
#include <string>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

const OnnxNode* Walk::Producer(const std::string& value,
                               std::string_view op) const {
  const auto made = producers_.find(value);
  const bool is_one = made != producers_.end() && made->second->op == op &&
                      made->second->outputs.size() == 1;
  return is_one ? made->second : nullptr;
}

std::optional<Walk::Rotary> Walk::RotaryOf(const OnnxNode& cos_side,
                                           const OnnxNode& sin_side) {
  for (size_t i = 0; i < 2; ++i) {
    const OnnxNode* const turned = Producer(sin_side.inputs[i], "Concat");
    if (turned == nullptr || turned->inputs.size() != 2) continue;
    const OnnxNode* const negative = Producer(turned->inputs[0], "Neg");
    if (negative == nullptr || negative->inputs.size() != 1) continue;
    const auto split = producers_.find(turned->inputs[1]);
    if (split != producers_.end() && split->second->op == "Split" &&
        split->second->outputs ==
            std::vector<std::string>{turned->inputs[1], negative->inputs[0]}) {
      const OnnxNode& halves = *split->second;
      for (size_t j = 0; j < 2; ++j) {
        if (cos_side.inputs[j] != halves.inputs[0] ||
            uses_[halves.outputs[0]] != 1 || uses_[halves.outputs[1]] != 1) {
          continue;
        }
        const OnnxNode* const parts[] = {&cos_side, &sin_side, turned,
                                         negative};
        const bool alone = std::ranges::all_of(
            parts,
            [&](const OnnxNode* part) { return uses_[part->outputs[0]] == 1; });
        if (!alone) continue;
        done_.insert(std::begin(parts), std::end(parts));
        done_.insert(&halves);
        turns_.insert({&cos_side, &sin_side});
        Rotary found = {halves.inputs[0], cos_side.inputs[1 - j],
                        sin_side.inputs[1 - i]};
        found.split = &halves;
        return found;
      }
    }
    const OnnxNode* const high = Producer(negative->inputs[0], "Slice");
    const OnnxNode* const low = Producer(turned->inputs[1], "Slice");
    if (high == nullptr || low == nullptr || high->inputs.size() < 4 ||
        low->inputs.size() < 4 || high->inputs[0] != low->inputs[0]) {
      continue;
    }
    for (size_t j = 0; j < 2; ++j) {
      if (cos_side.inputs[j] != low->inputs[0]) continue;
      const OnnxNode* const parts[] = {&cos_side, &sin_side, turned,
                                       negative,  high,      low};
      const bool alone = std::ranges::all_of(parts, [&](const OnnxNode* part) {
        return uses_[part->outputs[0]] == 1;
      });
      if (!alone) continue;
      done_.insert(std::begin(parts), std::end(parts));
      turns_.insert({&cos_side, &sin_side});
      return Rotary{low->inputs[0], cos_side.inputs[1 - j],
                    sin_side.inputs[1 - i], low, high};
    }
  }
  return std::nullopt;
}

void Walk::FindRotary() {
  for (const OnnxNode& node : model_.nodes) {
    if (node.op != "Add" || node.inputs.size() != 2 ||
        !needed_.contains(&node)) {
      continue;
    }
    const OnnxNode* const sides[] = {Producer(node.inputs[0], "Mul"),
                                     Producer(node.inputs[1], "Mul")};
    if (sides[0] == nullptr || sides[1] == nullptr ||
        sides[0]->inputs.size() != 2 || sides[1]->inputs.size() != 2) {
      continue;
    }
    for (size_t i = 0; i < 2 && !rotary_.contains(&node); ++i) {
      if (auto found = RotaryOf(*sides[i], *sides[1 - i])) {
        rotary_[&node] = *std::move(found);
      }
    }
  }
}

Result<void> Walk::Rotate(const OnnxNode& node, const Rotary& rotary) {
  OnnxNode reader;
  reader.name = NameOf(node);
  reader.outputs = node.outputs;
  reader.inputs = {rotary.x, rotary.cos, rotary.sin};
  for (size_t i = 0; i < 3; ++i) {
    if (!values_.contains(reader.inputs[i])) {
      return InvalidInput("reads '" + reader.inputs[i] +
                          "', which nothing in front of it makes");
    }
    if (In(reader, i).Is(Value::Kind::kUnknown)) {
      ++behind_problems_;
      return {};
    }
  }
  TESSERA_TRY(Activation x, Computed(reader, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  const size_t rank = x.dims.size();
  const auto wrong = [] {
    return InvalidInput(
        "a rotary embedding of something else than all features of queries or "
        "keys, which a dense layer makes for each token");
  };
  if (rank < 3 || x.own.size() < 3 || x.dims[rank - 1].size() != 1 ||
      x.own.back().id != x.dims[rank - 1][0].id || x.own[0].letter != 'b' ||
      x.own[1].letter != 's') {
    return wrong();
  }
  const auto of_places = std::ranges::find_if(x.dims, [&](const Dim& dim) {
    return dim.size() == 1 && dim[0].id == x.own[1].id;
  });
  if (of_places == x.dims.end()) return wrong();
  const auto behind_places =
      static_cast<size_t>(x.dims.end() - of_places);  // and with them
  // The halves of the features.
  const int64_t features = x.own.back().extent;
  if (rotary.split != nullptr) {
    const OnnxNode& split = *rotary.split;
    std::vector<int64_t> sizes = split.Ints("split", {});
    if (Has(split, 1)) {
      TESSERA_TRY(sizes, Ints(split, 1));
    }
    const bool halves =
        sizes.empty() || sizes == Shape{features / 2, features / 2};
    if (!halves || AxisOf(split.Int("axis", 0), rank) != rank - 1) {
      return wrong();
    }
  }
  for (const OnnxNode* slice : {rotary.low, rotary.high}) {
    if (slice == nullptr) continue;
    const auto places = PlacesOf(*slice, ShapeOf(ActivationValue(x)));
    const int64_t begin = slice == rotary.low ? 0 : features / 2;
    if (!places || places->dim != rank - 1 || places->range.begin != begin ||
        places->range.count != features / 2) {
      return wrong();
    }
  }
  const bool large = In(reader, 1).Is(Value::Kind::kLarge) ||
                     In(reader, 2).Is(Value::Kind::kLarge);
  if (!large) {
    TESSERA_TRY(OnnxConstant cos, Constant(reader, 1));
    TESSERA_TRY(OnnxConstant sin, Constant(reader, 2));
    for (OnnxConstant* table : {&cos, &sin}) {
      // Of places and features, whatever is between them.
      const size_t dims = table->shape.size();
      if (dims < behind_places) return wrong();
      Shape& shape = table->shape;
      for (size_t d = dims - behind_places + 1; d + 1 < dims; ++d) {
        if (shape[d] != 1) return wrong();
      }
      shape.erase(shape.end() - static_cast<int64_t>(behind_places) + 1,
                  shape.end() - 1);
    }
    const size_t dims = cos.shape.size();
    const auto angles = AnglesOf(cos, sin);
    if (!angles || cos.shape[dims - 2] != x.own[1].extent ||
        cos.shape[dims - 1] != features) {
      return InvalidInput("a rotary embedding by angles that are not known");
    }
    found_.angles[&node] = *angles;
  }
  const auto known = found_.angles.find(&node);
  if (known == found_.angles.end()) {
    return InvalidInput("a rotary embedding by angles that are not known");
  }
  const TensorId positions = PositionsOf(x.own[1], /*causal=*/false);
  if (!positions.valid()) return wrong();
  Letters letters;
  const std::string rows = letters.Of(std::span(x.own).first(x.own.size() - 1));
  const std::string last = letters.Of(std::span(x.own).last(1));
  x.tensor = builder_.Add1(
      known->second.op, Unique(NameOf(node)), {x.tensor, positions},
      rows + last + "!," + rows.substr(0, 2) + "->" + rows + last,
      known->second.attributes);
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::CheckOwn(const Activation& x, size_t d) {
  for (const Atom& atom : x.dims[d]) {
    if (std::ranges::count(x.own, atom.id, &Atom::id) > 0) continue;
    return InvalidInput(
        "reads along a dimension that an Expand repeats: expected that "
        "attention, a product or what works element by element has it beside "
        "others");
  }
  return {};
}

Result<bool> Walk::FoldNumbers(const OnnxNode& node) {
  if (node.inputs.size() != 2 || !ApplyOnnx(node.op, 1, 1, true)) return false;
  bool weight = false;
  bool several = false;
  for (size_t i = 0; i < 2; ++i) {
    const Value& value = In(node, i);
    if (value.Is(Value::Kind::kWeight)) {
      // A parameter meets its numbers where they are computed.
      if (value.source->is_parameter == true ||
          OnnxElements(value.source->dims) == 1) {
        return false;
      }
      weight = true;
    } else if (value.Is(Value::Kind::kConstant)) {
      const std::vector<double>& values = value.constant.values;
      several =
          std::ranges::any_of(values, [&](double v) { return v != values[0]; });
    } else {
      return false;
    }
  }
  if (!weight || !several) return false;
  std::vector<OnnxConstant> operands;
  for (size_t i = 0; i < 2; ++i) {
    const auto numbers = Constant(node, i);
    if (!numbers) return false;
    operands.push_back(*numbers);
  }
  const OnnxConstant* const given[] = {&operands[0], &operands[1]};
  auto result = FoldOnnx(node, given);
  Value value = LargeValue();
  if (result && *result) {
    value = ConstantValue(**std::move(result));
  } else if (!result && result.error().code != ErrorCode::kInfeasible) {
    return result.error();
  }
  Set(node, std::move(value));
  return true;
}

}  // namespace tessera::onnx
