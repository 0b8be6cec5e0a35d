// Nodes that compute sequences: lookups, attention and its masks.

#include <algorithm>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

TensorId Walk::Extra(const std::string& name, int64_t places) {
  for (const BoundInput& input : sizes_.inputs) {
    if (input.name == name) return inputs_[input.input];
  }
  const auto made = extras_.find(name);
  if (made != extras_.end()) return made->second;
  const TensorId id =
      builder_.Input(name, {sizes_.batch, places}, DType::kInt32);
  extras_[name] = id;
  return id;
}

const BoundInput* Walk::Source() const {
  const auto source =
      std::ranges::find(sizes_.inputs, "source", &BoundInput::name);
  return source == sizes_.inputs.end() ? nullptr : &*source;
}

TensorId Walk::PositionsOf(const Atom& places, bool causal) {
  if (places.letter != 's') return TensorId();
  const BoundInput* const source = Source();
  // A causal mask hides what stands behind, such as padding, by its place.
  if (source != nullptr && !causal &&
      values_[source->input->name].x.own[1].id == places.id) {
    return Extra("source_positions", places.extent);
  }
  if (places.extent != seq_len_) return TensorId();
  // Of a source and its target the ends are padding.
  const bool documents = causal && options_.documents && source == nullptr;
  return Extra(documents ? "mask_positions" : "positions", seq_len_);
}

Atom Walk::SampleAtom() {
  return atoms_.Make("input.0", sizes_.batch, 'b')[0];
}
Atom Walk::PlaceAtom() {
  return atoms_.Make("input.1", seq_len_, 's')[0];
}

Result<Activation> Walk::Lookup(const std::string& name, const Value& table,
                                std::vector<size_t> order, const Shape& rows,
                                const std::string& input) {
  // The features are those of every such table: nothing takes them apart.
  TESSERA_TRY(const Atom h, Whole(name + ".rows", rows[1], 'f'));
  TESSERA_TRY(const TensorId weight,
              Weight(table, std::move(order), rows, kTableStddev));
  Activation y;
  y.own = {SampleAtom(), PlaceAtom(), h};
  for (const Atom& atom : y.own) y.dims.push_back({atom});
  y.tensor = builder_.Add1("embedding", Unique(name),
                           {Extra(input, seq_len_), weight});
  return y;
}

// One place of a sequence.
Result<void> Walk::Select(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(const OnnxConstant place, Constant(node, 1));
  const auto axis = AxisOf(node.Int("axis", 0), x.dims.size());
  if (!axis) return InvalidInput("has no such dimension");
  if (place.shape.size() > 1 || place.values.empty()) {
    return InvalidInput("expected a place, or a list of places");
  }
  const bool sequence = x.own.size() == 3 && x.dims.size() == 3 && *axis == 1 &&
                        place.values.size() == 1 && x.dims[1].size() == 1 &&
                        x.dims[1][0].letter == 's' &&
                        SameAtoms(Flatten(x.dims), x.own);
  if (!sequence) {
    // Places that are equally far from each other.
    const std::vector<int64_t> at = place.Ints();
    const int64_t extent = Extent(x.dims[*axis]);
    const auto from = [&](size_t i) {
      return at[i] < 0 ? at[i] + extent : at[i];
    };
    const int64_t step = at.size() > 1 ? from(1) - from(0) : 1;
    for (size_t i = 0; i < at.size(); ++i) {
      if (from(i) < 0 || from(i) >= extent || step == 0 ||
          from(i) != from(0) + static_cast<int64_t>(i) * step) {
        return InvalidInput("expected places equally far from each other");
      }
    }
    TESSERA_TRY(Activation y, SliceOf(node, std::move(x), *axis, from(0), step,
                                      std::ssize(at), ".places"));
    if (place.shape.empty()) {
      // Its place is one of the dimension beside it.
      const Dim one = y.dims[*axis];
      y.dims.erase(y.dims.begin() + static_cast<int64_t>(*axis));
      if (y.dims.empty()) {
        return InvalidInput("selects a single number");
      }
      const size_t beside = *axis == 0 ? 0 : *axis - 1;
      Dim& dim = y.dims[beside];
      dim.insert(*axis == 0 ? dim.begin() : dim.end(), one.begin(), one.end());
    }
    Set(node, ActivationValue(std::move(y)));
    return {};
  }
  double at = place.values[0];
  if (at < 0) at += Number(x.own[1].extent);
  if (!(at >= 0 && at < Number(x.own[1].extent))) {
    return InvalidInput("selects a place beyond its sequence");
  }
  TESSERA_TRY(const Atom one, Whole(AtomOf(node, "s"), 1, 's'));
  x.tensor = builder_.Add1("select", Unique(NameOf(node)), {x.tensor}, "",
                           {{"count", 1}, {"place", at}});
  x.own[1] = one;
  x.dims = {{x.own[0], one}, {x.own[2]}};
  if (!place.shape.empty()) x.dims = {{x.own[0]}, {one}, {x.own[2]}};
  Set(node, ActivationValue(std::move(x)));
  return {};
}

bool Walk::IsOfPlaces(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 1));
  if (shape.empty() || shape.back() != seq_len_) return false;
  if (shape.size() == 2) return shape[0] == 1 || shape[0] == sizes_.batch;
  // Added to samples' places, it has these in front all the same.
  return shape.size() == 1 && seq_len_ > 1 &&
         OnlyReader(node.outputs[0], "Add") != nullptr;
}

Result<void> Walk::Gather(const OnnxNode& node) {
  TESSERA_TRY(const bool states, CutStates(node));
  if (states) return {};
  const Value& table = In(node, 0);
  const Shape shape = ShapeOf(table);
  const bool rows = table.Is(Value::Kind::kWeight) && shape.size() == 2 &&
                    node.Int("axis", 0) == 0;
  const bool constant = rows && In(node, 1).Is(Value::Kind::kConstant);
  if (constant && !IsOfPlaces(node) && ShapeOf(In(node, 1)).size() > 1) {
    return InvalidInput(
        "reads rows by ids of the shape " + TextOf(ShapeOf(In(node, 1))) +
        ": expected one for each of " + std::to_string(seq_len_) + " places");
  }
  if (constant && IsOfPlaces(node)) {
    // Rows 0, 1, ... are those of the places; the same row everywhere is one
    // that the others are beside only in the table.
    TESSERA_TRY(const std::vector<int64_t> ids, Ints(node, 1));
    bool places = true;
    bool first = true;
    for (size_t i = 0; i < ids.size(); ++i) {
      places = places && ids[i] == static_cast<int64_t>(i) % seq_len_;
      first = first && ids[i] == 0;
    }
    if (!places && !first) {
      return InvalidInput("expected rows by place, 0, 1, and so on");
    }
    if (!first && shape[0] < seq_len_) {
      return InvalidInput("has a row for each of " + std::to_string(shape[0]) +
                          " places: the sequence has " +
                          std::to_string(seq_len_));
    }
    TESSERA_TRY(Activation y, Lookup(NameOf(node), table, {0, 1}, shape,
                                     first ? "zeros" : "positions"));
    Set(node, ActivationValue(std::move(y)));
    return {};
  }
  if (!In(node, 1).Is(Value::Kind::kActivation)) return Select(node);
  TESSERA_TRY(const Activation ids, Ids(node, 1));
  const bool tokens = ids.own.size() == 2 && ids.dims.size() == 2 &&
                      ids.own[0].letter == 'b' && ids.own[1].letter == 's';
  if (!rows || !tokens) {
    const auto axis = AxisOf(node.Int("axis", 0), shape.size());
    if (!axis) return InvalidInput("has no such dimension");
    TESSERA_TRY(Activation x, Computed(node, 0));
    TESSERA_TRY(x, GatherOf(node, std::move(x), *axis, ids));
    Set(node, ActivationValue(std::move(x)));
    return {};
  }
  const std::string name = NameOf(node);
  TESSERA_TRY(const Atom h, Whole(AtomOf(node, "h"), shape[1], 'f'));
  TESSERA_TRY(const TensorId weight,
              Weight(table, {0, 1}, shape, kTableStddev));
  Activation y;
  y.tensor = builder_.Add1("embedding", Unique(name), {ids.tensor, weight});
  y.own = {ids.own[0], ids.own[1], h};
  for (const Atom& atom : y.own) y.dims.push_back({atom});
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<void> Walk::Softmax(const OnnxNode& node) {
  Value value = In(node, 0);
  const size_t rank = ShapeOf(value).size();
  const auto axis = AxisOf(node.Int("axis", -1), rank);
  if (!axis) return InvalidInput("has no such dimension");
  value.log = node.op == "LogSoftmax";
  value.axis = *axis;
  const bool last = *axis + 1 == rank;
  if (!value.Is(Value::Kind::kScores) || !last || value.log) {
    TESSERA_TRY(value.x, Computed(node, 0));
    value.scores.reset();
  }
  if (!last) {
    TESSERA_TRY(Activation x,
                SoftmaxOf(node, std::move(value.x), *axis, value.log));
    Set(node, ActivationValue(std::move(x)));
    return {};
  }
  value.kind = Value::Kind::kSoftmax;
  Set(node, std::move(value));
  return {};
}

// A softmax whose keys are all masked is no number, which exporters guard
// against: here a query always sees itself.
Result<void> Walk::IsNaN(const OnnxNode& node) {
  if (!In(node, 0).Is(Value::Kind::kSoftmax)) {
    return InvalidInput("expected a softmax");
  }
  Set(node, ConstantValue({{}, {0}, false}));
  return {};
}

Result<void> Walk::Chosen(const OnnxNode& node, size_t i) {
  const Shape own = ShapeOf(In(node, i));
  Shape all = own;
  for (size_t k = 0; k < node.inputs.size(); ++k) {
    const Shape shape = ShapeOf(In(node, k));
    if (shape.size() > all.size()) {
      all.insert(all.begin(), shape.size() - all.size(), 1);
    }
    for (size_t d = 0; d < shape.size(); ++d) {
      int64_t& extent = all[all.size() - shape.size() + d];
      if (extent != 1 && shape[d] != 1 && shape[d] != extent) {
        return InvalidInput("cannot put together " + TextOf(all) + " and " +
                            TextOf(shape));
      }
      if (extent == 1) extent = shape[d];
    }
  }
  if (all == own) {
    Set(node, In(node, i));
    return {};
  }
  TESSERA_TRY(const std::string y,
              Part(node, "Expand", {node.inputs[i], IntsOf(node, all)}));
  Rename(node, y);
  return {};
}

// Selects what a constant condition says, and masks scores.
Result<void> Walk::Where(const OnnxNode& node) {
  if (node.inputs.size() != 3) return InvalidInput("expected three operands");
  const Value& condition = In(node, 0);
  if (condition.Is(Value::Kind::kConstant)) {
    const std::vector<double>& values = condition.constant.values;
    const bool any =
        std::ranges::any_of(values, [](double v) { return v != 0; });
    const bool all =
        std::ranges::all_of(values, [](double v) { return v != 0; });
    if (any == all) return Chosen(node, any ? 1 : 2);
  }
  const bool first = In(node, 1).Is(Value::Kind::kScores);
  Value value = In(node, first ? 1 : 2);
  if (!value.Is(Value::Kind::kScores)) {
    for (size_t i = 1; i < 3; ++i) {
      const auto number = UniformIn(node, i);
      if (!number) continue;
      const MaskForm form = i == 1 ? MaskForm::kUnseen : MaskForm::kSeen;
      TESSERA_TRY(const bool masked, Masked(node, 3 - i, 0, form, *number));
      if (masked) return {};
    }
    return Choose(node);
  }
  TESSERA_TRY(const OnnxConstant hidden, Constant(node, first ? 2 : 1));
  if (hidden.values.size() != 1 || !(hidden.values[0] <= kHidden)) {
    return InvalidInput("expected a very negative number for masked scores");
  }
  TESSERA_TRY(const Mask mask,
              MaskOf(node, 0, first ? MaskForm::kSeen : MaskForm::kUnseen));
  value.scores->mask = Both(value.scores->mask, mask);
  Set(node, std::move(value));
  return {};
}

namespace {

// What a mask says, of which rows are read one by one.
class MaskReader {
 public:
  // `last`: the last query's row, which sees the most.
  MaskReader(const Shape& shape, bool added, bool ones_are_seen,
             std::span<const double> last)
      : added_(added), ones_are_seen_(ones_are_seen) {
    const size_t rank = shape.size();
    columns_ = rank < 1 ? 1 : shape[rank - 1];
    rows_ = rank < 2 ? 1 : shape[rank - 2];
    causal_ = rows_ > 1 && columns_ == rows_;
    if (causal_) {
      window_ = std::ranges::count_if(last, [&](double v) { return Sees(v); });
    }
  }

  // Whether the rows up to this one may be of a mask.
  bool Read(std::span<const double> row, int64_t place) {
    for (size_t i = 0; i < row.size(); ++i) {
      const bool sees = Sees(row[i]);
      numbers_ = numbers_ || (added_ && !sees && !(row[i] <= kHidden));
      marks_ = marks_ && (row[i] == 0 || row[i] == 1);
      all_ = all_ && sees;
      const auto column = static_cast<int64_t>(i);
      causal_ =
          causal_ && sees == (column <= place && place - column < window_);
    }
    return !numbers_ && (all_ || causal_);
  }

  // Of 0 and 1 alone.
  bool AreMarks() const { return marks_; }

  Result<Mask> Found() const {
    if (numbers_) {
      return InvalidInput("adds numbers to scores that are no mask");
    }
    if (!all_ && !causal_) {
      return InvalidInput(
          "its mask is neither causal, of all keys or of a window of them, nor "
          "of nothing");
    }
    Mask found = {.causal = causal_};
    if (causal_ && window_ < rows_) found.window = window_;
    return found;
  }

 private:
  bool Sees(double v) const { return (v == 0) != ones_are_seen_; }

  bool added_;
  bool ones_are_seen_;
  int64_t rows_ = 1;
  int64_t columns_ = 1;
  int64_t window_ = 0;
  bool numbers_ = false;
  bool marks_ = true;
  bool all_ = true;
  bool causal_ = false;
};

// Elements times formulas of them that are computed to read a mask: 16,384
// places squared by 4, about a second.
constexpr double kMostMaskWork = 0x1p30;

}  // namespace

Result<Mask> Walk::MaskOf(const OnnxNode& node, size_t operand, MaskForm form) {
  const Value& value = In(node, operand);
  if (value.Is(Value::Kind::kLarge)) {
    if (value.large) {
      const auto mask = MaskOfLarge(*value.large, form);
      if (mask) found_.masks[&node] = *mask;
      if (mask || mask.error().code != ErrorCode::kInfeasible) return mask;
    }
    const auto known = found_.masks.find(&node);
    if (known != found_.masks.end()) {
      if (found_.places < seq_len_) {
        TESSERA_RETURN_IF_ERROR(CheckNoWindow(node.inputs[operand]));
      }
      return known->second;
    }
  }
  TESSERA_TRY(const OnnxConstant mask, Constant(node, operand));
  const auto columns =
      static_cast<size_t>(mask.shape.empty() ? 1 : mask.shape.back());
  const size_t rank = mask.shape.size();
  const auto rows = static_cast<size_t>(rank < 2 ? 1 : mask.shape[rank - 2]);
  const std::span<const double> values(mask.values);
  MaskReader reader(
      mask.shape, form == MaskForm::kAdded, form == MaskForm::kSeen,
      values.empty() ? values : values.subspan((rows - 1) * columns, columns));
  for (size_t i = 0; i * columns < values.size(); ++i) {
    const auto row = values.subspan(i * columns, columns);
    if (!reader.Read(row, static_cast<int64_t>(i % rows))) break;
  }
  TESSERA_TRY(const Mask found, reader.Found());
  return found_.masks[&node] = found;
}

Result<Mask> Walk::MaskOfLarge(const OnnxLarge& mask, MaskForm form) {
  const Error unread = {ErrorCode::kInfeasible,
                        "its mask has too many elements", ""};
  const size_t rank = mask.shape.size();
  if (mask.formula == nullptr || rank < 2 ||
      std::ranges::count(mask.shape, 0) > 0) {
    return unread;
  }
  for (const auto& [known, form_of, read] : found_.large_masks) {
    if (form_of == form && known.shape == mask.shape &&
        SameFormula(*known.formula, *mask.formula)) {
      return read;
    }
  }
  // What is the same for all samples is read once.
  Shape many(mask.shape.begin(), mask.shape.end() - 1);
  double work = Number(mask.shape.back()) * mask.formula->size;
  for (size_t d = 0; d < many.size(); ++d) {
    const bool repeats = d + 1 < many.size() && !DependsOn(*mask.formula, d);
    if (repeats) many[d] = 1;
    work *= Number(many[d]);
  }
  if (work > kMostMaskWork) return unread;
  Shape index(many.size(), 0);
  std::vector<double> row;
  index.back() = many.back() - 1;
  RowOf(mask, index, row);
  MaskReader reader(mask.shape, form == MaskForm::kAdded,
                    form == MaskForm::kSeen, row);
  index.back() = 0;
  for (size_t d = 0; d < many.size();) {
    RowOf(mask, index, row);
    if (!reader.Read(row, index.back())) break;
    for (d = 0; d < many.size(); ++d) {
      int64_t& at = index[many.size() - 1 - d];
      if (++at < many[many.size() - 1 - d]) break;
      at = 0;
    }
  }
  Result<Mask> read = reader.Found();
  if (read && form != MaskForm::kAdded && !reader.AreMarks()) {
    read = InvalidInput("its mask has other numbers than 0 and 1");
  }
  found_.large_masks.push_back({mask, form, read});
  return read;
}

// A mask that was read in a short sequence may be one of a window there that is
// longer: such a number is among those that it is made by.
Result<void> Walk::CheckNoWindow(const std::string& mask) const {
  constexpr std::string_view kDistances[] = {
      "Add",     "Sub",   "Less",          "LessOrEqual",
      "Greater", "Trilu", "GreaterOrEqual"};
  std::vector<std::string_view> behind = {mask};
  std::set<std::string_view> seen;
  while (!behind.empty()) {
    const auto made = producers_.find(behind.back());
    behind.pop_back();
    if (made == producers_.end()) continue;
    const OnnxNode& node = *made->second;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (seen.insert(node.inputs[i]).second) behind.push_back(node.inputs[i]);
      const Value& value = In(node, i);
      if (std::ranges::count(kDistances, node.op) == 0 ||
          !value.Is(Value::Kind::kConstant) ||
          value.constant.values.size() != 1) {
        continue;
      }
      const double distance = std::abs(value.constant.values[0]);
      if (distance < Number(kFewPlaces) || distance >= Number(seq_len_)) {
        continue;
      }
      return InvalidInput(
          "its mask has more than 2^20 elements, which are not computed, and "
          "may be one of a window, as it is made with the number " +
          std::to_string(static_cast<int64_t>(distance)) +
          ": expected a smaller --global-batch or --seq-len");
    }
  }
  return {};
}

Result<bool> Walk::Masked(const OnnxNode& node, size_t operand, size_t mask,
                          MaskForm form, double number) {
  const Value& value = In(node, operand);
  const Value& by = In(node, mask);
  const Shape shape = ShapeOf(value);
  const size_t rank = shape.size();
  const bool computed = value.Is(Value::Kind::kActivation) ||
                        value.Is(Value::Kind::kScores) ||
                        value.Is(Value::Kind::kSoftmax);
  if (!computed || rank < 2 || shape[rank - 2] != shape[rank - 1]) return false;
  const bool large = by.Is(Value::Kind::kLarge) && !by.large;
  if (large && !found_.masks.contains(&node)) return false;
  if (!large) {
    const Shape& of = by.constant.shape;
    if (!(by.Is(Value::Kind::kConstant) || by.large) || of.size() < 2 ||
        !std::equal(of.end() - 2, of.end(), shape.end() - 2) ||
        !Broadcasts(of, value) ||
        std::ranges::any_of(by.constant.values,
                            [](double v) { return v != 0 && v != 1; })) {
      return false;
    }
  }
  const auto found = MaskOf(node, mask, form);
  if (!found && large) return found.error();
  if (!found || found->window > 0) return false;
  TESSERA_TRY(Activation x, Computed(node, operand));
  if (found->causal) {
    TESSERA_TRY(x, Hidden(node, std::move(x), *found, number));
  }
  Set(node, ActivationValue(std::move(x)));
  return true;
}

// Whether a softmax is among those behind a node, but for what scales and masks
// its result: such a product may be attention's scores.
bool Walk::IsSoftened(const OnnxNode& node) {
  constexpr int kMostBetween = 8;
  std::vector<const OnnxNode*> at = {&node};
  for (int i = 0; i < kMostBetween && at.size() == 1; ++i) {
    if (at[0]->outputs.empty()) return false;
    at = readers_[at[0]->outputs[0]];
    std::erase_if(at, [](const OnnxNode* of) { return of->op == "Shape"; });
    if (at.size() == 1 && at[0]->op == "Softmax") return true;
    const bool between =
        at.size() == 1 && (at[0]->op == "Mul" || at[0]->op == "Div" ||
                           at[0]->op == "Add" || at[0]->op == "Where" ||
                           at[0]->op == "Cast" || at[0]->op == "Identity");
    if (!between) return false;
  }
  return false;
}

Result<void> Walk::Product(const OnnxNode& node) {
  const Value left = In(node, 0);
  TESSERA_TRY(Activation right, Computed(node, 1));
  if (left.Is(Value::Kind::kSoftmax) && left.scores) {
    TESSERA_TRY(right, Materialise(std::move(right)));
    auto attention = Attention(node, *left.scores, right);
    // Written out, it would not see where documents end.
    if (attention || options_.documents) return attention;
  }
  Value value;
  value.kind = Value::Kind::kScores;
  TESSERA_TRY(Activation q, Computed(node, 0));
  // Scores times a number are those of queries and keys times numbers.
  const auto by_q = FactorOf(q.f.get());
  const auto by_k = FactorOf(right.f.get());
  double scale = by_q.value_or(1) * by_k.value_or(1);
  if (by_q) q.f = nullptr;
  if (by_k) right.f = nullptr;
  TESSERA_TRY(q, Materialise(std::move(q)));
  TESSERA_TRY(right, Materialise(std::move(right)));
  const size_t rank = q.dims.size();
  if (rank < 3 || right.dims.size() != rank || left.Is(Value::Kind::kSoftmax) ||
      !IsSoftened(node) ||
      Extent(q.dims[rank - 1]) != Extent(right.dims[rank - 2])) {
    TESSERA_TRY(Activation y, ProductOf(node, std::move(q), std::move(right)));
    if (scale != 1) {
      y.f = MakeExpression("Mul", {{{}, {}}, {scale, {}}}, NameOf(node));
    }
    Set(node, ActivationValue(std::move(y)));
    return {};
  }
  value.scores = Scores{std::move(q), std::move(right), scale, Mask()};
  Set(node, std::move(value));
  return {};
}

Result<bool> Walk::EinsumOfAttention(const OnnxNode& node,
                                     std::span<const std::string> labels) {
  const std::string& left = labels[0];
  const std::string& right = labels[1];
  const std::string& to = labels[2];
  for (const std::string& of : labels) {
    if (std::set<char>(of.begin(), of.end()).size() != 4 || of.size() != 4) {
      return false;
    }
  }
  const auto same = [](std::string a, std::string b) {
    std::ranges::sort(a);
    std::ranges::sort(b);
    return a == b;
  };
  // x, of dimensions `of`, with these in the order `order`.
  const auto turned = [](Activation x, const std::string& of,
                         const std::string& order) {
    std::vector<Dim> dims;
    for (char label : order) dims.push_back(x.dims[of.find(label)]);
    x.dims = std::move(dims);
    return x;
  };
  // Of batch, heads, queries and keys.
  const auto other = [&](const std::string& in, const std::string& known) {
    for (char label : in) {
      if (known.find(label) == std::string::npos) return std::string(1, label);
    }
    return std::string();
  };
  const Value x = In(node, 0);
  if (x.Is(Value::Kind::kSoftmax) && x.scores) {
    const std::string keys = left.substr(0, 2) + left[3];
    const std::string features = other(right, keys);
    const std::string made = left.substr(0, 3) + features;
    if (features.empty() || !same(right, keys + features) || !same(to, made)) {
      return false;
    }
    TESSERA_TRY(Activation v, Computed(node, 1));
    TESSERA_TRY(v, Materialise(std::move(v)));
    if (v.dims.size() != 4 || ShapeOf(x).size() != 4) return false;
    const auto mapped = Attention(node, *x.scores,
                                  turned(std::move(v), right, keys + features));
    if (!mapped && options_.documents) return mapped.error();
    if (!mapped) return false;
    Activation& y = values_[node.outputs[0]].x;
    y = turned(y, made, to);
    return true;
  }
  const std::string features = other(left, to);
  if (features.empty() || !IsSoftened(node) ||
      !same(left, to.substr(0, 3) + features) ||
      !same(right, to.substr(0, 2) + to[3] + features)) {
    return false;
  }
  TESSERA_TRY(Activation q, Computed(node, 0));
  TESSERA_TRY(Activation k, Computed(node, 1));
  if (q.dims.size() != 4 || k.dims.size() != 4) return false;
  const auto by_q = FactorOf(q.f.get());
  const auto by_k = FactorOf(k.f.get());
  if (by_q) q.f = nullptr;
  if (by_k) k.f = nullptr;
  TESSERA_TRY(q, Materialise(std::move(q)));
  TESSERA_TRY(k, Materialise(std::move(k)));
  Value value;
  value.kind = Value::Kind::kScores;
  value.scores =
      Scores{turned(std::move(q), left, to.substr(0, 3) + features),
             turned(std::move(k), right, to.substr(0, 2) + features + to[3]),
             by_q.value_or(1) * by_k.value_or(1), Mask()};
  Set(node, std::move(value));
  return true;
}

// The operators want queries [b, s, g, r, d], keys [b, t, g, d] and values
// [b, t, g, e]: of the file's heads, r is 1.
Result<void> Walk::Attention(const OnnxNode& node, Scores scores,
                             Activation v) {
  Activation& q = scores.q;
  Activation& k = scores.k;
  const size_t rank = q.dims.size();
  // A place that was selected is a dimension of the tensor, of one element.
  for (Activation* x : {&q, &k, &v}) {
    for (Dim& dim : x->dims) {
      const bool features = &dim + 2 >= x->dims.data() + x->dims.size();
      if (features && Wide(dim).size() == 1) dim = Wide(dim);
    }
    if (x->dims.empty()) continue;
    Dim& samples = x->dims[0];
    while (samples.size() > 1 && samples[0].extent == 1 &&
           samples[0].letter != 'b') {
      samples.erase(samples.begin());
    }
  }
  const auto text = [](const Activation& x) {
    return TextOf(ShapeOf(ActivationValue(x)));
  };
  const auto misfit = [&] {
    return InvalidInput(
        "expected attention of queries, keys and values of sequences, whose "
        "heads are those of queries or divide them; found " +
        text(q) + ", " + text(k) + " and " + text(v));
  };
  if (rank < 3 || k.dims.size() != rank || v.dims.size() != rank) {
    return misfit();
  }
  const auto leading = [&](const Activation& x) {
    return Flatten(std::span(x.dims).first(rank - 2));
  };
  std::vector<Atom> outer = leading(q);
  std::vector<Atom> of_k = leading(k);
  std::vector<Atom> of_v = leading(v);
  // Keys and values of fewer heads are repeated, each for some queries.
  const auto repeats = [](const Activation& x, std::vector<Atom>& atoms) {
    // A single head is no dimension yet.
    if ((atoms.size() != 2 && atoms.size() != 3) ||
        std::ranges::count(x.own, atoms.back().id, &Atom::id) > 0) {
      return int64_t{1};
    }
    const int64_t times = atoms.back().extent;
    atoms.pop_back();
    return times;
  };
  const int64_t times = repeats(k, of_k);
  if (repeats(v, of_v) != times) of_v.clear();
  // Where one layer makes queries, keys and values their heads are the same
  // dimensions: the queries' are split below.
  for (std::vector<Atom>* of : {&of_k, &of_v}) {
    if (times == 1 && of->size() == 3 && of->back().extent == 1) of->pop_back();
  }
  const auto single = [](const Dim& dim) { return dim.size() == 1; };
  if (!single(q.dims[rank - 2]) || !single(k.dims[rank - 1]) ||
      !single(v.dims[rank - 2])) {
    return misfit();
  }
  if (outer.empty() || of_k.empty() || of_v.empty()) return misfit();
  for (const auto& [of, features] :
       {std::pair(&outer, &q.dims.back()), std::pair(&of_k, &k.dims[rank - 2]),
        std::pair(&of_v, &v.dims.back())}) {
    if (rank == 4 && of->size() == 1 && features->size() == 1) {
      atoms_.Split((*features)[0], 1);
    }
  }
  if (outer.size() == 2 && outer[1].extent % times == 0) {
    const Dim parts = atoms_.Split(outer[1], outer[1].extent / times);
    if (parts.size() == 2) {
      for (Dim& dim : q.dims) ReplaceIn(dim, outer[1], parts);
      ReplaceIn(q.own, outer[1], parts);
      outer = leading(q);
    }
  }
  const bool fits = outer.size() == 3 && of_k.size() == 2 && of_v.size() == 2 &&
                    outer[2].extent == times && outer[0].letter == 'b' &&
                    outer[0].id == of_k[0].id && outer[0].id == of_v[0].id &&
                    outer[1].extent == of_k[1].extent &&
                    outer[1].extent == of_v[1].extent &&
                    single(q.dims[rank - 1]) && single(k.dims[rank - 2]) &&
                    single(v.dims[rank - 1]) &&
                    k.dims[rank - 1][0].id == v.dims[rank - 2][0].id;
  if (!fits) return misfit();
  const Atom s = q.dims[rank - 2][0];
  const Atom t = k.dims[rank - 1][0];
  const Atom e = v.dims[rank - 1][0];
  const std::vector<Atom> made_q = {outer[0], s, outer[1], outer[2],
                                    q.dims[rank - 1][0]};
  const std::vector<Atom> made_k = {of_k[0], t, of_k[1], k.dims[rank - 2][0]};
  const std::vector<Atom> made_v = {of_v[0], t, of_v[1], e};
  for (const auto& [x, made] : {std::pair(&q, &made_q), std::pair(&k, &made_k),
                                std::pair(&v, &made_v)}) {
    std::vector<Atom> own = x->own;
    std::erase_if(own, [&](const Atom& atom) {
      return atom.extent == 1 &&
             std::ranges::count(*made, atom.id, &Atom::id) == 0;
    });
    if (!std::ranges::is_permutation(own, *made, {}, &Atom::id, &Atom::id)) {
      return misfit();
    }
    *x = Reordered(node, *std::move(x), *made);
  }
  const bool causal = scores.mask.causal;
  const TensorId of_queries = PositionsOf(s, causal);
  const TensorId of_keys = PositionsOf(t, causal);
  if (!of_queries.valid() || !of_keys.valid()) return misfit();
  int64_t window = scores.mask.window;
  const bool documents = causal && options_.documents && Source() == nullptr;
  if (documents) window = window > 0 ? std::min(window, seq_len_) : seq_len_;
  std::vector<Attribute> attributes = {{"scale", scores.scale},
                                       {"window", Number(window)}};
  if (!causal) attributes.push_back({"causal", 0});
  Activation y;
  y.tensor = builder_.Add1(causal ? "attention" : "attention_bidirectional",
                           Unique(NameOf(node)),
                           {q.tensor, k.tensor, v.tensor, of_queries, of_keys},
                           "", std::move(attributes));
  y.own = {outer[0], s, outer[1], outer[2], e};
  y.dims = q.dims;
  y.dims.back() = {e};
  Set(node, ActivationValue(std::move(y)));
  return {};
}

std::optional<Walk::SlicePlaces> Walk::PlacesOf(const OnnxNode& node,
                                                const Shape& shape) {
  const auto starts = Ints(node, 1);
  const auto ends = Ints(node, 2);
  const auto axes = Ints(node, 3);
  const auto steps = Ints(node, 4);
  if (!starts || !ends || !axes || starts->size() != 1 || ends->size() != 1 ||
      axes->size() != 1 || (Has(node, 4) && (!steps || *steps != Shape{1}))) {
    return std::nullopt;
  }
  const auto dim = AxisOf((*axes)[0], shape.size());
  if (!dim) return std::nullopt;
  const OnnxPlaces places =
      OnnxPlacesOf(shape[*dim], (*starts)[0], (*ends)[0], /*step=*/1);
  return SlicePlaces{*dim, {places.first, places.count}};
}

bool Walk::Divide(std::vector<RowRange>& ranges, int64_t extent) {
  std::ranges::sort(ranges, {}, &RowRange::begin);
  int64_t end = 0;
  const bool apart = std::ranges::all_of(ranges, [&](const RowRange& range) {
    const bool next = range.begin == end && range.count > 0;
    end = range.begin + range.count;
    return next;
  });
  return apart && end == extent && ranges.size() > 1;
}

Value Walk::PieceOfWeight(const Value& weight, size_t dim, RowRange range) {
  Value piece = weight;
  piece.whole = weight.whole == nullptr ? weight.source : weight.whole;
  piece.cut_dim = weight.order[dim];
  piece.cut_begin = range.begin;
  piece.weight += "." + std::to_string(range.begin);
  OnnxTensor& shape = cut_tensors_.emplace_back();
  shape.name = weight.source->name;
  shape.type = weight.source->type;
  shape.dims = weight.source->dims;
  shape.dims[piece.cut_dim] = range.count;
  piece.source = &shape;
  return piece;
}

Result<bool> Walk::CutWeight(const OnnxNode& node) {
  const Value& weight = In(node, 0);
  if (!weight.Is(Value::Kind::kWeight) || weight.whole != nullptr) return false;
  const std::string& name = node.inputs[0];
  const Shape shape = ShapeOf(weight);
  const auto& readers = readers_[name];
  const auto shapes = std::ranges::count(readers, "Shape", &OnnxNode::op);
  if (node.op == "Split") {
    const auto axis = AxisOf(node.Int("axis", 0), shape.size());
    TESSERA_TRY(const std::vector<int64_t> sizes, SizesOfSplit(node, shape));
    // Vectors that several nodes read are not tied.
    const bool alone = std::ssize(readers) - shapes == 1 || shape.size() == 1;
    if (!alone || !axis) return false;
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      Set(node, PieceOfWeight(weight, *axis, {begin, sizes[i]}), i);
      begin += sizes[i];
    }
    return true;
  }
  const auto places = PlacesOf(node, shape);
  if (!places || places->range.count < 1 ||
      places->range.count == shape[places->dim]) {
    return false;
  }
  if (atoms_.IsCutWeight(name)) {
    Set(node, PieceOfWeight(weight, places->dim, places->range));
    return true;
  }
  const auto [dim, first] = slice_dims_.emplace(name, places->dim);
  std::vector<RowRange>& ranges = slices_[name];
  if (dim->second == places->dim) ranges.push_back(places->range);
  // What no node reads would be lost where weights are written back.
  if (std::ssize(ranges) + shapes == std::ssize(readers) &&
      Divide(ranges, shape[places->dim])) {
    atoms_.CutWeight(name);
  }
  return false;
}

bool Walk::IsLayer(const Activation& x) const {
  const auto layer = whole_layers_.find(x.dims.back()[0].id);
  return layer != whole_layers_.end() && layer->second == x.tensor;
}

// Features of a dense layer that slices divide among them: the layer then is
// several. That they do is known when the last one is read.
Result<bool> Walk::SlicePiece(const OnnxNode& node) {
  const Value& value = In(node, 0);
  const Shape shape = ShapeOf(value);
  const auto places = PlacesOf(node, shape);
  if (!places || places->dim + 1 != shape.size()) return false;
  const RowRange range = places->range;
  if (value.Is(Value::Kind::kPieces) && value.axis + 1 == shape.size()) {
    int64_t begin = 0;
    for (const Activation& piece : value.pieces) {
      const int64_t count = Extent(piece.dims.back());
      if (begin == range.begin && count == range.count) {
        Set(node, ActivationValue(piece));
        return true;
      }
      begin += count;
    }
    return false;
  }
  if (!value.Is(Value::Kind::kActivation) || value.x.f != nullptr ||
      value.x.dims.back().size() != 1 || !IsLayer(value.x)) {
    return false;
  }
  std::vector<RowRange>& ranges = slices_[node.inputs[0]];
  ranges.push_back(range);
  const auto& readers = readers_[node.inputs[0]];
  const auto shapes = std::ranges::count(readers, "Shape", &OnnxNode::op);
  if (std::ssize(ranges) + shapes < std::ssize(readers) ||
      !Divide(ranges, shape.back())) {
    return false;
  }
  std::vector<int64_t> sizes;
  for (const RowRange& part : ranges) sizes.push_back(part.count);
  atoms_.Cut(value.x.dims.back()[0], std::move(sizes));
  return false;
}

Result<std::vector<int64_t>> Walk::SizesOfSplit(const OnnxNode& node,
                                                const Shape& shape) const {
  const auto axis = AxisOf(node.Int("axis", 0), shape.size());
  if (!axis) return InvalidInput("has no such dimension");
  std::vector<int64_t> sizes = node.Ints("split", {});
  if (Has(node, 1)) {
    TESSERA_TRY(sizes, Ints(node, 1));
  }
  const auto count = std::ssize(node.outputs);
  const int64_t extent = shape[*axis];
  if (sizes.empty()) {
    const int64_t each = (extent + count - 1) / count;
    sizes.assign(node.outputs.size(), each);
    sizes.back() = extent - (count - 1) * each;
  }
  int64_t rest = extent;
  for (int64_t size : sizes) {
    if (size < 1 || size > rest) return InvalidInput("its sizes do not fit");
    rest -= size;
  }
  if (rest != 0 || std::ssize(sizes) != count) {
    return InvalidInput("its sizes do not fit");
  }
  return sizes;
}

// Of the features of a dense layer, which then is several.
Result<void> Walk::Split(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  const auto axis = AxisOf(node.Int("axis", 0), shape.size());
  if (!axis) return InvalidInput("has no such dimension");
  TESSERA_TRY(const std::vector<int64_t> sizes, SizesOfSplit(node, shape));
  TESSERA_TRY(const bool weights, CutWeight(node));
  if (weights) return {};
  const Value value = In(node, 0);
  const bool of_layer =
      (value.Is(Value::Kind::kPieces) && value.axis + 1 == shape.size()) ||
      (value.Is(Value::Kind::kActivation) && *axis + 1 == shape.size() &&
       value.x.f == nullptr && value.x.dims.back().size() == 1 &&
       IsLayer(value.x));
  for (size_t i = 0; i < sizes.size(); ++i) {
    Activation piece;
    if (!of_layer) {
      TESSERA_TRY(piece, Computed(node, 0));
      const int64_t start = std::accumulate(
          sizes.begin(), sizes.begin() + static_cast<int64_t>(i), int64_t{0});
      TESSERA_TRY(piece, SliceOf(node, std::move(piece), *axis, start, 1,
                                 sizes[i], "." + std::to_string(i) + "_"));
      Set(node, ActivationValue(std::move(piece)), i);
      continue;
    }
    if (*axis + 1 != shape.size()) {
      return InvalidInput("expected a split of the last dimension");
    }
    if (value.Is(Value::Kind::kPieces)) {
      if (value.pieces.size() != sizes.size() ||
          Extent(value.pieces[i].dims.back()) != sizes[i]) {
        return InvalidInput("another node splits it in another way");
      }
      piece = value.pieces[i];
    } else {
      piece = value.x;
      const Atom whole = piece.dims.back()[0];
      if (i == 0) atoms_.Cut(whole, sizes);
      const Dim part = atoms_.Piece(whole, i, sizes[i]);
      piece.dims.back() = part;
      ReplaceIn(piece.own, whole, part);
    }
    Set(node, ActivationValue(std::move(piece)), i);
  }
  return {};
}

// A Split, whose results are read by their numbers.
Result<void> Walk::SplitToSequence(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  const auto axis = AxisOf(node.Int("axis", 0), shape.size());
  if (!axis) return InvalidInput("has no such dimension");
  Shape sizes;
  std::optional<int64_t> each = 1;  // of all but the last
  if (Has(node, 1)) {
    TESSERA_TRY(const OnnxConstant given, Constant(node, 1));
    sizes = given.Ints();
    each = given.shape.empty() ? sizes[0] : std::optional<int64_t>();
  } else if (node.Int("keepdims", 1) == 0) {
    return InvalidInput("leaves a dimension out");
  }
  constexpr int64_t kMostParts = 1024;
  const int64_t extent = shape[*axis];
  if (each) {
    sizes.clear();
    if (*each < 1 || extent < 1 || (extent - 1) / *each >= kMostParts) {
      return InvalidInput("expected 1 to 1024 tensors");
    }
    for (int64_t at = 0; at < extent; at += *each) {
      sizes.push_back(std::min(*each, extent - at));
    }
  }
  if (sizes.empty() || std::ssize(sizes) > kMostParts) {
    return InvalidInput("expected 1 to 1024 tensors");
  }
  OnnxNode& split = parts_.emplace_back(node);
  split.op = "Split";
  split.inputs = {node.inputs[0], IntsOf(node, sizes)};
  split.outputs.clear();
  for (size_t i = 0; i < sizes.size(); ++i) {
    split.outputs.push_back(node.outputs[0] + "#" +
                            std::to_string(next_part_++));
  }
  TESSERA_RETURN_IF_ERROR(Declare(split));
  TESSERA_RETURN_IF_ERROR(Map(split));
  Value value;
  value.kind = Value::Kind::kSequence;
  value.sequence = split.outputs;
  Set(node, std::move(value));
  return {};
}

Result<void> Walk::SequenceAt(const OnnxNode& node) {
  const std::vector<std::string>& sequence = In(node, 0).sequence;
  TESSERA_TRY(const std::vector<int64_t> at, Ints(node, 1));
  const auto place =
      AxisOf(at.size() == 1 ? at[0] : std::ssize(sequence), sequence.size());
  if (!place) return InvalidInput("expected a place in a sequence of tensors");
  Set(node, values_[sequence[*place]]);
  return {};
}

}  // namespace tessera::onnx
