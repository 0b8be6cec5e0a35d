// Nodes that repeat tensors, and that put them beside each other.

#include <algorithm>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// Whether dimension d has several places, all of them copies.
bool IsRepeated(const Activation& x, size_t d) {
  return Extent(x.dims[d]) > 1 &&
         std::ranges::none_of(x.dims[d], [&](const Atom& atom) {
           return std::ranges::count(x.own, atom.id, &Atom::id) > 0;
         });
}

// Whether x has places that are copies of others.
bool HasCopies(const Activation& x) {
  const std::vector<Atom> atoms = Flatten(x.dims);
  return std::ranges::any_of(atoms, [&](const Atom& atom) {
    return atom.extent > 1 &&
           std::ranges::count(x.own, atom.id, &Atom::id) == 0;
  });
}

}  // namespace

// ---- Repeats ----------------------------------------------------------------

// What is repeated has dimensions that its tensor lacks.
Result<void> Walk::Expand(const OnnxNode& node) {
  TESSERA_TRY(Shape to, Ints(node, 1));
  const Shape from = ShapeOf(In(node, 0));
  if (to.size() < from.size())
    to.insert(to.begin(), from.size() - to.size(), 1);
  const size_t in_front = to.size() - from.size();
  bool same = in_front == 0;
  for (size_t d = 0; d < to.size(); ++d) {
    const int64_t extent = d < in_front ? 1 : from[d - in_front];
    if (to[d] == 1) to[d] = extent;
    if (to[d] < 1 || (extent != 1 && to[d] != extent)) {
      return InvalidInput("cannot repeat " + TextOf(from) + " as " +
                          TextOf(to));
    }
    same = same && to[d] == extent;
  }
  // A class token is a weight to what puts it in front of patches.
  const bool class_token =
      patches_ && OnlyReader(node.outputs[0], "Concat") == patches_->joined &&
      In(node, 0).Is(Value::Kind::kWeight) && from.size() == 3 &&
      to == Shape{sizes_.batch, from[1], from[2]};
  if (class_token || (same && In(node, 0).Is(Value::Kind::kWeight))) {
    Set(node, In(node, 0));
    return {};
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  x.dims.insert(x.dims.begin(), in_front, Dim());
  for (size_t d = 0; d < to.size(); ++d) {
    if (to[d] == Extent(x.dims[d])) continue;
    TESSERA_TRY(const Atom copies,
                Whole(AtomOf(node, "copies" + std::to_string(d)), to[d], 'r'));
    x.dims[d].push_back(copies);
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

// Of one place an Expand, of several the dimension behind itself.
Result<void> Walk::Tile(const OnnxNode& node) {
  constexpr int64_t kMostCopies = 1024;
  TESSERA_TRY(const std::vector<int64_t> times, Ints(node, 1));
  const Shape from = ShapeOf(In(node, 0));
  if (times.size() != from.size()) {
    return InvalidInput("expected how often each of " + TextOf(from) +
                        " is repeated, found " + std::to_string(times.size()) +
                        " numbers");
  }
  Shape to = from;
  std::string x = node.inputs[0];
  for (size_t d = 0; d < from.size(); ++d) {
    if (times[d] < 1) return InvalidInput("leaves no places");
    if (from[d] == 1) to[d] = times[d];
    if (from[d] == 1 || times[d] == 1) continue;
    if (times[d] > kMostCopies) {
      return InvalidInput("repeats a dimension " + std::to_string(times[d]) +
                          " times: expected at most " +
                          std::to_string(kMostCopies));
    }
    OnnxAttribute axis;
    axis.name = "axis";
    axis.i = static_cast<int64_t>(d);
    std::vector<std::string> copies(static_cast<size_t>(times[d]), x);
    TESSERA_TRY(x, Part(node, "Concat", std::move(copies), {axis}));
    to[d] *= times[d];
  }
  OnnxNode& expand = parts_.emplace_back(node);
  expand.op = "Expand";
  expand.inputs = {x, IntsOf(node, to)};
  return Expand(expand);
}

// ---- Joints -----------------------------------------------------------------

Result<std::vector<Activation>> Walk::EachWhole(const OnnxNode& node,
                                                std::vector<Activation> parts,
                                                size_t axis) {
  for (Activation& part : parts) {
    if (!IsRepeated(part, axis)) continue;
    // Each of as many places is the one that there is.
    const int64_t places = Extent(part.dims[axis]);
    part.dims[axis].clear();
    TESSERA_TRY(part,
                Resampled(node, std::move(part), axis, places, /*start=*/0,
                          /*step=*/1e-9, /*linear=*/false));
  }
  const auto has_samples = [](const Activation& x) {
    return HasSamples(x.own);
  };
  const bool sampled = std::ranges::any_of(parts, has_samples);
  const auto lacks = [&](const Activation& x) {
    return HasCopies(x) || HasSamples(x.own) != sampled;
  };
  const auto whole = std::ranges::find_if_not(parts, lacks);
  if (whole == parts.end() || std::ranges::none_of(parts, lacks)) return parts;
  TESSERA_TRY(Activation zeros, SliceOf(node, *whole, axis, 0, 1, 1, ".zeros"));
  const std::string letters = Letters().Of(zeros.own);
  zeros.tensor =
      builder_.Add1("scale", Unique(NameOf(node) + ".zeros"), {zeros.tensor},
                    letters + "->" + letters, {{"factor", 0}});
  const std::string of_each = Named(node, std::move(zeros));
  for (Activation& part : parts) {
    if (!lacks(part)) continue;
    TESSERA_TRY(const std::string sum,
                Part(node, "Add", {of_each, Named(node, part)}));
    part = values_[sum].x;
  }
  return parts;
}

Result<Activation> Walk::JoinedTensors(const OnnxNode& node,
                                       std::vector<Activation> parts,
                                       size_t axis) {
  const size_t rank = parts[0].dims.size();
  for (Activation& part : parts) {
    TESSERA_TRY(part, Materialise(std::move(part)));
  }
  if (parts.size() == 1) return parts[0];
  // What all of them repeat, the joint repeats, too.
  std::vector<Dim> repeated(rank);
  for (size_t d = 0; d < rank; ++d) {
    const bool all = std::ranges::all_of(
        parts, [&](const Activation& part) { return IsRepeated(part, d); });
    if (d == axis || !all) continue;
    repeated[d] = parts[0].dims[d];
    for (Activation& part : parts) part.dims[d].clear();
  }
  TESSERA_TRY(parts, EachWhole(node, std::move(parts), axis));
  // A place that was selected is a dimension of its tensor, which those lack
  // that were added up along it. Heads of 1 group stay: all have them where
  // this is the last walk.
  const bool same_rank = std::ranges::all_of(parts, [&](const Activation& x) {
    return x.own.size() == parts[0].own.size();
  });
  for (Activation& part : parts) {
    const std::vector<Atom> own = part.own;
    for (const Atom& atom : own) {
      const bool joint =
          part.dims[axis].size() == 1 && part.dims[axis][0].id == atom.id;
      if (same_rank || atom.extent > 1 || atom.letter == 'b' || joint ||
          atoms_.IsPart(atom)) {
        continue;
      }
      part = WithoutOne(node, std::move(part), atom);
    }
  }
  size_t place = 0;  // of the joint dimension among the tensor's
  for (size_t i = 0; i < parts.size(); ++i) {
    Activation& x = parts[i];
    TESSERA_TRY(x, Contiguous(node, std::move(x)));
    TESSERA_TRY(x, Joined(node, std::move(x), axis));
    if (x.dims[axis].size() != 1 || x.dims[axis][0].letter == 'b') {
      return InvalidInput("joins a dimension that is several, or samples");
    }
    const size_t front = Flatten(std::span(x.dims).first(axis)).size();
    if (i == 0) place = front;
    bool alike = front == place && parts[0].own.size() == x.own.size();
    for (size_t at = 0; alike && at < x.own.size(); ++at) {
      alike = at == place ||
              (x.own[at].extent == parts[0].own[at].extent &&
               (x.own[at].letter == 'b') == (parts[0].own[at].letter == 'b'));
    }
    if (!alike) return InvalidInput("joins tensors of different sizes");
  }
  // An operator joins six, or as many as its rule has factors for beside the
  // joint and the other dimensions.
  constexpr std::string_view kLetters = "mnopqr";
  const size_t most = std::min(
      kLetters.size(), static_cast<size_t>(kMaxFactors) - parts[0].own.size());
  const std::string name = NameOf(node);
  Activation joint = parts[0];
  Letters others("mnopqrd");
  std::string front;
  std::string behind;
  for (size_t at = 0; at < joint.own.size(); ++at) {
    if (at == place) continue;
    (at < place ? front : behind) +=
        others.Of(std::span(joint.own).subspan(at, 1));
  }
  for (size_t first = 1; first < parts.size();) {
    const size_t last = std::min(parts.size(), first + most - 1);
    std::string rule = front + "m!" + behind;
    std::vector<TensorId> operands = {joint.tensor};
    int64_t channels = joint.own[place].extent;
    for (size_t i = first; i < last; ++i) {
      rule += "," + front + kLetters[i - first + 1] + "!" + behind;
      operands.push_back(parts[i].tensor);
      channels += parts[i].own[place].extent;
    }
    joint.tensor = builder_.Add1(
        "concat_channels", Unique(name), std::move(operands),
        rule + "->" + front + "d!" + behind, {{"channels", Number(channels)}});
    first = last;
    const std::string to = AtomOf(node, "c" + std::to_string(last));
    const char letter = joint.own[place].letter;
    if (last == parts.size()) {
      TESSERA_TRY(joint, WithDim(node, std::move(joint), axis, place, to,
                                 channels, letter));
    } else {
      TESSERA_TRY(joint.own[place], Whole(to, channels, letter));
      joint.dims[axis] = {joint.own[place]};
    }
  }
  for (size_t d = 0; d < rank; ++d) {
    if (!repeated[d].empty()) joint.dims[d] = repeated[d];
  }
  return joint;
}

Result<void> Walk::Concat(const OnnxNode& node) {
  if (patches_ && patches_->joined == &node) return JoinPatches(node);
  TESSERA_TRY(const bool states, JoinStates(node));
  if (states) return {};
  const auto axis = AxisOf(node.Int("axis", 1), ShapeOf(In(node, 0)).size());
  if (!axis) return InvalidInput("has no such dimension");
  // As the file has them: a constant of equal rows is one to what reads it.
  const Shape first = ShapeOf(In(node, 0));
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    Shape shape = ShapeOf(In(node, i));
    if (shape.size() == first.size()) shape[*axis] = first[*axis];
    if (shape != first) {
      return InvalidInput("joins " + TextOf(first) + " and " +
                          TextOf(ShapeOf(In(node, i))) + " along dimension " +
                          std::to_string(*axis));
    }
  }
  std::vector<Activation> parts;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    TESSERA_TRY(parts.emplace_back(), Computed(node, i));
  }
  TESSERA_TRY(Activation joint, JoinedTensors(node, std::move(parts), *axis));
  Set(node, ActivationValue(std::move(joint)));
  return {};
}

}  // namespace tessera::onnx
