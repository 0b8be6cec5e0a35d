// Nodes that compute along dimensions: norms of them, places that are taken,
// added and moved, and dimensions that are joined for it or taken apart.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// Among the dimensions of x's tensor.
size_t PlaceOf(const Atom& atom, const Activation& x) {
  const auto at = std::ranges::find(x.own, atom.id, &Atom::id);
  return static_cast<size_t>(at - x.own.begin());
}

}  // namespace

Result<Activation> Walk::Contiguous(const OnnxNode& node, Activation x) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  const std::vector<Atom> wanted = Flatten(x.dims);
  if (wanted.size() != x.own.size()) {
    return InvalidInput(
        "reads dimensions that are not its tensor's, such as those that an "
        "Expand repeats");
  }
  return Reordered(node, std::move(x), wanted);
}

Result<Activation> Walk::EndingInLast(const OnnxNode& node, Activation x) {
  std::vector<Atom> wanted = Flatten(x.dims);
  const size_t all = wanted.size();
  std::erase_if(wanted, [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) == 0;
  });
  const bool last = std::ranges::all_of(x.dims.back(), [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) > 0;
  });
  if (wanted.size() == all || wanted.size() != x.own.size() || !last) {
    return Contiguous(node, std::move(x));
  }
  TESSERA_TRY(x, Materialise(std::move(x)));
  return Reordered(node, std::move(x), wanted);
}

Activation Walk::Reordered(const OnnxNode& node, Activation x,
                           std::span<const Atom> wanted) {
  if (SameAtoms(wanted, x.own)) return x;
  Letters letters;
  const std::string to = letters.Of(wanted);
  const std::string from = letters.Of(x.own);
  const bool all = wanted.size() == x.own.size();
  x.tensor = builder_.Add1(all ? "transpose" : "reduce_sum",
                           Unique(NameOf(node) + ".transpose"), {x.tensor},
                           from + "->" + to);
  x.own.assign(wanted.begin(), wanted.end());
  return x;
}

bool Walk::EndsIn(const Activation& x, std::span<const Atom> features) {
  std::vector<Atom> own = Flatten(x.dims);
  std::erase_if(own, [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) == 0;
  });
  return x.own.size() >= features.size() &&
         SameAtoms(std::span(x.own).last(features.size()), features) &&
         std::ranges::is_permutation(x.own, own, {}, &Atom::id, &Atom::id);
}

namespace {

// Of a reshape that makes these dimensions.
std::vector<Attribute> ReshapeTo(std::span<const Atom> atoms) {
  const auto extent = [&](size_t i) {
    return i < atoms.size() ? Number(atoms[i].extent) : 1;
  };
  return {{"first", extent(0)}, {"second", extent(1)}, {"third", extent(2)}};
}

}  // namespace

Result<Activation> Walk::Joined(const OnnxNode& node, Activation x, size_t d) {
  if (x.dims[d].size() == 1) return x;
  std::vector<std::vector<int>> atoms(x.dims.size());
  for (size_t i = 0; i < x.dims.size(); ++i) {
    for (const Atom& atom : x.dims[i]) atoms[i].push_back(atom.id);
  }
  const auto key = std::tuple(x.tensor, std::move(atoms), d);
  const auto known = x.f == nullptr ? joined_.find(key) : joined_.end();
  if (known != joined_.end()) return known->second;
  const bool is_tensor = x.f == nullptr;
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const std::string name = AtomOf(node, "joint" + std::to_string(d) + "_" +
                                            std::to_string(x.tensor.index()));
  TESSERA_TRY(x, Merged(node, std::move(x), d));
  const Atom joint = x.dims[d][0];
  const size_t at = PlaceOf(joint, x);
  TESSERA_TRY(
      x, WithDim(node, std::move(x), d, at, name, joint.extent, joint.letter));
  if (is_tensor) joined_[key] = x;
  return x;
}

Result<Activation> Walk::Merged(const OnnxNode& node, Activation x, size_t d) {
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const Dim parts = x.dims[d];
  const auto front =
      static_cast<int64_t>(Flatten(std::span(x.dims).first(d)).size());
  const Atom joint = {-1, Extent(parts), parts.empty() ? 'f' : parts[0].letter};
  for (const Atom& atom : parts) {
    if (atom.letter == 'b') return InvalidInput("joins samples and others");
  }
  Letters letters("def");
  std::string rule;
  for (const Atom& atom : x.own) {
    rule += letters.Of(std::span(&atom, 1));
    const bool gone = std::ranges::count(parts, atom.id, &Atom::id) > 0;
    if (gone) rule += "!";
  }
  const auto begin = x.own.begin() + front;
  const auto at = x.own.erase(begin, begin + std::ssize(parts));
  const auto made = x.own.insert(at, joint);
  const std::string to = letters.Of({x.own.begin(), made}) + "d!" +
                         letters.Of({made + 1, x.own.end()});
  TESSERA_RETURN_IF_ERROR(CheckRule(x.own, {&x}));
  x.tensor = builder_.Add1(
      "reshape", Unique(NameOf(node) + ".joint" + std::to_string(d)),
      {x.tensor}, rule + "->" + to, ReshapeTo({&joint, 1}));
  x.dims[d] = {joint};
  return x;
}

Result<Activation> Walk::WithDim(const OnnxNode& node, Activation y, size_t d,
                                 size_t at, const std::string& name,
                                 int64_t extent, char letter) {
  const Dim parts = atoms_.Make(name, extent, letter);
  if (parts.size() == 1) {
    TESSERA_TRY(const Atom atom, Whole(name, extent, letter));
    y.own[at] = atom;
    y.dims[d] = {atom};
    return y;
  }
  if (parts.size() > 3 || y.own.size() + parts.size() - 1 > kMaxDims) {
    return InvalidInput("a dimension of its result is taken apart into " +
                        std::to_string(parts.size()) + " behind it");
  }
  Letters letters("mdef");
  const std::string front = letters.Of(std::span(y.own).first(at));
  const std::string behind = letters.Of(std::span(y.own).subspan(at + 1));
  y.tensor = builder_.Add1("reshape",
                           Unique(NameOf(node) + ".apart" + std::to_string(d)),
                           {y.tensor},
                           front + "m!" + behind + "->" + front +
                               (parts.size() == 2 ? "d!e!" : "d!e!f!") + behind,
                           ReshapeTo(parts));
  const auto place = y.own.erase(y.own.begin() + static_cast<int64_t>(at));
  y.own.insert(place, parts.begin(), parts.end());
  y.dims[d] = parts;
  return y;
}

Activation Walk::WithoutOne(const OnnxNode& node, Activation x,
                            const Atom& one) {
  Letters letters("def");
  std::string from;
  std::string to;
  for (const Atom& atom : x.own) {
    const std::string letter = letters.Of(std::span(&atom, 1));
    from += letter + (atom.id == one.id ? "!" : "");
    if (atom.id != one.id) to += letter;
  }
  std::erase_if(x.own, [&](const Atom& atom) { return atom.id == one.id; });
  for (Dim& dim : x.dims) ReplaceIn(dim, one, {});
  x.tensor = builder_.Add1("reshape", Unique(NameOf(node) + ".without"),
                           {x.tensor}, from + "->" + to, ReshapeTo({}));
  return x;
}

Result<Activation> Walk::SoftmaxOf(const OnnxNode& node, Activation x,
                                   size_t axis, bool log) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, axis));
  const bool several = x.dims[axis].size() != 1;
  if (several) {
    TESSERA_TRY(x, Merged(node, std::move(x), axis));
  }
  if (x.own.size() > kMaxDims - 1) {
    return InvalidInput("expected a softmax of at most 5 dimensions, found " +
                        std::to_string(x.own.size()));
  }
  const Atom over = x.dims[axis][0];
  if (over.letter == 'b') {
    return InvalidInput(
        "a softmax over samples is not supported: batches are cut into "
        "microbatches");
  }
  Letters letters("z");
  std::string rule;
  for (const Atom& atom : x.own) {
    rule += atom.id == over.id ? "z" : letters.Of(std::span(&atom, 1));
  }
  x.tensor =
      builder_.Add1(log ? "log_softmax" : "softmax", Unique(NameOf(node)),
                    {x.tensor}, rule + "->" + rule);
  if (!several) return x;
  const size_t at = PlaceOf(over, x);
  return WithDim(node, std::move(x), axis, at, AtomOf(node, "over"),
                 over.extent, over.letter);
}

Result<void> Walk::Reduce(const OnnxNode& node) {
  constexpr std::pair<std::string_view, std::string_view> kOps[] = {
      {"ReduceSum", "reduce_sum"},
      {"ReduceMean", "reduce_mean"},
      {"ReduceMax", "reduce_max"},
  };
  TESSERA_TRY(Activation x, Computed(node, 0));
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const size_t rank = x.dims.size();
  std::set<size_t> reduced;
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, rank);
    if (!d) return InvalidInput("has no dimension " + std::to_string(axis));
    reduced.insert(*d);
  }
  if (axes.empty()) {
    if (node.Int("noop_with_empty_axes", 0) != 0) {
      Set(node, In(node, 0));
      return {};
    }
    for (size_t d = 0; d < rank; ++d) reduced.insert(d);
  }
  const bool keep = node.Int("keepdims", 1) != 0;
  if (node.op == "ReduceMean" && rank == 4 && x.f == nullptr &&
      reduced == std::set<size_t>{2, 3} && x.dims[0].size() == 1 &&
      x.dims[0][0].letter == 'b') {
    TESSERA_RETURN_IF_ERROR(MeanOfImage(node));
    if (!keep) values_[node.outputs[0]].x.dims.resize(2);
    return {};
  }
  TESSERA_TRY(x, Materialise(std::move(x)));
  std::set<int> gone;
  Activation y;
  for (size_t d = 0; d < rank; ++d) {
    if (!reduced.contains(d)) {
      y.dims.push_back(x.dims[d]);
      continue;
    }
    TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
    for (const Atom& atom : x.dims[d]) gone.insert(atom.id);
    if (keep) y.dims.push_back({});
  }
  std::string_view op;
  for (const auto& [theirs, ours] : kOps) {
    if (node.op == theirs) op = ours;
  }
  Letters letters;
  std::string from;
  std::string to;
  for (const Atom& atom : x.own) {
    const std::string letter = letters.Of(std::span(&atom, 1));
    from += letter;
    if (gone.contains(atom.id)) {
      if (op == "reduce_max") from += "!";
      continue;
    }
    to += letter;
    y.own.push_back(atom);
  }
  TESSERA_RETURN_IF_ERROR(CheckRule(y.own, {&x}));
  y.tensor =
      builder_.Add1(op, Unique(NameOf(node)), {x.tensor}, from + "->" + to);
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<Activation> Walk::SliceOf(const OnnxNode& node, Activation x, size_t d,
                                 int64_t start, int64_t step, int64_t places,
                                 const std::string& what) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  if (x.dims[d].empty() && places == 1) return x;  // of one place
  if (places < 1) return InvalidInput("has no places");
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
  TESSERA_TRY(x, Joined(node, std::move(x), d));
  return Placed(node, std::move(x), d, places, "slice",
                {{"places", Number(places)},
                 {"start", Number(start)},
                 {"step", Number(step)}},
                what);
}

Result<Activation> Walk::Placed(const OnnxNode& node, Activation x, size_t d,
                                int64_t places, std::string_view op,
                                std::vector<Attribute> attributes,
                                const std::string& what) {
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
  if (x.dims[d].size() != 1) {
    return InvalidInput("takes places of a dimension that is several");
  }
  const Atom from = x.dims[d][0];
  Letters letters("md");
  std::string left;
  std::string right;
  size_t at = 0;
  for (size_t i = 0; i < x.own.size(); ++i) {
    const bool here = x.own[i].id == from.id;
    const std::string letter =
        here ? "" : letters.Of(std::span(x.own).subspan(i, 1));
    left += here ? "m!" : letter;
    right += here ? "d!" : letter;
    if (here) at = i;
  }
  if (from.letter == 'b') {
    return InvalidInput("takes some of the samples");
  }
  x.tensor = builder_.Add1(op, Unique(NameOf(node) + what), {x.tensor},
                           left + "->" + right, std::move(attributes));
  return WithDim(node, std::move(x), d, at,
                 AtomOf(node, what + std::to_string(d)), places, from.letter);
}

Result<void> Walk::Slice(const OnnxNode& node) {
  TESSERA_TRY(const bool states, CutStates(node));
  if (states) return {};
  TESSERA_TRY(const bool piece, SlicePiece(node));
  if (piece) return {};
  TESSERA_TRY(const bool weight, CutWeight(node));
  if (weight) return {};
  TESSERA_TRY(Activation x, Computed(node, 0));
  std::vector<OnnxConstant> given(node.inputs.size());
  std::vector<const OnnxConstant*> operands(node.inputs.size());
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    TESSERA_TRY(given[i], Constant(node, i));
    operands[i] = &given[i];
  }
  const Shape shape = ShapeOf(In(node, 0));
  const auto slice = OnnxSliceOf(shape, operands);
  if (!slice) return InvalidInput("its operands do not fit");
  int cut = 0;  // dimensions, so far
  for (size_t d = 0; d < shape.size(); ++d) {
    if (slice->shape[d] == shape[d] && slice->step[d] > 0) continue;
    TESSERA_TRY(
        x, SliceOf(node, std::move(x), d, slice->first[d], slice->step[d],
                   slice->shape[d], ".slice" + std::to_string(cut++) + "_"));
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<Activation> Walk::Padded(const OnnxNode& node, Activation x, size_t d,
                                int64_t before, int64_t behind, double value) {
  const int64_t places = before + Extent(x.dims[d]) + behind;
  return Placed(node, std::move(x), d, places, "pad",
                {{"before", Number(before)},
                 {"places", Number(places)},
                 {"value", value}},
                ".pad");
}

Result<void> Walk::Pad(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(const std::vector<int64_t> pads, Ints(node, 1));
  double value = 0;
  if (Has(node, 2)) {
    TESSERA_TRY(const OnnxConstant constant, Constant(node, 2));
    if (constant.values.size() != 1) return InvalidInput("pads with several");
    value = constant.values[0];
    if (!(std::abs(value) <= kMost)) {
      return InvalidInput("padding with " + std::to_string(value) +
                          " is not supported: expected a finite number");
    }
  }
  std::vector<int64_t> axes(x.dims.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (Has(node, 3)) {
    TESSERA_TRY(axes, Ints(node, 3));
  }
  const std::string mode = node.Text("mode", "constant");
  constexpr std::string_view kModes[] = {"constant", "edge", "reflect", "wrap"};
  if (std::ranges::count(kModes, mode) == 0 || pads.size() != 2 * axes.size()) {
    return InvalidInput("expected a number of places in front and behind");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto d = AxisOf(axes[i], x.dims.size());
    int64_t before = pads[i];
    int64_t behind = pads[i + axes.size()];
    if (!d) return InvalidInput("has no such dimension");
    if (before == 0 && behind == 0) continue;
    constexpr int64_t kMostPlaces = 65536;
    if (std::min(before, behind) < -kMostElements ||
        std::max(before, behind) > kMostPlaces) {
      return InvalidInput("expected up to 65536 places on each side");
    }
    TESSERA_TRY(x, Materialise(std::move(x)));
    TESSERA_TRY(x, Joined(node, std::move(x), *d));
    // Fewer than none are cut off, and what is left is padded.
    const int64_t cut = std::max<int64_t>(-before, 0);
    const int64_t extent =
        Extent(x.dims[*d]) - cut - std::max<int64_t>(-behind, 0);
    before = std::max<int64_t>(before, 0);
    behind = std::max<int64_t>(behind, 0);
    if (extent != Extent(x.dims[*d])) {
      TESSERA_TRY(x, SliceOf(node, std::move(x), *d, cut, 1, extent, ".crop"));
    }
    if (before == 0 && behind == 0) continue;
    if (mode == "constant") {
      TESSERA_TRY(x, Padded(node, std::move(x), *d, before, behind, value));
      continue;
    }
    if (mode == "edge") {
      const int64_t places = extent + before + behind;
      TESSERA_TRY(x, Resampled(node, std::move(x), *d, places, -Number(before),
                               1, /*linear=*/false));
      continue;
    }
    const bool reflect = mode == "reflect";
    if (std::max(before, behind) > extent - (reflect ? 1 : 0)) {
      return InvalidInput("pads " + std::to_string(extent) + " places by " +
                          std::to_string(std::max(before, behind)));
    }
    // What stands in front, x itself, and what stands behind.
    std::vector<std::string> parts;
    const auto add = [&](int64_t start, int64_t count) -> Result<void> {
      if (count == 0) return {};
      const int64_t step = reflect ? -1 : 1;
      TESSERA_TRY(Activation some,
                  SliceOf(node, x, *d, start, step, count,
                          ".pad" + std::to_string(start) + "_"));
      parts.push_back(Named(node, std::move(some)));
      return {};
    };
    TESSERA_RETURN_IF_ERROR(add(reflect ? before : extent - before, before));
    parts.push_back(Named(node, x));
    TESSERA_RETURN_IF_ERROR(add(reflect ? extent - 2 : 0, behind));
    OnnxAttribute axis;
    axis.name = "axis";
    axis.i = static_cast<int64_t>(*d);
    TESSERA_TRY(const std::string joint, Part(node, "Concat", parts, {axis}));
    x = values_[joint].x;
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<Activation> Walk::Resampled(const OnnxNode& node, Activation x, size_t d,
                                   int64_t places, double start, double step,
                                   bool linear) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(x, Joined(node, std::move(x), d));
  return Placed(node, std::move(x), d, places, "resample",
                {{"linear", linear ? 1.0 : 0.0},
                 {"places", Number(places)},
                 {"start", start},
                 {"step", step}},
                ".resample");
}

// Dimension by dimension.
Result<void> Walk::Resize(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const std::string mode = node.Text("mode", "nearest");
  const std::string coordinates =
      node.Text("coordinate_transformation_mode", "half_pixel");
  const std::string nearest = node.Text("nearest_mode", "round_prefer_floor");
  if ((mode != "nearest" && mode != "linear") ||
      node.Int("antialias", 0) != 0 ||
      node.Text("keep_aspect_ratio_policy", "stretch") != "stretch" ||
      (Has(node, 2) && Has(node, 3) && ShapeOf(In(node, 2)) != Shape{0})) {
    return InvalidInput(
        "expected the mode 'nearest' or 'linear' without antialias, and sizes "
        "or scales");
  }
  const size_t rank = x.dims.size();
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (axes.empty()) {
    axes.resize(rank);
    std::iota(axes.begin(), axes.end(), 0);
  }
  const bool sized = Has(node, 3);
  TESSERA_TRY(const OnnxConstant given, Constant(node, sized ? 3 : 2));
  if (given.values.size() != axes.size()) {
    return InvalidInput("its operands do not fit");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto d = AxisOf(axes[i], rank);
    if (!d) return InvalidInput("has no such dimension");
    const double in = Number(Extent(x.dims[*d]));
    // Scales are fp32, and so are products of them.
    const double out = sized ? given.values[i]
                             : std::floor(static_cast<float>(in) *
                                          static_cast<float>(given.values[i]));
    const double scale = sized ? out / in : given.values[i];
    if (!(out >= 1 && out <= kMostElements && scale > 0)) {
      return InvalidInput("makes a dimension of " + std::to_string(out));
    }
    if (out == in && scale == 1) continue;
    double step = 1 / scale;
    double start = 0;  // in the operand, of place 0
    if (coordinates == "align_corners") {
      // ONNX counts the places before they are rounded.
      const double places = sized ? out : in * scale;
      step = places > 1 ? (in - 1) / (places - 1) : 1;
    } else if (coordinates == "half_pixel" ||
               coordinates == "half_pixel_symmetric" ||
               coordinates == "pytorch_half_pixel") {
      start = step / 2 - 0.5;
      if (coordinates == "half_pixel_symmetric") {
        start += in / 2 * (1 - out / (scale * in));
      }
      if (coordinates == "pytorch_half_pixel" && out == 1) start = 0;
    } else if (coordinates != "asymmetric") {
      return InvalidInput("coordinate_transformation_mode '" + coordinates +
                          "' is not supported");
    }
    // The nearest place below is that of a number just above a whole one, and
    // of one below it by no more than a scale's rounding to fp32.
    const double just = sized ? 1e-9 : std::clamp(in * 0x1p-23, 1e-9, 1e-3);
    const bool linear = mode == "linear";
    if (!linear) {
      start += nearest == "floor"               ? just
               : nearest == "ceil"              ? 1 - just
               : nearest == "round_prefer_ceil" ? 0.5 + just
                                                : 0.5 - just;
    }
    if (step == 0) step = 1;  // of one place, which all are
    TESSERA_TRY(x, Resampled(node, std::move(x), *d, static_cast<int64_t>(out),
                             start, step, linear));
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

}  // namespace tessera::onnx
