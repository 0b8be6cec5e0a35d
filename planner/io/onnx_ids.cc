// Nodes that make ids, places of elements in a dimension, and that read and add
// up elements by them. Ids are inputs of whole numbers, or what TopK and ArgMax
// make; nothing else is computed with them but whether they are equal to
// constants.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// x with its atoms called as those of `as`, dimension by dimension, where both
// have the same extents. What of x has an extent of 1 and no other name is put
// into `as`.
void RenameAtoms(Activation& x, std::vector<Dim>& as) {
  for (size_t d = 0; d < as.size(); ++d) {
    std::vector<Atom> wide;
    std::ranges::copy_if(as[d], std::back_inserter(wide),
                         [](const Atom& atom) { return atom.extent > 1; });
    size_t next = 0;
    for (const Atom& atom : x.dims[d]) {
      const auto own = std::ranges::find(x.own, atom.id, &Atom::id);
      if (atom.extent > 1) {
        if (own != x.own.end()) *own = wide[next];
        ++next;
      } else if (own != x.own.end() &&
                 std::ranges::count(as[d], atom.id, &Atom::id) == 0) {
        as[d].push_back(atom);
      }
    }
  }
  x.dims = as;
}

// The dimensions of x, by the names of samples and places where `ids` has them.
// REQUIRES: they are of the same sizes but for dimension `axis`.
std::vector<Dim> NamesOf(const Activation& x, const Activation& ids,
                         size_t axis) {
  std::vector<Dim> as = x.dims;
  for (size_t d = 0; d < as.size(); ++d) {
    const Dim theirs = Wide(ids.dims[d]);
    size_t next = 0;
    for (Atom& atom : as[d]) {
      if (d == axis || atom.extent == 1) continue;
      const Atom& their = theirs[next++];
      if (their.letter == 'b' || their.letter == 's') atom = their;
    }
  }
  return as;
}

bool IsAmong(std::span<const Atom> atoms, const Atom& atom) {
  return std::ranges::count(atoms, atom.id, &Atom::id) > 0;
}

// The letters of the atoms, 'v' that of one of them.
std::string RuleWith(std::span<const Atom> atoms, const Atom& v,
                     Letters& letters) {
  std::string rule;
  for (const Atom& atom : atoms) {
    rule += atom.id == v.id ? "v" : letters.Of(std::span(&atom, 1));
  }
  return rule;
}

}  // namespace

Result<Activation> Walk::Ids(const OnnxNode& node, size_t i) {
  TESSERA_TRY(Activation x, Computed(node, i));
  if (x.f == nullptr && ids_.contains(x.tensor)) return x;
  return InvalidInput("operand " + std::to_string(i) +
                      " is computed: expected ids as an input, TopK, ArgMax or "
                      "ArgMin have them");
}

Result<Atom> Walk::Picked(const Activation& x, size_t d) {
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
  Dim dim = Wide(x.dims[d]);
  if (dim.empty()) dim = x.dims[d];
  if (dim.size() != 1) {
    return InvalidInput("chooses along a dimension that is several");
  }
  if (dim[0].letter == 'b' && sizes_.batch > 1) {
    return InvalidInput(
        "chooses among samples, and batches are cut into microbatches");
  }
  return dim[0];
}

std::string Walk::Named(const OnnxNode& node, Activation x) {
  std::string name = node.outputs[0] + "#" + std::to_string(next_part_++);
  values_[name] = ActivationValue(std::move(x));
  return name;
}

std::optional<double> Walk::UniformIn(const OnnxNode& node, size_t i) const {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kLarge)) {
    return value.large ? UniformOnnx(*value.large) : std::nullopt;
  }
  if (!value.Is(Value::Kind::kConstant)) return std::nullopt;
  const std::vector<double>& values = value.constant.values;
  const bool same =
      !values.empty() &&
      std::ranges::all_of(values, [&](double v) { return v == values[0]; });
  return same ? std::optional(values[0]) : std::nullopt;
}

// ---- Ids that are made ------------------------------------------------------

Result<std::array<Activation, 2>> Walk::Best(const OnnxNode& node, size_t axis,
                                             int64_t count, bool largest,
                                             bool last) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(const Atom v, Picked(x, axis));
  // Ids that are read for each feature have no dimension of 1 beside it, such
  // as a router's one feature.
  for (const Atom& atom : std::vector<Atom>(x.own)) {
    const bool named = atom.letter == 'b' || atom.letter == 's';
    if (atom.extent == 1 && atom.id != v.id && !named && x.own.size() > 1) {
      x = WithoutOne(node, std::move(x), atom);
    }
  }
  TESSERA_TRY(const Atom k, Whole(AtomOf(node, "k"), count, 'k'));
  Letters letters("vk");
  std::string from;
  std::string to;
  for (Atom& atom : x.own) {
    const bool here = atom.id == v.id;
    const std::string letter = here ? "" : letters.Of(std::span(&atom, 1));
    from += here ? "v!" : letter;
    to += here ? "k!" : letter;
    if (here) atom = k;
  }
  ReplaceIn(x.dims[axis], v, {k});
  const std::vector<TensorId> made = builder_.Add(
      "top_k", Unique(NameOf(node)), {x.tensor}, from + "->" + to + "," + to,
      {{"k", Number(count)},
       {"largest", largest ? 1.0 : 0.0},
       {"last", last ? 1.0 : 0.0}});
  std::array<Activation, 2> best = {x, x};
  best[0].tensor = made[0];
  best[1].tensor = made[1];
  ids_.insert(made[1]);
  return best;
}

Result<void> Walk::TopK(const OnnxNode& node) {
  TESSERA_TRY(const std::vector<int64_t> k, Ints(node, 1));
  const Shape shape = ShapeOf(In(node, 0));
  const auto axis = AxisOf(node.Int("axis", -1), shape.size());
  if (!axis) return InvalidInput("has no such dimension");
  if (k.size() != 1 || k[0] < 1 || k[0] > shape[*axis]) {
    return InvalidInput("expected one number from 1 to " +
                        std::to_string(shape[*axis]) + " of elements");
  }
  TESSERA_TRY(auto best, Best(node, *axis, k[0], node.Int("largest", 1) != 0,
                              /*last=*/false));
  Set(node, ActivationValue(std::move(best[0])), 0);
  Set(node, ActivationValue(std::move(best[1])), 1);
  return {};
}

Result<void> Walk::ArgMax(const OnnxNode& node) {
  const auto axis = AxisOf(node.Int("axis", 0), ShapeOf(In(node, 0)).size());
  if (!axis) return InvalidInput("has no such dimension");
  TESSERA_TRY(auto best, Best(node, *axis, 1, node.op == "ArgMax",
                              node.Int("select_last_index", 0) != 0));
  Activation& ids = best[1];
  if (node.Int("keepdims", 1) == 0) {
    if (ids.dims.size() == 1) return InvalidInput("makes a single number");
    // Its one place is one of the dimension beside it.
    const Dim one = ids.dims[*axis];
    ids.dims.erase(ids.dims.begin() + static_cast<int64_t>(*axis));
    Dim& beside = ids.dims[*axis == 0 ? 0 : *axis - 1];
    beside.insert(*axis == 0 ? beside.begin() : beside.end(), one.begin(),
                  one.end());
  }
  Set(node, ActivationValue(std::move(ids)));
  return {};
}

// ---- Ids as marks -----------------------------------------------------------

Result<Activation> Walk::Marks(const OnnxNode& node, Activation ids, size_t d,
                               int64_t first, int64_t places) {
  TESSERA_TRY(const Atom v, Whole(AtomOf(node, "v"), places, 'f'));
  Letters letters("v");
  const std::string from = letters.Of(ids.own);
  ids.own.push_back(v);
  ids.dims[d].push_back(v);
  ids.tensor = builder_.Add1(
      "one_hot", Unique(NameOf(node)), {ids.tensor}, from + "->" + from + "v",
      {{"first", Number(first)}, {"places", Number(places)}});
  marks_.insert(ids.tensor);
  return ids;
}

Result<bool> Walk::EqualToConstant(const OnnxNode& node) {
  if (node.inputs.size() != 2) return false;
  size_t of = 2;
  for (size_t i = 0; i < 2; ++i) {
    if (In(node, i).Is(Value::Kind::kActivation) &&
        ids_.contains(In(node, i).x.tensor)) {
      of = i;
    }
  }
  if (of == 2) return false;
  TESSERA_TRY(Activation ids, Ids(node, of));
  const auto misfit = [&] {
    return InvalidInput(
        "compares ids with other ids, or with numbers that do not follow one "
        "another: expected a number, or first, first + 1, and so on");
  };
  if (!In(node, 1 - of).Is(Value::Kind::kConstant)) {
    const auto uniform = UniformIn(node, 1 - of);
    if (!uniform || *uniform != std::floor(*uniform) ||
        !(std::abs(*uniform) <= kMostElements) || ids.dims.empty()) {
      return misfit();
    }
    const size_t last = ids.dims.size() - 1;
    TESSERA_TRY(ids, Marks(node, std::move(ids), last,
                           static_cast<int64_t>(*uniform), 1));
    Set(node, ActivationValue(std::move(ids)));
    return true;
  }
  TESSERA_TRY(const OnnxConstant constant, Constant(node, 1 - of));
  Shape shape = constant.shape;
  while (shape.size() < ids.dims.size()) shape.insert(shape.begin(), 1);
  while (ids.dims.size() < shape.size()) {
    ids.dims.insert(ids.dims.begin(), Dim());
  }
  const std::vector<double>& values = constant.values;
  const bool counts = std::ranges::all_of(values, [&](const double& v) {
    return v == values[0] + static_cast<double>(&v - values.data());
  });
  const bool same = UniformIn(node, 1 - of).has_value() &&
                    Broadcasts(constant.shape, In(node, of));
  if (values.empty() || values[0] != std::floor(values[0]) ||
      !(std::abs(values[0]) <= kMostElements) || ids.dims.empty() ||
      !(counts || same)) {
    return misfit();
  }
  size_t d = ids.dims.size() - 1;
  if (!same) {
    const auto is_wide = [](int64_t extent) { return extent > 1; };
    if (std::ranges::count_if(shape, is_wide) != 1) return misfit();
    const auto wide = std::ranges::find_if(shape, is_wide);
    d = static_cast<size_t>(wide - shape.begin());
    if (Extent(ids.dims[d]) != 1) return misfit();
  }
  TESSERA_TRY(ids,
              Marks(node, std::move(ids), d, static_cast<int64_t>(values[0]),
                    same ? 1 : std::ssize(values)));
  Set(node, ActivationValue(std::move(ids)));
  return true;
}

Result<void> Walk::OneHot(const OnnxNode& node) {
  TESSERA_TRY(Activation ids, Ids(node, 0));
  TESSERA_TRY(const std::vector<int64_t> depth, Ints(node, 1));
  TESSERA_TRY(const OnnxConstant values, Constant(node, 2));
  const size_t rank = ids.dims.size() + 1;
  const auto axis = AxisOf(node.Int("axis", -1), rank);
  if (!axis || depth.size() != 1 || depth[0] < 1 || values.values.size() != 2) {
    return InvalidInput("its operands do not fit");
  }
  ids.dims.insert(ids.dims.begin() + static_cast<int64_t>(*axis), Dim());
  TESSERA_TRY(ids, Marks(node, std::move(ids), *axis, 0, depth[0]));
  const double off = values.values[0];
  const double on = values.values[1];
  std::string y = Named(node, std::move(ids));
  if (on - off != 1) {
    TESSERA_TRY(y, Part(node, "Mul", {y, NumberOf(node, on - off)}));
  }
  if (off != 0) {
    TESSERA_TRY(y, Part(node, "Add", {y, NumberOf(node, off)}));
  }
  Rename(node, y);
  return {};
}

// 1 where a row's largest element is.
Result<void> Walk::Hardmax(const OnnxNode& node) {
  const auto axis = AxisOf(node.Int("axis", -1), ShapeOf(In(node, 0)).size());
  if (!axis) return InvalidInput("has no such dimension");
  const int64_t places = ShapeOf(In(node, 0))[*axis];
  TESSERA_TRY(auto best, Best(node, *axis, 1, true, /*last=*/false));
  TESSERA_TRY(Activation y, Marks(node, std::move(best[1]), *axis, 0, places));
  Set(node, ActivationValue(std::move(y)));
  return {};
}

// ---- Elements by ids --------------------------------------------------------

Result<Activation> Walk::GatherOf(const OnnxNode& node, Activation x,
                                  size_t axis, Activation ids) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(const Atom v, Picked(x, axis));
  for (const Atom& atom : ids.own) {
    if (IsAmong(x.own, atom)) {
      return InvalidInput(
          "reads each sample's elements by the ids of all samples: expected "
          "GatherElements, or a table that is the same for all");
    }
  }
  Letters letters("v");
  const std::string table = RuleWith(x.own, v, letters);
  const std::string by = letters.Of(ids.own);
  const auto at = std::ranges::find(x.own, v.id, &Atom::id);
  const auto behind = x.own.erase(at);
  x.own.insert(behind, ids.own.begin(), ids.own.end());
  Dim ones = x.dims[axis];
  ReplaceIn(ones, v, {});
  std::vector<Dim> dims = ids.dims;
  if (!dims.empty()) {
    dims.back().insert(dims.back().end(), ones.begin(), ones.end());
  }
  x.dims.erase(x.dims.begin() + static_cast<int64_t>(axis));
  x.dims.insert(x.dims.begin() + static_cast<int64_t>(axis), dims.begin(),
                dims.end());
  TESSERA_RETURN_IF_ERROR(CheckRule(x.own, {}));
  x.tensor =
      builder_.Add1("gather", Unique(NameOf(node)), {x.tensor, ids.tensor},
                    table + "," + by + "->" + letters.Of(x.own));
  return x;
}

// Of indices whose last dimension has the number of a row alone.
Result<void> Walk::GatherND(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(Activation ids, Ids(node, 1));
  if (node.Int("batch_dims", 0) != 0 || ids.dims.size() < 2 ||
      Extent(ids.dims.back()) != 1) {
    return InvalidInput(
        "expected indices of one number each, those of rows, the same for all "
        "samples");
  }
  const Dim one = ids.dims.back();
  ids.dims.pop_back();
  ids.dims.back().insert(ids.dims.back().end(), one.begin(), one.end());
  TESSERA_TRY(x, GatherOf(node, std::move(x), 0, std::move(ids)));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::GatherElements(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(Activation ids, Ids(node, 1));
  const auto axis = AxisOf(node.Int("axis", 0), x.dims.size());
  if (!axis || ids.dims.size() != x.dims.size()) {
    return InvalidInput("its operands do not fit");
  }
  TESSERA_TRY(const Atom v, Picked(x, *axis));
  TESSERA_RETURN_IF_ERROR(SameBut(x, ids, *axis));
  std::vector<Dim> as = NamesOf(x, ids, *axis);
  RenameAtoms(x, as);
  as[*axis] = ids.dims[*axis];
  for (Atom& atom : as[*axis]) {
    // The places that are read may have the name of those that are there, but
    // not of another dimension's.
    if (atom.id == v.id || !IsAmong(x.own, atom)) continue;
    TESSERA_TRY(atom, Whole(AtomOf(node, "t"), atom.extent, 'f'));
  }
  for (const Atom& one : x.dims[*axis]) {
    if (one.id != v.id) as[*axis].push_back(one);
  }
  RenameAtoms(ids, as);
  Letters letters("v");
  Activation y;
  y.dims = as;
  const std::string table = RuleWith(x.own, v, letters);
  for (const Atom& atom : x.own) {
    if (atom.id != v.id) {
      y.own.push_back(atom);
      continue;
    }
    for (const Atom& id : ids.own) {
      if (id.id == v.id || !IsAmong(x.own, id)) y.own.push_back(id);
    }
  }
  const std::string by = letters.Of(ids.own);
  TESSERA_RETURN_IF_ERROR(CheckRule(y.own, {&x}));
  y.tensor =
      builder_.Add1("gather", Unique(NameOf(node)), {x.tensor, ids.tensor},
                    table + "," + by + "->" + letters.Of(y.own));
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<void> Walk::SameBut(const Activation& x, const Activation& y,
                           size_t axis) {
  for (size_t d = 0; d < x.dims.size(); ++d) {
    if (d != axis && !Fit(atoms_, x.dims[d], y.dims[d])) {
      return InvalidInput("cannot put together " +
                          TextOf(ShapeOf(ActivationValue(x))) + " and " +
                          TextOf(ShapeOf(ActivationValue(y))));
    }
  }
  return {};
}

// Ids of a sample's elements differ from each other, as those of TopK do, or
// what they choose is added up.
Result<void> Walk::ScatterElements(const OnnxNode& node) {
  const std::string reduction = node.Text("reduction", "none");
  const bool adds = reduction == "add";
  if (node.inputs.size() != 3 || !(adds || reduction == "none")) {
    return InvalidInput("expected elements that are put in place or added");
  }
  const Shape shape = ShapeOf(In(node, 0));
  TESSERA_TRY(Activation ids, Ids(node, 1));
  const auto axis = AxisOf(node.Int("axis", 0), ids.dims.size());
  const auto everywhere = UniformIn(node, 0);
  if (!axis || shape.size() != ids.dims.size() || ids.dims[*axis].empty()) {
    return InvalidInput("its operands do not fit");
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d != *axis && shape[d] != Extent(ids.dims[d])) {
      return InvalidInput(
          "puts elements into some of the rows: expected ids "
          "for all of " +
          TextOf(shape));
    }
  }
  const Dim chosen = ids.dims[*axis];
  TESSERA_RETURN_IF_ERROR(CheckOwn(ids, *axis));
  if (sizes_.batch > 1 && std::ranges::count(chosen, 'b', &Atom::letter) > 0) {
    return InvalidInput(
        "adds up samples, and batches are cut into microbatches");
  }
  const int64_t places = shape[*axis];
  // 1 where an id is, or how many are there.
  const auto marked = [&](bool counted) -> Result<Activation> {
    Activation of = ids;
    of.dims.insert(of.dims.begin() + static_cast<int64_t>(*axis), Dim());
    TESSERA_TRY(of, Marks(node, std::move(of), *axis, 0, places));
    Letters letters("k");
    std::string from;
    Activation y;
    for (const Atom& atom : of.own) {
      const bool gone = IsAmong(chosen, atom);
      from += letters.Of(std::span(&atom, 1));
      if (gone && !counted) from += "!";
      if (!gone) y.own.push_back(atom);
    }
    y.dims = of.dims;
    y.dims.erase(y.dims.begin() + static_cast<int64_t>(*axis) + 1);
    y.tensor = builder_.Add1(counted ? "reduce_sum" : "reduce_max",
                             Unique(NameOf(node) + ".marked"), {of.tensor},
                             from + "->" + letters.Of(y.own));
    return y;
  };
  std::string y;
  if (const auto number = UniformIn(node, 2)) {
    TESSERA_TRY(Activation marks, marked(adds));
    TESSERA_TRY(y,
                Part(node, "Mul",
                     {Named(node, std::move(marks)), NumberOf(node, *number)}));
  } else {
    TESSERA_TRY(Activation x, Computed(node, 2));
    TESSERA_TRY(x, Materialise(std::move(x)));
    if (x.dims.size() != ids.dims.size()) {
      return InvalidInput("its operands do not fit");
    }
    TESSERA_RETURN_IF_ERROR(SameBut(x, ids, x.dims.size()));
    TESSERA_RETURN_IF_ERROR(CheckOwn(x, *axis));
    std::vector<Dim> as = NamesOf(x, ids, x.dims.size());
    RenameAtoms(x, as);
    const Dim from = x.dims[*axis];
    Activation by = ids;
    RenameAtoms(by, as);
    for (const Atom& atom : by.own) {
      if (!IsAmong(x.own, atom)) {
        return InvalidInput("puts the same elements into several rows");
      }
    }
    TESSERA_TRY(const Atom v, Whole(AtomOf(node, "v"), places, 'f'));
    Letters letters("v");
    const std::string picked = letters.Of(x.own);
    const std::string rule = picked + "," + letters.Of(by.own) + "->";
    // Where the first of them was.
    const auto begin = std::ranges::find_if(
        x.own, [&](const Atom& atom) { return IsAmong(from, atom); });
    *begin = v;
    std::erase_if(x.own, [&](const Atom& atom) {
      return atom.id != v.id && IsAmong(from, atom);
    });
    x.dims[*axis] = {v};
    x.tensor = builder_.Add1(
        "scatter_add", Unique(NameOf(node)), {x.tensor, by.tensor},
        rule + RuleWith(x.own, v, letters), {{"places", Number(places)}});
    y = Named(node, std::move(x));
  }
  if (adds && everywhere != 0.0) {
    TESSERA_TRY(y, Part(node, "Add", {node.inputs[0], y}));
  } else if (!adds && everywhere != 0.0) {
    TESSERA_TRY(Activation marks, marked(false));
    TESSERA_TRY(y, Part(node, "Where",
                        {Named(node, std::move(marks)), y, node.inputs[0]}));
  }
  Rename(node, y);
  return {};
}

}  // namespace tessera::onnx
