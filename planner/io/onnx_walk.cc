#include "planner/io/onnx_walk.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <numeric>

#include "planner/base/element_count.h"

namespace tessera::onnx {

Walk::Walk(const OnnxModel& model, const std::string& path,
           const BoundSizes& sizes, const ImportOptions& options,
           std::span<const std::string> outputs,
           std::span<const std::string> frozen, Atoms& atoms, Found& found)
    : model_(model),
      path_(path),
      options_(options),
      sizes_(sizes),
      atoms_(atoms),
      found_(found),
      builder_(std::filesystem::path(path).stem().string(), sizes.batch,
               sizes.seq_len, options.dtype.value_or(DType::kFloat32)),
      outputs_(outputs.begin(), outputs.end()),
      names_({"labels", "count", "loss"}),
      frozen_(frozen.begin(), frozen.end()),
      seq_len_(sizes.seq_len) {
  layout_.onnx = true;
  FindNeeded();
  for (const OnnxNode& node : model.nodes) {
    if (!needed_.contains(&node)) continue;
    for (const std::string& input : node.inputs) {
      ++uses_[input];
      readers_[input].push_back(&node);
    }
  }
  for (const std::string& output : outputs_) ++uses_[output];
  for (const OnnxInput& input : model.inputs) types_[input.name] = input.type;
  for (const OnnxTensor& tensor : model.initializers) {
    types_[tensor.name] = tensor.type;
    Value value;
    const double elements = LargeElementCount(tensor.dims);
    const bool whole = std::ranges::all_of(
        tensor.dims, [](int64_t extent) { return extent >= 0; });
    if (!whole || elements > kMostElements) {
      problems_.push_back("tensor '" + tensor.name + "': its shape is " +
                          TextOf(tensor.dims));
    } else if (IsOnnxFloat(tensor.type) &&
               (elements > 1 || (elements == 1 && IsTrainedNumber(tensor)))) {
      value.kind = Value::Kind::kWeight;
      value.source = &tensor;
      value.weight = tensor.name;
      value.order.resize(tensor.dims.size());
      std::iota(value.order.begin(), value.order.end(), 0);
    } else {
      value.source = &tensor;
      std::vector<double> values = tensor.Values();
      if (Number(std::ssize(values)) == elements) {
        value = ConstantValue(
            {tensor.dims, std::move(values), IsOnnxFloat(tensor.type)});
        // A weight, to nodes that have one there (AsWeight).
        if (value.constant.is_float && !tensor.dims.empty() &&
            !IsFrozen(tensor.name)) {
          value.source = &tensor;
        }
      }
    }
    values_[tensor.name] = std::move(value);
  }
  TieTransposes();
}

void Walk::FindNeeded() {
  for (const OnnxNode& node : model_.nodes) {
    for (const std::string& output : node.outputs) {
      producers_.emplace(output, &node);
    }
  }
  std::vector<std::string_view> behind(outputs_.begin(), outputs_.end());
  while (!behind.empty()) {
    const auto made = producers_.find(behind.back());
    behind.pop_back();
    if (made == producers_.end() || !needed_.insert(made->second).second) {
      continue;
    }
    behind.insert(behind.end(), made->second->inputs.begin(),
                  made->second->inputs.end());
  }
}

const Value& Walk::In(const OnnxNode& node, size_t i) const {
  static const Value unknown;
  if (i >= node.inputs.size()) return unknown;
  const auto found = values_.find(node.inputs[i]);
  return found == values_.end() ? unknown : found->second;
}

bool Walk::Has(const OnnxNode& node, size_t i) const {
  return i < node.inputs.size() && !node.inputs[i].empty();
}

void Walk::Set(const OnnxNode& node, Value value, size_t i) {
  if (i < node.outputs.size() && !node.outputs[i].empty()) {
    values_[node.outputs[i]] = std::move(value);
  }
}

Shape Walk::ShapeOf(const Value& value) {
  Shape shape;
  switch (value.kind) {
    case Value::Kind::kConstant:
    case Value::Kind::kLarge:
      return value.constant.shape;
    case Value::Kind::kWeight:
      for (size_t d : value.order) shape.push_back(value.source->dims[d]);
      return shape;
    case Value::Kind::kPieces: {
      for (const Dim& dim : value.pieces[0].dims) shape.push_back(Extent(dim));
      shape[value.axis] = 0;
      for (const Activation& piece : value.pieces) {
        shape[value.axis] += Extent(piece.dims[value.axis]);
      }
      return shape;
    }
    case Value::Kind::kSlab:
      return value.slab.shape;
    default:
      if (value.scores) {
        const Scores& scores = *value.scores;
        for (const Dim& dim : scores.q.dims) shape.push_back(Extent(dim));
        shape.back() = Extent(scores.k.dims.back());
        return shape;
      }
      for (const Dim& dim : value.x.dims) shape.push_back(Extent(dim));
      return shape;
  }
}

Result<OnnxConstant> Walk::Constant(const OnnxNode& node, size_t i) const {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kConstant)) return value.constant;
  if (value.Is(Value::Kind::kWeight) && OnnxElements(ShapeOf(value))) {
    OnnxConstant constant = {value.source->dims, value.source->Values(), true};
    if (!constant.values.empty()) return TransposeOnnx(constant, value.order);
  }
  return InvalidInput("operand " + std::to_string(i) + " is not a constant");
}

Result<std::vector<int64_t>> Walk::Ints(const OnnxNode& node, size_t i) const {
  TESSERA_TRY(const OnnxConstant constant, Constant(node, i));
  return constant.Ints();
}

Result<Activation> Walk::Computed(const OnnxNode& node, size_t i) {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kActivation)) return value.x;
  const std::string operand = "operand " + std::to_string(i);
  // Read by others than attention and the loss.
  if (value.Is(Value::Kind::kScores) || value.Is(Value::Kind::kSoftmax)) {
    const Value held = value;
    Activation x = held.x;
    if (held.scores) {
      TESSERA_TRY(x, ScoresOf(node, *held.scores));
    }
    if (held.Is(Value::Kind::kSoftmax)) {
      TESSERA_TRY(x, SoftmaxOf(node, std::move(x), held.axis, held.log));
    }
    values_[node.inputs[i]] = ActivationValue(x);
    return x;
  }
  if (value.Is(Value::Kind::kWeight)) {
    NoteTrained(node, value);
    return Trained(value);
  }
  if (value.Is(Value::Kind::kSteps)) {
    const Value held = value;
    Activation x = held.x;
    x.tensor = Stacked(NameOf(node), held.x.own[0].letter == 'b', held.steps);
    values_[node.inputs[i]] = ActivationValue(x);
    return x;
  }
  switch (value.kind) {
    case Value::Kind::kPieces:
      if (value.pieces[0].dims[value.axis].empty()) {
        return JoinedStates(node, value);
      }
      return InvalidInput(operand + " is read whole and in pieces");
    case Value::Kind::kConstant:
      return Known(node, i);
    case Value::Kind::kSlab:
      return InvalidInput(operand +
                          " is a weight that a recurrent layer reads, too");
    default:
      return InvalidInput(operand +
                          " is a constant: expected what another "
                          "node computes");
  }
}

Value Walk::AsWeight(const Value& value) {
  Value weight = value;
  if (value.Is(Value::Kind::kConstant) && value.source != nullptr) {
    weight.kind = Value::Kind::kWeight;
    weight.weight = value.source->name;
    weight.order.resize(value.source->dims.size());
    std::iota(weight.order.begin(), weight.order.end(), 0);
  }
  return weight;
}

std::string Walk::Unique(const std::string& name) {
  if (names_.insert(name).second) return name;
  constexpr size_t kMostQuotes = 256;  // then they are counted
  size_t& repeat = repeats_[name];
  for (;;) {
    ++repeat;
    std::string other =
        name + (repeat <= kMostQuotes ? std::string(repeat, '\'')
                                      : "'" + std::to_string(repeat));
    if (names_.insert(other).second) return other;
  }
}

std::string Walk::NameOf(const OnnxNode& node) {
  if (!node.name.empty()) return node.name;
  return node.outputs.empty() ? node.op : node.outputs[0];
}

Result<Atom> Walk::Whole(const std::string& name, int64_t extent, char letter) {
  const Dim dim = atoms_.Make(name, extent, letter);
  if (dim.size() == 1 && atoms_.CutOf(dim[0]) == nullptr) return dim[0];
  return InvalidInput(
      "a dimension of its result is taken apart behind it, which only those of "
      "dense layers may be");
}

Result<Activation> Walk::Trained(const Value& value) {
  const std::string key =
      value.weight + " " + TextOf({value.order.begin(), value.order.end()});
  const auto made = trained_.find(key);
  if (made != trained_.end()) return made->second;
  Activation x;
  for (size_t d : value.order) {
    const int64_t extent = value.source->dims[d];
    const bool number = value.order.size() == 1;
    x.dims.push_back(
        extent == 1 && !number
            ? Dim()
            : atoms_.Make(value.weight + "." + std::to_string(d), extent, 'f'));
  }
  x.own = Flatten(x.dims);
  std::vector<size_t> order(value.order.size());
  std::iota(order.begin(), order.end(), 0);
  TESSERA_TRY(x.tensor,
              Weight(value, std::move(order), ExtentsOf(x.own), kTableStddev));
  // A node of its own has the gradient, whatever reads the weight.
  const std::string letters = Letters().Of(x.own);
  x.tensor = builder_.Add1("scale", Unique(value.weight + ".read"), {x.tensor},
                           letters + "->" + letters, {{"factor", 1}});
  return trained_[key] = x;
}

Result<Activation> Walk::Known(const OnnxNode& node, size_t i) {
  const std::string& name = node.inputs[i];
  OnnxConstant constant = In(node, i).constant;
  // What is the same for each sample, as where an exporter was given a batch,
  // is there once.
  const auto samples = [&](const std::string& input) {
    const auto found = values_.find(input);
    return found != values_.end() &&
           found->second.Is(Value::Kind::kActivation) &&
           found->second.x.dims.size() == constant.shape.size() &&
           HasSamples(found->second.x.dims[0]);
  };
  if (!constant.shape.empty() && constant.shape[0] == sizes_.batch &&
      sizes_.batch > 1 && std::ranges::any_of(node.inputs, samples)) {
    const std::vector<double>& values = constant.values;
    const auto row = std::ssize(values) / sizes_.batch;
    if (std::equal(values.begin() + row, values.end(), values.begin())) {
      constant.shape[0] = 1;
      constant.values.resize(static_cast<size_t>(row));
    }
  }
  const std::string key = name + " " + TextOf(constant.shape);
  const auto made = known_.find(key);
  if (made != known_.end()) return made->second;
  Activation x;
  for (size_t d = 0; d < constant.shape.size(); ++d) {
    const int64_t extent = constant.shape[d];
    if (extent < 1) return InvalidInput("'" + name + "' has no elements");
    const std::string atom = name + "." + std::to_string(d);
    x.dims.push_back(extent == 1 && constant.shape.size() > 1
                         ? Dim()
                         : atoms_.Make(atom, extent, 'f'));
  }
  x.own = Flatten(x.dims);
  if (x.own.size() > kMaxDims) {
    return InvalidInput("'" + name + "' has more than " +
                        std::to_string(kMaxDims) + " dimensions");
  }
  const bool marks = !constant.is_float &&
                     std::ranges::all_of(constant.values, [](double value) {
                       return value == 0 || value == 1;
                     });
  x.tensor = builder_.Constant(Unique(name), ExtentsOf(x.own),
                               std::move(constant.values));
  if (marks) marks_.insert(x.tensor);
  return known_[key] = x;
}

Result<TensorId> Walk::Weight(const Value& value, std::vector<size_t> order,
                              const Shape& shape, double stddev,
                              double constant, RowRange rows) {
  if (!value.Is(Value::Kind::kWeight)) {
    return InvalidInput("a weight is not one of the file's tensors");
  }
  if (shape.size() > kMaxDims) {
    return InvalidInput("weight '" + value.weight + "' has more than " +
                        std::to_string(kMaxDims) + " dimensions");
  }
  for (size_t& d : order) d = value.order[d];
  const auto made = weights_.find(value.weight);
  // Exporters write equal tensors once. Matrices that are read twice are tied;
  // vectors, such as the zeros that biases start as, are one for each layer
  // where the file does not say that they are one.
  const bool is_average = averages_.contains(value.weight);
  const bool is_one = order.size() > 1 ||
                      (value.source->is_one && !is_average &&
                       made != weights_.end() && made->second.shape == shape);
  if (made == weights_.end() || !is_one) {
    const std::string name = Unique(value.weight);
    if (made != weights_.end() && !is_average) repeated_.insert(value.weight);
    if (value.source->is_parameter == false) buffers_.insert(value.weight);
    const TensorId id =
        builder_.Weight(name, shape, {.stddev = stddev, .constant = constant},
                        order.size() > 1);
    const OnnxTensor& tensor =
        value.whole == nullptr ? *value.source : *value.whole;
    // All copies are written back; which one is read does not matter.
    const auto publish = [&](Slab slab) {
      if (value.whole != nullptr) {
        const auto at = std::ranges::find(order, value.cut_dim);
        const auto d = static_cast<size_t>(at - order.begin());
        const int64_t count = value.source->dims[value.cut_dim];
        const Slab whole = slab;
        slab = CutOf(whole, d, value.cut_begin, count);
        for (int64_t i = 1; i < value.copies; ++i) {
          std::ranges::copy(PiecesOf(CutOf(whole, d, i * count, count)),
                            std::back_inserter(layout_.pieces[name]));
        }
      }
      if (rows.count > 0) slab = CutOf(slab, 0, rows.begin, rows.count);
      std::ranges::copy(PiecesOf(slab),
                        std::back_inserter(layout_.pieces[name]));
    };
    publish(SlabOf(tensor, order));
    for (const OnnxTensor* copy : copies_[tensor.name]) {
      publish(SlabOf(*copy, order));
    }
    if (const auto tied = tied_.find(tensor.name); tied != tied_.end()) {
      for (const OnnxTensor* transpose : tied->second) {
        publish(SlabOf(*transpose, std::vector{1 - order[0], 1 - order[1]}));
      }
    }
    weights_[value.weight] = {id, std::move(order), shape};
    return id;
  }
  const auto& [tensor, known, of] = made->second;
  if (order.size() == 2 && shape.size() == 2 &&
      of == Shape{shape[1], shape[0]} &&
      known == std::vector{order[1], order[0]}) {
    return builder_.Add1("transpose", Unique(value.weight + ".turned"),
                         {tensor}, "fg->gf");
  }
  if (known != order || of != shape) {
    return InvalidInput("weight '" + value.weight + "' is read in two forms, " +
                        TextOf(of) + " and " + TextOf(shape));
  }
  return tensor;
}

std::string Walk::AtomOf(const OnnxNode& node, std::string_view which) {
  return node.outputs[0] + "." + std::string(which);
}

bool Walk::IsFirstState(const OnnxNode& node) const {
  const Shape shape = ShapeOf(In(node, 0));
  return UniformIn(node, 0).has_value() && shape.size() == 2 &&
         shape[0] == sizes_.batch && shape[1] <= kMostConstants;
}

Result<Activation> Walk::FirstState(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  const std::vector<double> numbers(static_cast<size_t>(shape[1]),
                                    UniformIn(node, 0).value());
  Activation x;
  TESSERA_TRY(const Atom f, Whole(AtomOf(node, "state"), shape[1], 'f'));
  x.own = {f};
  x.dims = {{}, {f}};
  if (shape[0] > 1) {
    TESSERA_TRY(const Atom copies,
                Whole(AtomOf(node, "copies"), shape[0], 'r'));
    x.dims[0] = {copies};
  }
  x.tensor =
      builder_.Constant(Unique(NameOf(node) + ".state"), {shape[1]}, numbers);
  return x;
}

std::span<const Walk::Row> Walk::Rows() {
  static constexpr Row kRows[] = {
      {"Abs", "abs", &Walk::Elementwise},
      {"Add", "add; a bias of linear; part of a function", &Walk::Elementwise},
      {"And", "multiply", &Walk::Elementwise},
      {"ArgMax", "top_k", &Walk::ArgMax},
      {"ArgMin", "top_k", &Walk::ArgMax},
      {"AveragePool", "average_pool", &Walk::AveragePool},
      {"BatchNormalization", "tracked_batch_norm, of microbatches",
       &Walk::BatchNorm},
      {"Cast", "nothing", &Walk::Identity},
      {"CastLike", "nothing", &Walk::CastLike},
      {"Celu", "elu", &Walk::Function1},
      {"Clip", "clip", &Walk::Clip},
      {"Concat", "concat_channels", &Walk::Concat},
      {"Conv", "conv2d, or linear of patches", &Walk::Convolution},
      {"ConvTranspose", "conv_transpose2d", &Walk::TransposedConvolution},
      {"Cos", "cos", &Walk::Elementwise},
      {"Cosh", "exp and others", &Walk::Function1},
      {"DepthToSpace", "nothing", &Walk::Depth},
      {"Div", "divide, or scale", &Walk::Elementwise},
      {"Dropout", "dropout while training, else nothing", &Walk::Dropout},
      {"Einsum", "einsum, reduce_sum or transpose", &Walk::Einsum},
      {"Elu", "elu", &Walk::Parametric},
      {"Equal", "equal, or one_hot of ids", &Walk::Elementwise},
      {"Erf", "erf, or part of gelu_erf", &Walk::Elementwise},
      {"Exp", "exp", &Walk::Elementwise},
      {"Expand", "nothing, of tensors of the file and of heads", &Walk::Expand},
      {"Flatten", "nothing", &Walk::Flat},
      {"Gather",
       "rows of a table: embedding; a place of a sequence: select; by other "
       "ids: gather",
       &Walk::Gather},
      {"GatherElements", "gather", &Walk::GatherElements},
      {"GatherND", "gather, of rows", &Walk::GatherND},
      {"Gelu", "gelu or gelu_erf", &Walk::Gelu},
      {"Gemm", "linear", &Walk::Gemm},
      {"GlobalAveragePool", "image_mean", &Walk::GlobalAveragePool},
      {"GlobalMaxPool", "reduce_max", &Walk::GlobalMaxPool},
      {"Greater", "greater", &Walk::Elementwise},
      {"GreaterOrEqual", "greater_equal", &Walk::Elementwise},
      {"GroupNormalization", "means, differences and products",
       &Walk::GroupNorm},
      {"GRU", "linear and gru_gates, or others, step by step",
       &Walk::Recurrent},
      {"Hardmax", "top_k and one_hot", &Walk::Hardmax},
      {"HardSigmoid", "hard_sigmoid, or scale and clip", &Walk::Function1},
      {"HardSwish", "hard_swish", &Walk::Function1},
      {"Identity", "nothing", &Walk::Identity},
      {"InstanceNormalization", "means, differences and products",
       &Walk::GeneralNorm},
      {"IsNaN", "nothing, of a softmax", &Walk::IsNaN},
      {"LayerNormalization", "layer_norm, or means, differences and products",
       &Walk::LayerNorm},
      {"LeakyRelu", "leaky_relu", &Walk::Parametric},
      {"Less", "less", &Walk::Elementwise},
      {"LessOrEqual", "less_equal", &Walk::Elementwise},
      {"Log", "log", &Walk::Elementwise},
      {"LogSoftmax", "log_softmax, or a part of the loss", &Walk::Softmax},
      {"LpNormalization", "reduce_sum and divide", &Walk::LpNorm},
      {"LSTM", "linear and lstm_gates, step by step", &Walk::Recurrent},
      {"MatMul", "linear, einsum, or a part of attention", &Walk::MatMul},
      {"Max", "maximum", &Walk::Variadic},
      {"MaxPool", "max_pool", &Walk::MaxPool},
      {"Mean", "sums", &Walk::Variadic},
      {"MeanVarianceNormalization", "means, differences and products",
       &Walk::GeneralNorm},
      {"Min", "minimum", &Walk::Variadic},
      {"Mish", "softplus, tanh and multiply", &Walk::Function1},
      {"Mul", "multiply, or scale; part of a function", &Walk::Elementwise},
      {"Neg", "scale", &Walk::Elementwise},
      {"Not", "scale and offset", &Walk::Elementwise},
      {"OneHot", "one_hot", &Walk::OneHot},
      {"Or", "maximum", &Walk::Elementwise},
      {"Pad", "pad; of edges resample, of what is reflected slice", &Walk::Pad},
      {"Pow", "power, or exp", &Walk::Elementwise},
      {"PRelu", "leaky_relu by channel", &Walk::PRelu},
      {"Reciprocal", "reciprocal", &Walk::Elementwise},
      {"ReduceL1", "reduce_sum", &Walk::ReduceMore},
      {"ReduceL2", "reduce_sum", &Walk::ReduceMore},
      {"ReduceLogSum", "reduce_sum and log", &Walk::ReduceMore},
      {"ReduceLogSumExp", "reduce_max, exp, reduce_sum and log",
       &Walk::ReduceLogSumExp},
      {"ReduceMax", "reduce_max", &Walk::Reduce},
      {"ReduceMean", "reduce_mean, or image_mean", &Walk::Reduce},
      {"ReduceMin", "reduce_max", &Walk::ReduceMore},
      {"ReduceSum", "reduce_sum", &Walk::Reduce},
      {"ReduceSumSquare", "reduce_sum", &Walk::ReduceMore},
      {"Relu", "relu", &Walk::Elementwise},
      {"Reshape", "nothing", &Walk::Reshape},
      {"Resize", "resample", &Walk::Resize},
      {"RNN", "linear, add and tanh or relu, step by step", &Walk::Recurrent},
      {"ScatterElements", "scatter_add", &Walk::ScatterElements},
      {"Selu", "elu", &Walk::Function1},
      {"SequenceAt", "nothing", &Walk::SequenceAt},
      {"Shrink", "comparisons and products", &Walk::Function1},
      {"Sigmoid", "sigmoid, or part of silu", &Walk::Elementwise},
      {"Sin", "sin", &Walk::Elementwise},
      {"Sinh", "exp and others", &Walk::Function1},
      {"Slice", "slice", &Walk::Slice},
      {"Softmax", "softmax, or a part of attention or of the loss",
       &Walk::Softmax},
      {"Softplus", "softplus", &Walk::Elementwise},
      {"Softsign", "abs and divide", &Walk::Function1},
      {"SpaceToDepth", "nothing", &Walk::Depth},
      {"Split", "several layers instead of a fused one, or slice",
       &Walk::Split},
      {"SplitToSequence", "as Split", &Walk::SplitToSequence},
      {"Sqrt", "sqrt", &Walk::Elementwise},
      {"Squeeze", "nothing", &Walk::Squeeze},
      {"Sub", "subtract, or offset", &Walk::Elementwise},
      {"Sum", "sums", &Walk::Variadic},
      {"Tan", "sin, cos and divide", &Walk::Function1},
      {"Tanh", "tanh, or part of gelu", &Walk::Elementwise},
      {"ThresholdedRelu", "a comparison and a product", &Walk::Function1},
      {"Tile", "nothing, as Expand; of several places concat_channels",
       &Walk::Tile},
      {"TopK", "top_k", &Walk::TopK},
      {"Transpose", "nothing", &Walk::Transpose},
      {"Unsqueeze", "nothing", &Walk::Unsqueeze},
      {"Where", "where, or a mask of attention", &Walk::Where},
      {"Xor", "not_equal", &Walk::Elementwise},
  };
  return kRows;
}

Result<void> Walk::Declare(const OnnxNode& node) {
  // That of all steps may be left out where the last ones are read.
  const bool last = node.op == "LSTM" || node.op == "GRU" || node.op == "RNN";
  if (node.outputs.empty() || (node.outputs[0].empty() && !last)) {
    return InvalidInput("has no output");
  }
  for (const std::string& output : node.outputs) {
    if (!output.empty() && !values_.emplace(output, Value()).second) {
      return InvalidInput("makes '" + output + "', which is there already");
    }
  }
  return {};
}

Result<void> Walk::CheckSizes(const OnnxNode& node) {
  for (const std::string& output : node.outputs) {
    Value& value = values_[output];
    if (LargeElementCount(ShapeOf(value)) <= kMostElements) continue;
    value = {};
    return InvalidInput("makes more than 2^50 elements");
  }
  return {};
}

// Its shape alone is asked for, or its elements are put elsewhere by a handler.
bool Walk::MovesLarge(const OnnxNode& node) const {
  if (node.op == "CastLike") return true;  // by a Cast
  constexpr std::string_view kMoves[] = {"Flatten",  "Reshape", "Shape",
                                         "Size",     "Squeeze", "Transpose",
                                         "Unsqueeze"};
  if (std::ranges::count(kMoves, node.op) == 0) return false;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const Value& value = In(node, i);
    const bool known =
        i == 0 ? value.large.has_value() : !value.Is(Value::Kind::kLarge);
    if (!known) return false;
  }
  return true;
}

// What a node makes of constants, some of them or its result large.
Value Walk::FoldedLarge(const OnnxNode& node) const {
  std::vector<OnnxLarge> operands(node.inputs.size());
  std::vector<const OnnxLarge*> given(node.inputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    const Value& value = In(node, i);
    if (value.large) {
      operands[i] = *value.large;
    } else if (value.Is(Value::Kind::kConstant)) {
      operands[i] = LargeOnnx(value.constant);
    } else {
      return LargeValue();
    }
    given[i] = &operands[i];
  }
  return LargeValue(FoldLargeOnnx(node, given));
}

Result<Walk::OperandKinds> Walk::KindsOfOperands(const OnnxNode& node) const {
  using Kind = Value::Kind;
  OperandKinds kinds;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    const Value& value = In(node, i);
    if (!values_.contains(node.inputs[i])) {
      return InvalidInput("reads '" + node.inputs[i] +
                          "', which nothing in front of it makes");
    }
    if (value.Is(Kind::kUnknown) && value.source != nullptr) {
      return InvalidInput("reads '" + node.inputs[i] +
                          "', whose elements are not in the file" +
                          (value.source->location.empty()
                               ? ""
                               : ", nor in '" + value.source->location + "'"));
    }
    if (value.Is(Kind::kUnknown)) {
      kinds.behind_problem = true;
      return kinds;
    }
    if (value.Is(Kind::kSequence) && node.op != "SequenceAt") {
      return InvalidInput("reads a sequence of tensors as a whole");
    }
    kinds.constants = kinds.constants && value.Is(Kind::kConstant);
    kinds.known = kinds.known && !value.Is(Kind::kActivation) &&
                  !value.Is(Kind::kPieces) && !value.Is(Kind::kSteps) &&
                  !value.Is(Kind::kScores) && !value.Is(Kind::kSoftmax) &&
                  !value.Is(Kind::kSequence);
    kinds.large = kinds.large || value.Is(Kind::kLarge);
  }
  return kinds;
}

namespace {

// Of a node "Constant".
Result<OnnxConstant> GivenConstant(const OnnxNode& node) {
  OnnxConstant constant;
  if (const OnnxAttribute* const tensor = node.Find("value")) {
    constant = {tensor->t.dims, tensor->t.Values(),
                IsOnnxFloat(tensor->t.type)};
    const auto elements = OnnxElements(constant.shape);
    if (!elements || *elements != std::ssize(constant.values)) {
      return InvalidInput("its value is not in the file");
    }
  } else if (node.Find("value_float") != nullptr) {
    constant = {{}, {node.Float("value_float", 0)}, true};
  } else if (node.Find("value_int") != nullptr) {
    constant = {{}, {Number(node.Int("value_int", 0))}, false};
  } else if (node.Find("value_ints") != nullptr) {
    for (int64_t value : node.Ints("value_ints", {})) {
      constant.values.push_back(Number(value));
    }
    constant.shape = {std::ssize(constant.values)};
  } else if (node.Find("value_floats") != nullptr) {
    constant.values = node.Find("value_floats")->floats;
    constant.shape = {std::ssize(constant.values)};
    constant.is_float = true;
  } else {
    return InvalidInput("expected a tensor or numbers");
  }
  return constant;
}

// Of a node "Size", whose operand has this shape.
OnnxConstant CountOf(const Shape& shape) {
  return {{}, {LargeElementCount(shape)}, false};
}

// Of a node "Shape".
OnnxConstant ExtentsOf(const OnnxNode& node, const Shape& shape) {
  const auto rank = std::ssize(shape);
  const auto place = [&](int64_t at) {
    return std::clamp<int64_t>(at < 0 ? at + rank : at, 0, rank);
  };
  OnnxConstant constant;
  for (int64_t d = place(node.Int("start", 0));
       d < place(node.Int("end", rank)); ++d) {
    constant.values.push_back(Number(shape[static_cast<size_t>(d)]));
  }
  constant.shape = {std::ssize(constant.values)};
  return constant;
}

// Why a node of this operator, which has no row, is not mapped.
Error NotMapped(std::string_view op) {
  constexpr std::string_view kByData[] = {"Compress", "NonZero", "Unique"};
  constexpr std::string_view kPrograms[] = {"If", "Loop", "Scan"};
  if (std::ranges::count(kByData, op) > 0) {
    return InvalidInput(
        "what it computes has a shape that depends on data, as where experts "
        "are given their tokens: tools/export_torch.py maps those of PyTorch "
        "models, and exporters write them with fixed shapes where each token "
        "has its experts' weights (transformers' "
        "experts_implementation=\"batched_mm\")");
  }
  if (std::ranges::count(kPrograms, op) > 0) {
    return InvalidInput("has graphs of its own, which are not read");
  }
  return InvalidInput("no operator of Tessera's is known for it");
}

}  // namespace

Result<bool> Walk::FoldConstants(const OnnxNode& node) {
  std::vector<const OnnxConstant*> given(node.inputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (Has(node, i)) given[i] = &In(node, i).constant;
  }
  auto result = FoldOnnx(node, given);
  if (!result && result.error().code == ErrorCode::kInfeasible) {
    Set(node, FoldedLarge(node));
    return true;
  }
  TESSERA_TRY(auto folded, std::move(result));
  if (!folded) return false;
  Value value = ConstantValue(*std::move(folded));
  // By another name it is of the file all the same.
  if (node.op == "Identity") value.source = In(node, 0).source;
  Set(node, std::move(value));
  return true;
}

Result<void> Walk::Map(const OnnxNode& node) {
  if (const auto rotary = rotary_.find(&node); rotary != rotary_.end()) {
    return Rotate(node, rotary->second);
  }
  TESSERA_TRY(const OperandKinds operands, KindsOfOperands(node));
  if (operands.behind_problem) {  // said where it is made
    ++behind_problems_;
    return {};
  }
  if (operands.known && operands.large && !MovesLarge(node)) {
    Set(node, FoldedLarge(node));
    return {};
  }
  if (of_slabs_.contains(&node)) return PartOfSlab(node);
  if (node.op == "Constant") {
    TESSERA_TRY(OnnxConstant constant, GivenConstant(node));
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  if ((node.op == "Size" || node.op == "Shape") && Has(node, 0)) {
    const Shape shape = ShapeOf(In(node, 0));
    Set(node, ConstantValue(node.op == "Size" ? CountOf(shape)
                                              : ExtentsOf(node, shape)));
    return {};
  }
  if (operands.constants && !node.inputs.empty()) {
    TESSERA_TRY(const bool folded, FoldConstants(node));
    if (folded) return {};
  }
  TESSERA_TRY(const bool numbers, FoldNumbers(node));
  if (numbers) return {};
  for (const Row& row : Rows()) {
    if (row.name != node.op) continue;
    if (node.inputs.empty()) return InvalidInput("has no operands");
    return (this->*row.handler)(node);
  }
  // Floor, Ceil and Mod: parts of what no operator computes alone.
  if (OnnxFunctionOf(node.op, true) != nullptr) return Elementwise(node);
  return NotMapped(node.op);
}

void Walk::Run() {
  FindSlabs();
  FindRotary();
  FindNumbers();
  FindRows();
  FindPatches();
  for (const BoundInput& input : sizes_.inputs) {
    if (input.all_ones) {
      values_[input.input->name] =
          LargeValue(LargeOnnx(input.shape, 1, input.is_float));
      continue;
    }
    Activation x;
    const size_t rank = input.shape.size();
    const std::string_view image = rank == 3 ? "bcw" : "bchw";
    std::vector<std::pair<size_t, std::string>> apart;
    for (size_t d = 0; d < rank; ++d) {
      char letter = image[d];
      if (!input.is_float && d == 1) letter = 's';
      // Samples and places are those of all inputs, but an encoder's has places
      // of its own.
      const std::string of =
          letter == 'b' || (letter == 's' && input.name != "source")
              ? "input"
              : input.name;
      const std::string name = of + "." + std::to_string(d);
      const auto atom = Whole(name, input.shape[d], letter);
      if (!atom && d > 0 && input.is_float && !patches_) {
        apart.emplace_back(d, name);
      } else if (!atom) {
        problems_.push_back("input '" + input.input->name +
                            "': what reads it takes its dimensions apart");
        return;
      }
      x.own.push_back(
          atom ? *atom
               : Atom{-2 - static_cast<int>(d), input.shape[d], letter});
      x.dims.push_back({x.own.back()});
    }
    Shape shape = input.shape;
    if (input.name == "images" && rank == 1) {
      x.own.push_back({-1, 1, 'c'});
      shape.push_back(1);
    }
    if (!patches_) {
      x.tensor = builder_.Input(Unique(input.name), shape,
                                input.is_float
                                    ? options_.dtype.value_or(DType::kFloat32)
                                    : DType::kInt32);
      if (!input.is_float) ids_.insert(x.tensor);
      inputs_[input.input] = x.tensor;
    }
    OnnxNode taker;
    taker.name = input.name;
    for (size_t i = apart.size(); i-- > 0;) {
      const auto& [d, name] = apart[i];
      auto taken =
          WithDim(taker, x, d, d, name, input.shape[d], x.own[d].letter);
      if (!taken) {
        problems_.push_back("input '" + input.input->name +
                            "': " + taken.error().message);
        return;
      }
      x = *std::move(taken);
    }
    values_[input.input->name] = ActivationValue(std::move(x));
  }
  // Weights are not called as what Extra makes.
  names_.insert({"mask_positions", "patch_rows", "patches", "positions",
                 "source_positions", "zeros"});
  for (const OnnxNode* row : rows_) MapOrName(*row);
  for (const OnnxNode& node : model_.nodes) {
    if (!done_.contains(&node) && needed_.contains(&node)) MapOrName(node);
  }
  whole_ = true;
}

}  // namespace tessera::onnx
