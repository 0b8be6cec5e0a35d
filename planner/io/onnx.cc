#include "planner/io/onnx.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "planner/base/table.h"
#include "planner/io/onnx_file.h"
#include "planner/io/onnx_fold.h"

namespace tessera {
namespace {

// The versions of the standard operators that are read.
constexpr int64_t kLeastOpset = 13;
constexpr int64_t kMostOpset = 21;

// Sums of sizes in bytes stay within int64.
constexpr double kMostElements = 0x1p50;

// ---- Values
// -------------------------------------------------------------------

// A dimension of a tensor of Tessera's graph. A dimension of the file may be
// several of them, such as (heads, features), or none where its extent is 1.
struct Atom {
  int id = 0;
  int64_t extent = 1;
  char letter = 0;  // in rules, where it is free there
};
using Dim = std::vector<Atom>;

int64_t Extent(const Dim& dim) {
  int64_t extent = 1;
  for (const Atom& atom : dim) extent *= atom.extent;
  return extent;
}

// Which atoms there are, by names that say where they come from, and which of
// them a later reshape or split takes apart: those are made in parts when the
// graph is walked again.
class Atoms {
 public:
  // The dimension that was called `name` when it was made: one atom, or those
  // that it is split into.
  Dim Make(const std::string& name, int64_t extent, char letter) {
    const int id = ids_.emplace(name, std::ssize(ids_)).first->second;
    names_.resize(ids_.size());
    names_[static_cast<size_t>(id)] = name;
    const auto split = splits_.find(id);
    if (split == splits_.end() || extent % split->second != 0) {
      return {{id, extent, letter}};
    }
    Dim dim = Make(name + ".outer", split->second, letter);
    const Dim inner = Make(name + ".inner", extent / split->second, letter);
    dim.insert(dim.end(), inner.begin(), inner.end());
    return dim;
  }
  // Splits an atom into (outer, extent / outer).
  Dim Split(const Atom& atom, int64_t outer) {
    changed_ |= splits_.emplace(atom.id, outer).second;
    const std::string name = names_[static_cast<size_t>(atom.id)];
    return Make(name, atom.extent, atom.letter);
  }
  // Cuts an atom into pieces that are different tensors.
  void Cut(const Atom& atom, std::vector<int64_t> sizes) {
    changed_ |= cuts_.emplace(atom.id, std::move(sizes)).second;
  }
  // Null where it is not cut.
  const std::vector<int64_t>* CutOf(const Atom& atom) const {
    const auto found = cuts_.find(atom.id);
    return found == cuts_.end() ? nullptr : &found->second;
  }
  Dim Piece(const Atom& atom, size_t i, int64_t size) {
    return Make(names_[static_cast<size_t>(atom.id)] + "." + std::to_string(i),
                size, atom.letter);
  }
  // Since it was asked the last time.
  bool Changed() { return std::exchange(changed_, false); }

 private:
  std::map<std::string, int> ids_;
  std::vector<std::string> names_;
  std::map<int, int64_t> splits_;
  std::map<int, std::vector<int64_t>> cuts_;
  bool changed_ = false;
};

// A tensor of the graph as the file sees it, and a function that is applied to
// each element: elementwise nodes are gathered until something else reads them,
// so that an operator is recognised however an exporter spells it.
struct Activation {
  TensorId tensor;
  std::vector<Atom> own;              // the tensor's dimensions
  std::vector<Dim> dims;              // the file's
  std::vector<double> samples;        // f(kPoints); empty: x itself
  std::vector<std::string> gathered;  // nodes that f is made of
};

// Where functions of one operand are told apart: about as well as fp32 does.
constexpr double kPoints[] = {-4.3, -2.9, -2.1, -1.37, -0.71, -0.33, -0.05,
                              0.04, 0.29, 0.62, 1.17,  1.9,   2.6,   3.8};
constexpr double kSameFunction = 2e-5;

struct Value {
  enum class Kind {
    kUnknown,     // of a node that could not be mapped
    kConstant,    // its elements are known
    kWeight,      // floating-point numbers of the file, with dimensions
    kActivation,  // computed
    kPieces,      // computed, in pieces along the last dimension
    kSoftmax,     // probabilities, of `x`
  };
  Kind kind = Kind::kUnknown;
  OnnxConstant constant;
  const OnnxTensor* source = nullptr;  // of a weight
  std::string weight;                  // its name
  std::vector<size_t> order;           // dimensions of `source`, in this order
  Activation x;
  std::vector<Activation> pieces;

  bool Is(Kind is) const { return kind == is; }
};

Value ConstantValue(OnnxConstant constant) {
  Value value;
  value.kind = Value::Kind::kConstant;
  value.constant = std::move(constant);
  return value;
}

Value ActivationValue(Activation x) {
  Value value;
  value.kind = Value::Kind::kActivation;
  value.x = std::move(x);
  return value;
}

// An operator of one operand, element by element.
struct Function {
  std::string_view op;
  double (*f)(double);
};

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

constexpr Function kFunctions[] = {
    {"relu", [](double x) { return std::max(x, 0.0); }},
    {"gelu",
     [](double x) {
       return x * Sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x));
     }},
    {"gelu_erf",
     [](double x) { return x * 0.5 * (1 + std::erf(x * 0.7071067811865476)); }},
    {"silu", [](double x) { return x * Sigmoid(x); }},
    {"sigmoid", Sigmoid},
    {"tanh", [](double x) { return std::tanh(x); }},
};

bool SameFunction(const std::vector<double>& samples, auto f) {
  for (size_t i = 0; i < std::size(kPoints); ++i) {
    const double expected = f(kPoints[i]);
    if (!(std::abs(samples[i] - expected) <=
          kSameFunction * (1 + std::abs(expected)))) {
      return false;
    }
  }
  return true;
}

// Letters of the factors of a rule, each atom one.
class Letters {
 public:
  // `taken`: by factors that are no atoms.
  explicit Letters(std::string_view taken = "") : taken_(taken) {}

  std::string Of(std::span<const Atom> atoms) {
    std::string letters;
    for (const Atom& atom : atoms) letters += Of(atom);
    return letters;
  }

 private:
  char Of(const Atom& atom) {
    const auto found = letters_.find(atom.id);
    if (found != letters_.end()) return found->second;
    char letter = atom.letter;
    for (const char free : std::string_view("ogdifjkmnpqruvcaz")) {
      if (taken_.find(letter) == std::string::npos) break;
      letter = free;
    }
    taken_ += letter;
    letters_.emplace(atom.id, letter);
    return letter;
  }

  std::string taken_;
  std::map<int, char> letters_;
};

Shape ExtentsOf(std::span<const Atom> atoms) {
  Shape shape;
  for (const Atom& atom : atoms) shape.push_back(atom.extent);
  return shape;
}

std::vector<Atom> Flatten(std::span<const Dim> dims) {
  std::vector<Atom> atoms;
  for (const Dim& dim : dims) atoms.insert(atoms.end(), dim.begin(), dim.end());
  return atoms;
}

bool SameAtoms(std::span<const Atom> a, std::span<const Atom> b) {
  return std::ranges::equal(a, b, {}, &Atom::id, &Atom::id);
}

std::string TextOf(const Shape& shape) {
  std::string text = "[";
  for (int64_t extent : shape) {
    text += (text.size() > 1 ? "," : "") + std::to_string(extent);
  }
  return text + "]";
}

double Number(int64_t value) {
  return static_cast<double>(value);
}

// `axis` of `dims` dimensions, from the back where it is negative; nothing
// where there is none.
std::optional<size_t> AxisOf(int64_t axis, size_t dims) {
  if (axis < 0) axis += static_cast<int64_t>(dims);
  if (axis < 0 || axis >= static_cast<int64_t>(dims)) return std::nullopt;
  return static_cast<size_t>(axis);
}

// ---- Sizes
// --------------------------------------------------------------------

// What the data has of an input, by which the runtime knows it
// (runtime/data/batches.h, images.h).
enum class Role { kTokens, kPositions, kImages, kOther };

struct BoundInput {
  const OnnxInput* input = nullptr;
  std::string name;  // in Tessera's graph
  Shape shape;
  bool is_float = false;
};

struct Sizes {
  int64_t batch = 0;
  int64_t seq_len = 1;
  std::vector<BoundInput> inputs;
};

std::string ShowsAs(const OnnxDimension& dim, size_t d) {
  return dim.symbol.empty() ? "dimension " + std::to_string(d)
                            : "dimension '" + dim.symbol + "'";
}

// What the file and the options say of `what`; both must agree.
Result<int64_t> Agreed(const OnnxDimension& dim, int64_t given,
                       const std::string& where, const std::string& flag) {
  if (dim.extent > 0 && given > 0 && dim.extent != given) {
    return InvalidInput("is " + std::to_string(dim.extent) +
                            " in the file: expected " + flag + " " +
                            std::to_string(dim.extent) +
                            ", or a file whose dimension is open",
                        where);
  }
  if (dim.extent <= 0 && given <= 0) {
    return InvalidInput("is open: needs " + flag + " N", where);
  }
  return dim.extent > 0 ? dim.extent : given;
}

// Extents of all inputs: the first dimension is the batch, the second one of
// whole numbers the sequence; others are in the file, or set by their symbols.
Result<Sizes> BindInputs(const OnnxModel& model, const std::string& path,
                         const ImportOptions& options) {
  Sizes sizes;
  std::set<std::string> read;
  for (const OnnxNode& node : model.nodes) {
    read.insert(node.inputs.begin(), node.inputs.end());
  }
  std::set<std::string> symbols;
  bool any_sequence = false;
  for (const OnnxInput& input : model.inputs) {
    if (!read.contains(input.name)) continue;
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
    double elements = 1;
    for (size_t d = 0; d < rank; ++d) {
      const OnnxDimension& dim = input.dims[d];
      const std::string at = where + ": " + ShowsAs(dim, d);
      int64_t given = 0;
      std::string flag = "--set model." + dim.symbol + "=N";
      if (d == 0) {
        given = sizes.batch > 0 ? sizes.batch : options.global_batch;
        flag = "--global-batch";
      } else if (d == 1 && sequence) {
        given = sizes.seq_len > 1 ? sizes.seq_len : options.seq_len;
        flag = "--seq-len";
      } else if (!dim.symbol.empty()) {
        symbols.insert(dim.symbol);
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
      } else {
        flag = "a size in the file, not";
      }
      TESSERA_TRY(const int64_t extent, Agreed(dim, given, at, flag));
      if (d == 0) sizes.batch = extent;
      if (d == 1 && sequence) sizes.seq_len = extent;
      elements *= Number(extent);
      bound.shape.push_back(extent);
    }
    if (elements > kMostElements) {
      return InvalidInput("has more than 2^50 elements", where);
    }
    sizes.inputs.push_back(std::move(bound));
  }
  for (const auto& [key, value] : options.overrides) {
    if (key == "output" || symbols.contains(key)) continue;
    std::vector<std::string_view> known = {"output"};
    known.insert(known.end(), symbols.begin(), symbols.end());
    return Error{ErrorCode::kNotFound,
                 UnknownName("key or symbol", key, known).message, path};
  }
  if (sizes.inputs.empty()) {
    return InvalidInput("has no inputs that its nodes read", path);
  }
  if (!any_sequence && options.seq_len > 1 && options.warnings != nullptr) {
    options.warnings->push_back(
        path + ": its inputs have no sequence: its length is left out");
  }
  // The names of the data.
  bool images = false;
  bool tokens = false;
  for (BoundInput& bound : sizes.inputs) {
    const bool position = bound.name.find("position") != std::string::npos;
    if (bound.is_float && !images) {
      images = true;
      bound.name = "images";
    } else if (!bound.is_float && position) {
      bound.name = "positions";
    } else if (!bound.is_float && !tokens) {
      tokens = true;
      bound.name = "tokens";
    }
  }
  return sizes;
}

// ---- The walk
// -----------------------------------------------------------------

// The size of a window's result, as ONNX's MaxPool defines it.
struct Places {
  int64_t count = 0;
  int64_t pad = 0;  // in front
};

// One walk over the nodes. Where it takes an atom apart its graph is of no use,
// and another walk follows (Atoms::Changed).
class Walk {
 public:
  Walk(const OnnxModel& model, const std::string& path, const Sizes& sizes,
       const ImportOptions& options, Atoms& atoms);

  void Run();
  // The loss of an output.
  Result<Graph> Finish();

  using Handler = Result<void> (Walk::*)(const OnnxNode&);
  struct Row {
    std::string_view name;
    Handler handler;
  };
  static std::span<const Row> Rows();

 private:
  // ---- values
  const Value& In(const OnnxNode& node, size_t i) const;
  bool Has(const OnnxNode& node, size_t i) const;
  void Set(const OnnxNode& node, Value value, size_t i = 0);
  // Operand `i`; errors where it is of another kind.
  Result<OnnxConstant> Constant(const OnnxNode& node, size_t i) const;
  Result<std::vector<int64_t>> Ints(const OnnxNode& node, size_t i) const;
  Result<Activation> Computed(const OnnxNode& node, size_t i);
  static Shape ShapeOf(const Value& value);

  // ---- nodes of Tessera's graph
  std::string Unique(std::string name);
  static std::string NameOf(const OnnxNode& node);
  // Of a dimension that a node makes.
  static std::string AtomOf(const OnnxNode& node, std::string_view which);
  // One atom, which no reshape may take apart.
  Result<Atom> Whole(const std::string& name, int64_t extent, char letter);
  // Applies what is gathered, so that the tensor is the value itself.
  Result<Activation> Materialise(Activation x);
  // The weight `value`, its dimensions in the order `order` and of the shape
  // `shape`, which may take them apart.
  Result<TensorId> Weight(const Value& value, std::vector<size_t> order,
                          const Shape& shape, double stddev,
                          double constant = 0);
  // y = x w + bias over the last dimension of x. `transposed`: w is (in, out).
  Result<void> Dense(const OnnxNode& node, Activation x, const Value& w,
                     bool transposed, const Value* bias, const std::string& to);
  // What adds a bias to a product and alone reads it, or null.
  const OnnxNode* BiasBehind(const OnnxNode& node, int64_t features);
  Result<Activation> Image(const OnnxNode& node, size_t i);
  Result<Places> Window(const OnnxNode& node, size_t direction, int64_t image,
                        int64_t window, int64_t dilation) const;
  Result<void> Pool(const OnnxNode& node, std::string_view op,
                    std::vector<Attribute> more);
  Result<Activation> Relabelled(Activation x, const Shape& shape);
  Result<void> Binary(const OnnxNode& node);
  Result<void> MeanOfImage(const OnnxNode& node);

  // ---- nodes of the file
  // Its results, still unknown.
  Result<void> Declare(const OnnxNode& node);
  Result<void> Map(const OnnxNode& node);
  // That no result is too large.
  Result<void> CheckSizes(const OnnxNode& node);
  Result<void> AveragePool(const OnnxNode& node);
  Result<void> BatchNorm(const OnnxNode& node);
  Result<void> Concat(const OnnxNode& node);
  Result<void> Convolution(const OnnxNode& node);
  Result<void> Dropout(const OnnxNode& node);
  Result<void> Elementwise(const OnnxNode& node);
  Result<void> Flat(const OnnxNode& node);
  Result<void> Gather(const OnnxNode& node);
  Result<void> Gelu(const OnnxNode& node);
  Result<void> Gemm(const OnnxNode& node);
  Result<void> GlobalAveragePool(const OnnxNode& node);
  Result<void> Identity(const OnnxNode& node);
  Result<void> LayerNorm(const OnnxNode& node);
  Result<void> MatMul(const OnnxNode& node);
  Result<void> MaxPool(const OnnxNode& node);
  Result<void> ReduceMean(const OnnxNode& node);
  Result<void> Reshape(const OnnxNode& node);
  Result<void> Softmax(const OnnxNode& node);
  Result<void> Squeeze(const OnnxNode& node);
  Result<void> Transpose(const OnnxNode& node);
  Result<void> Unsqueeze(const OnnxNode& node);

  struct MadeWeight {
    TensorId tensor;
    std::vector<size_t> order;
    Shape shape;
  };

  const OnnxModel& model_;
  const std::string& path_;
  const ImportOptions& options_;
  const Sizes& sizes_;
  Atoms& atoms_;
  GraphBuilder builder_;
  TensorId labels_;
  std::map<std::string, Value, std::less<>> values_;
  std::map<std::string, int> uses_;  // how many nodes and outputs read a value
  std::map<std::string, const OnnxNode*> reader_;  // one of these nodes
  std::set<const OnnxNode*> done_;                 // by a node in front of them
  std::set<std::string> names_;
  std::map<std::string, MadeWeight> weights_;
  std::map<std::pair<TensorId, std::vector<double>>, TensorId> materialised_;
  std::vector<std::string> problems_;
  int dropouts_ = 0;
};

Walk::Walk(const OnnxModel& model, const std::string& path, const Sizes& sizes,
           const ImportOptions& options, Atoms& atoms)
    : model_(model),
      path_(path),
      options_(options),
      sizes_(sizes),
      atoms_(atoms),
      builder_(std::filesystem::path(path).stem().string(), sizes.batch,
               sizes.seq_len, options.dtype.value_or(DType::kFloat32)),
      names_({"labels", "count", "loss"}) {
  for (const OnnxNode& node : model.nodes) {
    for (const std::string& input : node.inputs) {
      ++uses_[input];
      reader_[input] = &node;
    }
  }
  for (const std::string& output : model.outputs) ++uses_[output];
  for (const OnnxTensor& tensor : model.initializers) {
    Value value;
    double elements = 1;
    for (int64_t extent : tensor.dims) elements *= Number(extent);
    const bool whole = std::ranges::all_of(
        tensor.dims, [](int64_t extent) { return extent >= 0; });
    if (!whole || elements > kMostElements) {
      problems_.push_back("tensor '" + tensor.name + "': its shape is " +
                          TextOf(tensor.dims));
    } else if (IsOnnxFloat(tensor.type) && elements > 1) {
      value.kind = Value::Kind::kWeight;
      value.source = &tensor;
      value.weight = tensor.name;
      value.order.resize(tensor.dims.size());
      std::iota(value.order.begin(), value.order.end(), 0);
    } else {
      std::vector<double> values = tensor.Values();
      if (Number(std::ssize(values)) == elements) {
        value = ConstantValue(
            {tensor.dims, std::move(values), IsOnnxFloat(tensor.type)});
      }
    }
    values_[tensor.name] = std::move(value);
  }
}

// ---- values

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
      return value.constant.shape;
    case Value::Kind::kWeight:
      for (size_t d : value.order) shape.push_back(value.source->dims[d]);
      return shape;
    case Value::Kind::kPieces: {
      int64_t last = 0;
      for (const Activation& piece : value.pieces) {
        last += Extent(piece.dims.back());
      }
      for (const Dim& dim : value.pieces[0].dims) shape.push_back(Extent(dim));
      shape.back() = last;
      return shape;
    }
    default:
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
  switch (value.kind) {
    case Value::Kind::kSoftmax:
      return InvalidInput(operand +
                          " is a softmax, which only the loss may read");
    case Value::Kind::kPieces:
      return InvalidInput(operand + " is read whole and in pieces");
    default:
      return InvalidInput(operand +
                          " is a constant: expected what another "
                          "node computes");
  }
}

// ---- nodes of Tessera's graph

std::string Walk::Unique(std::string name) {
  while (!names_.insert(name).second) name += "'";
  return name;
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

Result<Activation> Walk::Materialise(Activation x) {
  if (x.samples.empty()) return x;
  const auto key = std::pair(x.tensor, x.samples);
  const auto made = materialised_.find(key);
  if (made == materialised_.end()) {
    std::string_view op;
    std::vector<Attribute> attributes;
    for (const Function& function : kFunctions) {
      if (SameFunction(x.samples, function.f)) op = function.op;
    }
    const double factor = x.samples[0] / kPoints[0];
    if (op.empty() &&
        SameFunction(x.samples, [=](double at) { return factor * at; })) {
      op = "scale";
      attributes = {{"factor", factor}};
    }
    if (op.empty()) {
      std::string nodes;
      for (const std::string& name : x.gathered) {
        nodes += (nodes.empty() ? "'" : ", '") + name + "'";
      }
      return InvalidInput("no operator computes the function of " + nodes);
    }
    const std::string letters = Letters().Of(x.own);
    materialised_[key] =
        builder_.Add1(op, Unique(x.gathered.back()), {x.tensor},
                      letters + "->" + letters, std::move(attributes));
  }
  x.tensor = materialised_[key];
  x.samples.clear();
  x.gathered.clear();
  return x;
}

Result<TensorId> Walk::Weight(const Value& value, std::vector<size_t> order,
                              const Shape& shape, double stddev,
                              double constant) {
  if (!value.Is(Value::Kind::kWeight)) {
    return InvalidInput("a weight is not one of the file's tensors");
  }
  if (shape.size() > kMaxDims) {
    return InvalidInput("weight '" + value.weight + "' has more than " +
                        std::to_string(kMaxDims) + " dimensions");
  }
  for (size_t& d : order) d = value.order[d];
  const auto made = weights_.find(value.weight);
  if (made == weights_.end()) {
    const TensorId id = builder_.Weight(
        Unique(value.weight), shape, {.stddev = stddev, .constant = constant},
        shape.size() > 1);
    weights_[value.weight] = {id, std::move(order), shape};
    return id;
  }
  if (made->second.order != order || made->second.shape != shape) {
    return InvalidInput("weight '" + value.weight + "' is read in two forms, " +
                        TextOf(made->second.shape) + " and " + TextOf(shape));
  }
  return made->second.tensor;
}

const OnnxNode* Walk::BiasBehind(const OnnxNode& node, int64_t features) {
  const std::string& product = node.outputs[0];
  if (uses_[product] != 1 || !reader_.contains(product)) return nullptr;
  const OnnxNode* const reader = reader_[product];
  if (reader->op != "Add" || reader->inputs.size() != 2 ||
      reader->outputs.size() != 1) {
    return nullptr;
  }
  const Value& bias = In(*reader, reader->inputs[0] == product ? 1 : 0);
  const bool fits =
      bias.Is(Value::Kind::kWeight) && ShapeOf(bias) == Shape{features};
  return fits ? reader : nullptr;
}

Result<void> Walk::Dense(const OnnxNode& node, Activation x, const Value& w,
                         bool transposed, const Value* bias,
                         const std::string& to) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  const Shape shape = ShapeOf(w);
  if (!w.Is(Value::Kind::kWeight) || shape.size() != 2 || x.dims.size() < 2) {
    return InvalidInput("expected a tensor of the file with two dimensions");
  }
  const int64_t in = shape[transposed ? 0 : 1];
  const int64_t out = shape[transposed ? 1 : 0];
  const Dim k = x.dims.back();
  if (Extent(k) != in || out < 1) {
    return InvalidInput("reads " + std::to_string(Extent(k)) +
                        " features: its weight has " + std::to_string(in));
  }
  if (!SameAtoms(Flatten(x.dims), x.own)) {
    return InvalidInput("reads a transposed tensor");
  }
  std::vector<Atom> rows = Flatten(std::span(x.dims).first(x.dims.size() - 1));
  const std::string name = NameOf(node);
  const Dim whole = atoms_.Make(AtomOf(node, "out"), out, 'o');
  const double stddev = 1 / std::sqrt(3 * Number(in));
  // One layer, or one for each piece of the features.
  const std::vector<int64_t>* const cut =
      whole.size() == 1 ? atoms_.CutOf(whole[0]) : nullptr;
  std::vector<Activation> pieces;
  for (size_t i = 0; i < (cut == nullptr ? 1 : cut->size()); ++i) {
    const Dim n = cut == nullptr ? whole : atoms_.Piece(whole[0], i, (*cut)[i]);
    const std::string suffix = cut == nullptr ? "" : "." + std::to_string(i);
    Letters letters;
    const std::string m = letters.Of(rows);
    const std::string from = letters.Of(k);
    const std::string made = letters.Of(n);
    Shape matrix = ExtentsOf(n);
    const Shape features = matrix;
    for (const Atom& atom : k) matrix.push_back(atom.extent);
    Value piece = w;
    piece.weight += suffix;
    std::vector<size_t> order = {0, 1};
    if (transposed) std::swap(order[0], order[1]);
    TESSERA_TRY(const TensorId weight,
                Weight(piece, std::move(order), matrix, stddev));
    std::string rule = m + from + "," + made + from;
    std::vector<TensorId> operands = {x.tensor, weight};
    if (bias != nullptr) {
      Value part = *bias;
      part.weight += suffix;
      TESSERA_TRY(const TensorId added, Weight(part, {0}, features, 0));
      operands.push_back(added);
      rule += "+" + made;
    }
    Activation y;
    y.tensor = builder_.Add1("linear", Unique(name + suffix),
                             std::move(operands), rule + "->" + m + made);
    y.own = rows;
    y.own.insert(y.own.end(), n.begin(), n.end());
    y.dims = x.dims;
    y.dims.back() = n;
    pieces.push_back(std::move(y));
  }
  Value value;
  value.kind = cut == nullptr ? Value::Kind::kActivation : Value::Kind::kPieces;
  if (cut == nullptr) {
    value.x = std::move(pieces[0]);
  } else {
    value.pieces = std::move(pieces);
  }
  values_[to] = std::move(value);
  return {};
}

Result<Activation> Walk::Image(const OnnxNode& node, size_t i) {
  TESSERA_TRY(Activation x, Computed(node, i));
  TESSERA_TRY(x, Materialise(std::move(x)));
  const bool image =
      x.dims.size() == 4 && x.own.size() == 4 &&
      std::ranges::all_of(x.dims, [](const Dim& d) { return d.size() == 1; }) &&
      SameAtoms(Flatten(x.dims), x.own);
  if (image) return x;
  return InvalidInput(
      "expected images, [samples, channels, height, width], found " +
      TextOf(ShapeOf(ActivationValue(x))));
}

Result<Places> Walk::Window(const OnnxNode& node, size_t direction,
                            int64_t image, int64_t window,
                            int64_t dilation) const {
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  const std::vector<int64_t> pads = node.Ints("pads", {0, 0, 0, 0});
  const std::string automatic = node.Text("auto_pad", "NOTSET");
  const auto small = [](int64_t value, int64_t least) {
    return value >= least && value <= 65536;
  };
  if (strides.size() != 2 || pads.size() != 4 ||
      !small(strides[direction], 1) || !small(window, 1) ||
      !small(dilation, 1) || !small(pads[direction], 0) ||
      !small(pads[direction + 2], 0)) {
    return InvalidInput(
        "expected a window in two dimensions with strides, padding and "
        "dilations of up to 65536");
  }
  const int64_t stride = strides[direction];
  const int64_t reach = dilation * (window - 1) + 1;
  Places places;
  int64_t before = pads[direction];
  int64_t behind = pads[direction + 2];
  if (automatic == "SAME_UPPER" || automatic == "SAME_LOWER") {
    const int64_t count = (image + stride - 1) / stride;
    const int64_t all =
        std::max<int64_t>(0, (count - 1) * stride + reach - image);
    before = automatic == "SAME_UPPER" ? all / 2 : all - all / 2;
    behind = all - before;
  } else if (automatic == "VALID") {
    before = behind = 0;
  } else if (automatic != "NOTSET" && !automatic.empty()) {
    return InvalidInput("unknown auto_pad '" + automatic + "'");
  }
  const int64_t room = image + before + behind - reach;
  if (room < 0) return InvalidInput("the window is larger than the image");
  places.pad = before;
  places.count = room / stride + 1;
  // A window that would begin in the padding behind is left out.
  if (node.Int("ceil_mode", 0) != 0 && room % stride != 0 &&
      places.count * stride < image + before) {
    ++places.count;
  }
  return places;
}

Result<void> Walk::Pool(const OnnxNode& node, std::string_view op,
                        std::vector<Attribute> more) {
  TESSERA_TRY(const Activation x, Image(node, 0));
  const std::vector<int64_t> window = node.Ints("kernel_shape", {});
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  if (window.size() != 2) {
    return InvalidInput("expected a window in two dimensions");
  }
  if (node.Ints("dilations", {1, 1}) != std::vector<int64_t>{1, 1} ||
      node.Int("storage_order", 0) != 0 || node.outputs.size() > 1) {
    return InvalidInput(
        "dilations, indices and column-major order are not "
        "supported");
  }
  TESSERA_TRY(const Places y, Window(node, 0, x.own[2].extent, window[0], 1));
  TESSERA_TRY(const Places z, Window(node, 1, x.own[3].extent, window[1], 1));
  const std::string name = NameOf(node);
  TESSERA_TRY(const Atom height, Whole(AtomOf(node, "h"), y.count, 'h'));
  TESSERA_TRY(const Atom width, Whole(AtomOf(node, "w"), z.count, 'w'));
  more.insert(more.end(), {{"out_height", Number(y.count)},
                           {"out_width", Number(z.count)},
                           {"pad_left", Number(z.pad)},
                           {"pad_top", Number(y.pad)},
                           {"stride_height", Number(strides[0])},
                           {"stride_width", Number(strides[1])},
                           {"window_height", Number(window[0])},
                           {"window_width", Number(window[1])}});
  Activation result;
  result.tensor = builder_.Add1(op, Unique(name), {x.tensor}, "bch!w!->bcyx",
                                std::move(more));
  result.own = {x.own[0], x.own[1], height, width};
  for (const Atom& atom : result.own) result.dims.push_back({atom});
  Set(node, ActivationValue(std::move(result)));
  return {};
}

// Atoms in another grouping. Where one belongs to two dimensions it is split.
Result<Activation> Walk::Relabelled(Activation x, const Shape& shape) {
  std::vector<Atom> atoms = Flatten(x.dims);
  const auto misfit = [&] {
    return InvalidInput("cannot make " + TextOf(shape) + " of " +
                        TextOf(ShapeOf(ActivationValue(x))) +
                        " without moving elements");
  };
  std::vector<Dim> dims;
  size_t next = 0;
  for (int64_t extent : shape) {
    if (extent < 1) return misfit();
    Dim dim;
    if (extent == 1 && next < atoms.size() && atoms[next].extent == 1) {
      dim.push_back(atoms[next++]);
    }
    for (int64_t rest = extent; rest > 1;) {
      if (next == atoms.size()) return misfit();
      const Atom atom = atoms[next];
      if (rest % atom.extent == 0) {
        dim.push_back(atom);
        rest /= atom.extent;
        ++next;
        continue;
      }
      if (atom.extent % rest != 0) return misfit();
      const Dim parts = atoms_.Split(atom, rest);
      if (parts.size() < 2 || parts[0].extent != rest) return misfit();
      const auto replace = [&](std::vector<Atom>& in) {
        const auto at = std::ranges::find(in, atom.id, &Atom::id);
        if (at == in.end()) return;
        const auto begin = in.erase(at);
        in.insert(begin, parts.begin(), parts.end());
      };
      replace(atoms);
      replace(x.own);
    }
    dims.push_back(std::move(dim));
  }
  for (; next < atoms.size(); ++next) {
    if (atoms[next].extent != 1 || dims.empty()) return misfit();
    dims.back().push_back(atoms[next]);
  }
  x.dims = std::move(dims);
  return x;
}

std::string Walk::AtomOf(const OnnxNode& node, std::string_view which) {
  return node.outputs[0] + "." + std::string(which);
}

// ---- nodes of the file

Result<void> Walk::Gemm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  if (node.Float("alpha", 1) != 1 || node.Float("beta", 1) != 1 ||
      node.Int("transA", 0) != 0) {
    return InvalidInput("expected alpha and beta of 1, and no transA");
  }
  const Value* const bias = Has(node, 2) ? &In(node, 2) : nullptr;
  const bool transposed = node.Int("transB", 0) == 0;
  const Shape shape = ShapeOf(In(node, 1));
  if (bias != nullptr && (shape.size() != 2 ||
                          ShapeOf(*bias) != Shape{shape[transposed ? 1 : 0]})) {
    return InvalidInput("its bias is not one number for each feature");
  }
  return Dense(node, std::move(x), In(node, 1), transposed, bias,
               node.outputs[0]);
}

Result<void> Walk::MatMul(const OnnxNode& node) {
  const Value& w = In(node, 1);
  TESSERA_TRY(Activation x, Computed(node, 0));
  if (!w.Is(Value::Kind::kWeight) || ShapeOf(w).size() != 2) {
    return InvalidInput(
        "expected a product with a matrix of the file; only attention "
        "multiplies two tensors that are computed");
  }
  const OnnxNode* const add = BiasBehind(node, ShapeOf(w)[1]);
  if (add == nullptr) {
    return Dense(node, std::move(x), w, true, nullptr, node.outputs[0]);
  }
  done_.insert(add);
  const Value& bias = In(*add, add->inputs[0] == node.outputs[0] ? 1 : 0);
  return Dense(node, std::move(x), w, true, &bias, add->outputs[0]);
}

Result<void> Walk::Convolution(const OnnxNode& node) {
  TESSERA_TRY(const Activation x, Image(node, 0));
  const Value& w = In(node, 1);
  const Shape shape = ShapeOf(w);
  const int64_t groups = node.Int("group", 1);
  const std::vector<int64_t> dilations = node.Ints("dilations", {1, 1});
  if (!w.Is(Value::Kind::kWeight) || shape.size() != 4 ||
      dilations.size() != 2) {
    return InvalidInput(
        "expected a window in two dimensions, a tensor of the "
        "file");
  }
  if (groups < 1 || shape[0] < 1 || shape[1] < 1 || shape[0] % groups != 0 ||
      x.own[1].extent % groups != 0 || shape[1] != x.own[1].extent / groups) {
    return InvalidInput("reads " + std::to_string(x.own[1].extent) +
                        " channels: its weight has " + TextOf(shape) + " in " +
                        std::to_string(groups) + " groups");
  }
  TESSERA_TRY(const Places y,
              Window(node, 0, x.own[2].extent, shape[2], dilations[0]));
  TESSERA_TRY(const Places z,
              Window(node, 1, x.own[3].extent, shape[3], dilations[1]));
  if (groups > 1) {
    return InvalidInput(
        "groups are not supported: a group of channels would "
        "be a dimension of its own");
  }
  const std::string name = NameOf(node);
  TESSERA_TRY(const Atom channels, Whole(AtomOf(node, "c"), shape[0], 'c'));
  TESSERA_TRY(const Atom height, Whole(AtomOf(node, "h"), y.count, 'h'));
  TESSERA_TRY(const Atom width, Whole(AtomOf(node, "w"), z.count, 'w'));
  // He et al. (2015), over the outputs.
  const double stddev =
      std::sqrt(2 / (Number(shape[0]) * Number(shape[2]) * Number(shape[3])));
  TESSERA_TRY(const TensorId weight, Weight(w, {0, 1, 2, 3}, shape, stddev));
  std::vector<TensorId> operands = {x.tensor, weight};
  if (Has(node, 2)) {
    if (ShapeOf(In(node, 2)) != Shape{shape[0]}) {
      return InvalidInput("its bias is not one number for each channel");
    }
    TESSERA_TRY(const TensorId bias, Weight(In(node, 2), {0}, {shape[0]}, 0));
    operands.push_back(bias);
  }
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  Activation result;
  result.tensor = builder_.Add1(
      "conv2d", Unique(name), operands,
      operands.size() == 3 ? "bch!w!,ock!l!+o->boyx" : "bch!w!,ock!l!->boyx",
      {{"dilation_height", Number(dilations[0])},
       {"dilation_width", Number(dilations[1])},
       {"out_height", Number(y.count)},
       {"out_width", Number(z.count)},
       {"pad_left", Number(z.pad)},
       {"pad_top", Number(y.pad)},
       {"stride_height", Number(strides[0])},
       {"stride_width", Number(strides[1])}});
  result.own = {x.own[0], channels, height, width};
  for (const Atom& atom : result.own) result.dims.push_back({atom});
  Set(node, ActivationValue(std::move(result)));
  return {};
}

Result<void> Walk::BatchNorm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0));
  const Shape channels = {x.own[1].extent};
  if (ShapeOf(In(node, 1)) != channels || ShapeOf(In(node, 2)) != channels) {
    return InvalidInput(
        "its scale or shift is not one number for each "
        "channel");
  }
  TESSERA_TRY(const TensorId scale, Weight(In(node, 1), {0}, channels, 0, 1));
  TESSERA_TRY(const TensorId shift, Weight(In(node, 2), {0}, channels, 0));
  x.tensor = builder_.Add1("batch_norm", Unique(NameOf(node)),
                           {x.tensor, scale, shift}, "bchw,c,c->bchw,c,c",
                           {{"epsilon", node.Float("epsilon", 1e-5)}});
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::LayerNorm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  const auto axis = AxisOf(node.Int("axis", -1), x.dims.size());
  if (!axis || *axis + 1 != x.dims.size() || x.dims.back().size() != 1 ||
      !SameAtoms(Flatten(x.dims), x.own)) {
    return InvalidInput("expected a norm over the last dimension");
  }
  const Shape features = {x.own.back().extent};
  if (ShapeOf(In(node, 1)) != features || ShapeOf(In(node, 2)) != features) {
    return InvalidInput(
        "expected a scale and a shift, one number for each feature");
  }
  TESSERA_TRY(const TensorId scale, Weight(In(node, 1), {0}, features, 0, 1));
  TESSERA_TRY(const TensorId shift, Weight(In(node, 2), {0}, features, 0));
  Letters letters;
  const std::string rows = letters.Of(std::span(x.own).first(x.own.size() - 1));
  const std::string h = letters.Of(std::span(x.own).last(1));
  x.tensor = builder_.Add1(
      "layer_norm", Unique(NameOf(node)), {x.tensor, scale, shift},
      rows + h + "!," + h + "," + h + "->" + rows + h + "," + rows + "," + rows,
      {{"epsilon", node.Float("epsilon", 1e-5)}});
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::MaxPool(const OnnxNode& node) {
  return Pool(node, "max_pool", {});
}

Result<void> Walk::AveragePool(const OnnxNode& node) {
  return Pool(node, "average_pool",
              {{"count_pad", Number(node.Int("count_include_pad", 0) != 0)}});
}

Result<void> Walk::MeanOfImage(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0));
  x.tensor = builder_.Add1("image_mean", Unique(NameOf(node)), {x.tensor});
  x.own.resize(2);
  x.dims[2].clear();
  x.dims[3].clear();
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::GlobalAveragePool(const OnnxNode& node) {
  return MeanOfImage(node);
}

Result<void> Walk::ReduceMean(const OnnxNode& node) {
  TESSERA_TRY(const Activation x, Computed(node, 0));
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  for (int64_t& axis : axes) axis += axis < 0 ? std::ssize(x.dims) : 0;
  std::ranges::sort(axes);
  if (x.dims.size() != 4 || axes != std::vector<int64_t>{2, 3}) {
    return InvalidInput("expected a mean over the height and width of images");
  }
  TESSERA_RETURN_IF_ERROR(MeanOfImage(node));
  if (node.Int("keepdims", 1) == 0) values_[node.outputs[0]].x.dims.resize(2);
  return {};
}

Result<void> Walk::Concat(const OnnxNode& node) {
  std::vector<Activation> parts;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    TESSERA_TRY(Activation x, Image(node, i));
    const bool alike =
        parts.empty() || (x.own[0].extent == parts[0].own[0].extent &&
                          x.own[2].extent == parts[0].own[2].extent &&
                          x.own[3].extent == parts[0].own[3].extent);
    if (!alike) return InvalidInput("joins images of different sizes");
    parts.push_back(std::move(x));
  }
  if (parts.empty() || AxisOf(node.Int("axis", 1), 4) != size_t{1}) {
    return InvalidInput("expected channels of images, axis 1");
  }
  // An operator joins six.
  constexpr std::string_view kLetters = "mnopqr";
  const std::string name = NameOf(node);
  Activation joint = parts[0];
  for (size_t first = 1; first < parts.size();) {
    const size_t last = std::min(parts.size(), first + kLetters.size() - 1);
    std::string rule = "bm!hw";
    std::vector<TensorId> operands = {joint.tensor};
    int64_t channels = joint.own[1].extent;
    for (size_t i = first; i < last; ++i) {
      rule += std::string(",b") + kLetters[i - first + 1] + "!hw";
      operands.push_back(parts[i].tensor);
      channels += parts[i].own[1].extent;
    }
    TESSERA_TRY(joint.own[1],
                Whole(AtomOf(node, "c" + std::to_string(last)), channels, 'c'));
    joint.dims[1] = {joint.own[1]};
    joint.tensor =
        builder_.Add1("concat_channels", Unique(name), std::move(operands),
                      rule + "->bd!hw", {{"channels", Number(channels)}});
    first = last;
  }
  Set(node, ActivationValue(std::move(joint)));
  return {};
}

Result<void> Walk::Dropout(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  if (node.outputs.size() > 1 && uses_[node.outputs[1]] > 0) {
    return InvalidInput("its mask is read");
  }
  double probability = 0.5;
  if (Has(node, 1)) {
    TESSERA_TRY(const OnnxConstant ratio, Constant(node, 1));
    if (ratio.values.size() != 1) return InvalidInput("has no single ratio");
    probability = ratio.values[0];
  }
  bool training = false;
  if (Has(node, 2)) {
    TESSERA_TRY(const OnnxConstant mode, Constant(node, 2));
    training = !mode.values.empty() && mode.values[0] != 0;
  }
  if (training && probability > 0) {
    if (!(probability <= 0.99)) {
      return InvalidInput("drops more than 0.99 of its elements");
    }
    TESSERA_TRY(x, Materialise(std::move(x)));
    const std::string letters = Letters().Of(x.own);
    x.tensor = builder_.Add1(
        "dropout", Unique(NameOf(node)), {x.tensor}, letters + "->" + letters,
        {{"probability", probability}, {"salt", Number(dropouts_++)}});
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Identity(const OnnxNode& node) {
  if (In(node, 0).Is(Value::Kind::kActivation) && node.op == "Cast" &&
      !IsOnnxFloat(static_cast<int>(node.Int("to", kOnnxFloat)))) {
    // Whole numbers of one width or another.
    TESSERA_TRY(const Activation x, Computed(node, 0));
    if (!x.samples.empty()) return InvalidInput("rounds what is computed");
  }
  Set(node, In(node, 0));
  return {};
}

Result<void> Walk::Flat(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const Shape shape = ShapeOf(In(node, 0));
  int64_t axis = node.Int("axis", 1);
  if (axis < 0) axis += std::ssize(shape);
  if (axis < 0 || axis > std::ssize(shape)) {
    return InvalidInput("has no dimension " + std::to_string(axis));
  }
  Shape flat = {1, 1};
  for (size_t d = 0; d < shape.size(); ++d) {
    flat[static_cast<int64_t>(d) < axis ? 0 : 1] *= shape[d];
  }
  TESSERA_TRY(x, Relabelled(std::move(x), flat));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Reshape(const OnnxNode& node) {
  TESSERA_TRY(Shape shape, Ints(node, 1));
  const Shape from = ShapeOf(In(node, 0));
  double all = 1;
  for (int64_t extent : from) all *= Number(extent);
  double known = 1;
  int64_t open = -1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0 && node.Int("allowzero", 0) == 0 && d < from.size()) {
      shape[d] = from[d];
    }
    if (shape[d] == -1 && open < 0) {
      open = static_cast<int64_t>(d);
    } else {
      known *= Number(shape[d]);
    }
  }
  if (open >= 0 && known >= 1) {
    shape[static_cast<size_t>(open)] = static_cast<int64_t>(all / known);
    known *= Number(shape[static_cast<size_t>(open)]);
  }
  const bool negative =
      std::ranges::any_of(shape, [](int64_t extent) { return extent < 0; });
  if (known != all || negative) {
    return InvalidInput("cannot make " + TextOf(shape) + " of " + TextOf(from));
  }
  if (In(node, 0).Is(Value::Kind::kConstant)) {
    TESSERA_TRY(OnnxConstant constant, Constant(node, 0));
    constant.shape = shape;
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Relabelled(std::move(x), shape));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Squeeze(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const bool all = axes.empty();
  std::set<size_t> out;
  for (size_t d = 0; all && d < shape.size(); ++d) {
    if (shape[d] == 1) out.insert(d);
  }
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, shape.size());
    if (!d || shape[*d] != 1) {
      return InvalidInput("cannot leave out dimension " + std::to_string(axis) +
                          " of " + TextOf(shape));
    }
    out.insert(*d);
  }
  Shape to;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (!out.contains(d)) to.push_back(shape[d]);
  }
  if (In(node, 0).Is(Value::Kind::kConstant)) {
    TESSERA_TRY(OnnxConstant constant, Constant(node, 0));
    constant.shape = to;
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Relabelled(std::move(x), to));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Unsqueeze(const OnnxNode& node) {
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const Shape from = ShapeOf(In(node, 0));
  const size_t rank = from.size() + axes.size();
  std::set<size_t> ones;
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, rank);
    if (!d || !ones.insert(*d).second) {
      return InvalidInput("has no dimension " + std::to_string(axis));
    }
  }
  Shape to;
  for (size_t d = 0, next = 0; d < rank; ++d) {
    to.push_back(ones.contains(d) ? 1 : from[next++]);
  }
  if (In(node, 0).Is(Value::Kind::kConstant)) {
    TESSERA_TRY(OnnxConstant constant, Constant(node, 0));
    constant.shape = to;
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Relabelled(std::move(x), to));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Transpose(const OnnxNode& node) {
  Value value = In(node, 0);
  const size_t rank = ShapeOf(value).size();
  std::vector<int64_t> order = node.Ints("perm", {});
  if (order.empty()) {
    order.resize(rank);
    std::iota(order.rbegin(), order.rend(), 0);
  }
  std::vector<size_t> axes;
  for (int64_t axis : order) {
    const auto d = AxisOf(axis, rank);
    if (d && std::ranges::count(axes, *d) == 0) axes.push_back(*d);
  }
  if (axes.size() != rank || order.size() != rank) {
    return InvalidInput("perm is no order of its dimensions");
  }
  if (value.Is(Value::Kind::kConstant)) {
    value.constant = TransposeOnnx(value.constant, axes);
  } else if (value.Is(Value::Kind::kWeight)) {
    std::vector<size_t> reordered;
    for (size_t axis : axes) reordered.push_back(value.order[axis]);
    value.order = std::move(reordered);
  } else {
    TESSERA_TRY(const Activation x, Computed(node, 0));
    for (size_t d = 0; d < rank; ++d) value.x.dims[d] = x.dims[axes[d]];
  }
  Set(node, std::move(value));
  return {};
}

Result<void> Walk::Gather(const OnnxNode& node) {
  const Value& table = In(node, 0);
  const Shape shape = ShapeOf(table);
  TESSERA_TRY(const Activation ids, Computed(node, 1));
  if (!table.Is(Value::Kind::kWeight) || shape.size() != 2 ||
      node.Int("axis", 0) != 0 || ids.own.size() != 2 || ids.dims.size() != 2 ||
      !ids.samples.empty()) {
    return InvalidInput("expected rows of a table of the file, by tokens");
  }
  const std::string name = NameOf(node);
  TESSERA_TRY(const Atom h, Whole(AtomOf(node, "h"), shape[1], 'h'));
  // GPT-2's.
  TESSERA_TRY(const TensorId weight, Weight(table, {0, 1}, shape, 0.02));
  Activation y;
  y.tensor = builder_.Add1("embedding", Unique(name), {ids.tensor, weight});
  y.own = {ids.own[0], ids.own[1], h};
  for (const Atom& atom : y.own) y.dims.push_back({atom});
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<void> Walk::Gelu(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const bool tanh = node.Text("approximate", "none") == "tanh";
  if (x.samples.empty()) {
    x.samples.assign(std::begin(kPoints), std::end(kPoints));
  }
  for (double& sample : x.samples) sample = kFunctions[tanh ? 1 : 2].f(sample);
  x.gathered.push_back(NameOf(node));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Softmax(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const auto axis = AxisOf(node.Int("axis", -1), x.dims.size());
  if (!axis || *axis + 1 != x.dims.size()) {
    return InvalidInput("expected a softmax over the last dimension");
  }
  Value value = ActivationValue(std::move(x));
  value.kind = Value::Kind::kSoftmax;
  Set(node, std::move(value));
  return {};
}

Result<void> Walk::Elementwise(const OnnxNode& node) {
  const bool two = node.inputs.size() == 2;
  const auto samples_of = [](const Activation& x) {
    return x.samples.empty()
               ? std::vector<double>(std::begin(kPoints), std::end(kPoints))
               : x.samples;
  };
  // Of the operands that are scalars, their number.
  std::optional<double> number[2];
  std::optional<Activation> x[2];
  for (size_t i = 0; i < (two ? 2 : 1); ++i) {
    if (In(node, i).Is(Value::Kind::kConstant) ||
        In(node, i).Is(Value::Kind::kWeight)) {
      const auto constant = Constant(node, i);
      if (!constant || constant->values.size() != 1) {
        return InvalidInput("operand " + std::to_string(i) +
                            " is a constant of more than one number");
      }
      number[i] = constant->values[0];
    } else {
      TESSERA_TRY(x[i], Computed(node, i));
    }
  }
  const bool together = x[0] && x[1] && x[0]->tensor == x[1]->tensor &&
                        SameAtoms(Flatten(x[0]->dims), Flatten(x[1]->dims));
  if (two && x[0] && x[1] && !together) return Binary(node);
  Activation y = x[0] ? *x[0] : *x[1];
  const std::vector<double> a = samples_of(y);
  const std::vector<double> b = together ? samples_of(*x[1]) : a;
  y.samples.clear();
  for (size_t i = 0; i < a.size(); ++i) {
    y.samples.push_back(*ApplyOnnx(node.op, number[0].value_or(a[i]),
                                   number[1].value_or(b[i]), true));
  }
  if (together) {
    y.gathered.insert(y.gathered.end(), x[1]->gathered.begin(),
                      x[1]->gathered.end());
  }
  y.gathered.push_back(NameOf(node));
  Set(node, ActivationValue(std::move(y)));
  return {};
}

// Of two tensors.
Result<void> Walk::Binary(const OnnxNode& node) {
  const bool product = node.op == "Mul";
  if (!product && node.op != "Add" && node.op != "Sub") {
    return InvalidInput(
        "of two tensors only sums, differences and products "
        "are computed");
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(Activation y, Computed(node, 1));
  if (node.op == "Sub") {
    if (y.samples.empty()) {
      y.samples.assign(std::begin(kPoints), std::end(kPoints));
    }
    for (double& sample : y.samples) sample = -sample;
    y.gathered.push_back(NameOf(node));
  }
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(y, Materialise(std::move(y)));
  // Where one is taken apart and the other is not, the other will be.
  const auto split_as = [&](Activation& whole, const Activation& parts) {
    for (size_t d = 0; d < whole.dims.size(); ++d) {
      if (whole.dims[d].size() == 1 && parts.dims[d].size() > 1) {
        atoms_.Split(whole.dims[d][0], parts.dims[d][0].extent);
      }
    }
  };
  if (x.dims.size() == y.dims.size()) {
    split_as(x, y);
    split_as(y, x);
  }
  const bool alike = std::ranges::equal(
      x.dims, y.dims,
      [](const Dim& a, const Dim& b) { return ExtentsOf(a) == ExtentsOf(b); });
  if (!alike || !SameAtoms(Flatten(x.dims), x.own) ||
      !SameAtoms(Flatten(y.dims), y.own)) {
    return InvalidInput("expected tensors of one shape, found " +
                        TextOf(ShapeOf(ActivationValue(x))) + " and " +
                        TextOf(ShapeOf(ActivationValue(y))));
  }
  const std::string letters = Letters().Of(x.own);
  x.tensor = builder_.Add1(product ? "multiply" : "add", Unique(NameOf(node)),
                           {x.tensor, y.tensor},
                           letters + "," + letters + "->" + letters);
  Set(node, ActivationValue(std::move(x)));
  return {};
}

std::span<const Walk::Row> Walk::Rows() {
  static constexpr Row kRows[] = {
      {"AveragePool", &Walk::AveragePool},
      {"BatchNormalization", &Walk::BatchNorm},
      {"Cast", &Walk::Identity},
      {"Concat", &Walk::Concat},
      {"Conv", &Walk::Convolution},
      {"Dropout", &Walk::Dropout},
      {"Flatten", &Walk::Flat},
      {"Gather", &Walk::Gather},
      {"Gelu", &Walk::Gelu},
      {"Gemm", &Walk::Gemm},
      {"GlobalAveragePool", &Walk::GlobalAveragePool},
      {"Identity", &Walk::Identity},
      {"LayerNormalization", &Walk::LayerNorm},
      {"LogSoftmax", &Walk::Softmax},
      {"MatMul", &Walk::MatMul},
      {"MaxPool", &Walk::MaxPool},
      {"ReduceMean", &Walk::ReduceMean},
      {"Reshape", &Walk::Reshape},
      {"Softmax", &Walk::Softmax},
      {"Squeeze", &Walk::Squeeze},
      {"Transpose", &Walk::Transpose},
      {"Unsqueeze", &Walk::Unsqueeze},
  };
  return kRows;
}

Result<void> Walk::Declare(const OnnxNode& node) {
  if (node.outputs.empty() || node.outputs[0].empty()) {
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
    double elements = 1;
    for (int64_t extent : ShapeOf(value)) elements *= Number(extent);
    if (elements <= kMostElements) continue;
    value = {};
    return InvalidInput("makes more than 2^50 elements");
  }
  return {};
}

Result<void> Walk::Map(const OnnxNode& node) {
  bool constants = true;
  std::vector<OnnxConstant> operands(node.inputs.size());
  std::vector<const OnnxConstant*> given(node.inputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    const Value& value = In(node, i);
    if (!values_.contains(node.inputs[i])) {
      return InvalidInput("reads '" + node.inputs[i] +
                          "', which nothing in front of it makes");
    }
    if (value.Is(Value::Kind::kUnknown)) return {};  // said where it is made
    constants = constants && value.Is(Value::Kind::kConstant);
  }
  if (node.op == "Constant") {
    const OnnxAttribute* const tensor = node.Find("value");
    OnnxConstant constant;
    if (tensor != nullptr) {
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
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  if (node.op == "Shape" && Has(node, 0)) {
    const Shape shape = ShapeOf(In(node, 0));
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
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  if (constants && !node.inputs.empty()) {
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (Has(node, i)) given[i] = &In(node, i).constant;
    }
    TESSERA_TRY(auto folded, FoldOnnx(node, given));
    if (folded) {
      Set(node, ConstantValue(*std::move(folded)));
      return {};
    }
  }
  for (const Row& row : Rows()) {
    if (row.name == node.op) return (this->*row.handler)(node);
  }
  const bool elementwise = ApplyOnnx(node.op, 1, 1, true).has_value();
  if (elementwise && (node.inputs.size() == 1 || node.inputs.size() == 2)) {
    return Elementwise(node);
  }
  return InvalidInput("no operator of Tessera's is known for it");
}

void Walk::Run() {
  for (const BoundInput& input : sizes_.inputs) {
    Activation x;
    const size_t rank = input.shape.size();
    constexpr std::string_view kImage = "bchw";
    for (size_t d = 0; d < rank; ++d) {
      char letter = kImage[d];
      if (!input.is_float && d == 1) letter = 's';
      const auto atom =
          Whole(input.name + "." + std::to_string(d), input.shape[d], letter);
      if (!atom) {
        problems_.push_back("input '" + input.input->name +
                            "': a reshape takes its dimensions apart");
        return;
      }
      x.own.push_back(*atom);
      x.dims.push_back({*atom});
    }
    Shape shape = input.shape;
    if (input.name == "images") {
      // Features are images of one pixel.
      for (size_t d = rank; d < 4; ++d) {
        const Atom one = {-static_cast<int>(d), 1, kImage[d]};
        x.own.push_back(one);
        if (d > 1) x.dims.back().push_back(one);
        shape.push_back(1);
      }
    }
    x.tensor =
        builder_.Input(Unique(input.name), shape,
                       input.is_float ? options_.dtype.value_or(DType::kFloat32)
                                      : DType::kInt32);
    values_[input.input->name] = ActivationValue(std::move(x));
  }
  for (const OnnxNode& node : model_.nodes) {
    if (done_.contains(&node)) continue;
    auto mapped = Declare(node);
    if (mapped) mapped = Map(node);
    if (mapped) mapped = CheckSizes(node);
    if (!mapped) {
      problems_.push_back("node '" + NameOf(node) + "' (" + node.op +
                          "): " + mapped.error().message);
    }
  }
}

// Blocks end where a single tensor goes on. Each has a dense layer, convolution
// or lookup, and is called by the first of them.
void CutIntoBlocks(Graph& graph) {
  std::vector<size_t> last_read(graph.tensors.size(), 0);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (TensorId id : graph.nodes[i].operands) last_read[id.index()] = i;
  }
  graph.blocks.clear();
  std::set<TensorId> alive;  // computed, and read behind this node
  size_t begin = 0;          // of what may become a block
  bool begun = false;        // whether it is one
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node& node = graph.nodes[i];
    const bool layer =
        node.op->op_class != OpClass::kMemory || node.op->name == "embedding";
    if (layer && !begun) {
      graph.blocks.push_back(node.name);
      begun = true;
      for (size_t j = begin; j < i; ++j) {
        graph.nodes[j].block = static_cast<int>(graph.blocks.size()) - 1;
      }
    }
    node.block = std::max(0, static_cast<int>(graph.blocks.size()) - 1);
    for (TensorId id : node.results) {
      if (last_read[id.index()] > i) alive.insert(id);
    }
    for (TensorId id : node.operands) {
      if (last_read[id.index()] == i) alive.erase(id);
    }
    if (alive.size() == 1) {
      begin = i + 1;
      begun = false;
    }
  }
  if (graph.blocks.empty()) graph.blocks.push_back(graph.nodes[0].name);
}

Result<Graph> Walk::Finish() {
  if (!problems_.empty()) {
    std::string text = std::to_string(problems_.size()) + " of " +
                       std::to_string(model_.nodes.size()) +
                       " nodes cannot be mapped";
    for (size_t i = 0; i < problems_.size(); ++i) {
      text += (i == 0 ? ": " : "; ") + problems_[i];
    }
    return InvalidInput(text, path_);
  }
  std::string output = model_.outputs.empty() ? "" : model_.outputs.back();
  const auto chosen = options_.overrides.find("output");
  if (chosen != options_.overrides.end()) output = chosen->second.text;
  const std::string where = path_ + ": output '" + output + "'";
  const auto found = values_.find(output);
  if (found == values_.end() ||
      std::ranges::count(model_.outputs, output) == 0) {
    std::vector<std::string_view> known(model_.outputs.begin(),
                                        model_.outputs.end());
    return Error{ErrorCode::kNotFound,
                 UnknownName("output", output, known).message, path_};
  }
  const Value& value = found->second;
  if (!value.Is(Value::Kind::kActivation) && !value.Is(Value::Kind::kSoftmax)) {
    return InvalidInput("is not computed from the inputs", where);
  }
  auto logits = Materialise(value.x);
  if (!logits) return logits.error().At(where);
  const Activation& x = *logits;
  const size_t rank = x.own.size();
  if ((rank != 2 && rank != 3) || x.dims.back().size() != 1 ||
      !SameAtoms(Flatten(x.dims), x.own) || x.own[0].letter != 'b' ||
      (rank == 3 && x.own[1].letter != 's')) {
    return InvalidInput("is " + TextOf(ShapeOf(ActivationValue(x))) +
                            ": expected a number for each class, of each "
                            "sample or of each token",
                        where);
  }
  const TensorId labels = builder_.Input(
      "labels", ExtentsOf(std::span(x.own).first(rank - 1)), DType::kInt32);
  const TensorId count =
      builder_.Add1("count_labels", "count", {labels}, rank == 2 ? "b->" : "");
  const TensorId loss =
      builder_.Add1("cross_entropy", "loss", {x.tensor, labels, count},
                    rank == 2 ? "bv,b,->,b" : "");
  auto graph = builder_.Finish(loss);
  if (!graph) return graph.error().At(path_);
  CutIntoBlocks(*graph);
  return graph;
}

}  // namespace

bool IsOnnx(const std::string& path) {
  return path.ends_with(".onnx");
}

std::vector<std::string_view> OnnxOperators() {
  return Names(Walk::Rows());
}

Result<Graph> ImportOnnx(const std::string& path,
                         const ImportOptions& options) {
  TESSERA_TRY(const OnnxModel model, ReadOnnxFile(path));
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
  TESSERA_TRY(const Sizes sizes, BindInputs(model, path, options));
  // Each walk but the last finds dimensions that those before it left whole.
  constexpr int kMostWalks = 100;
  Atoms atoms;
  for (int i = 0; i < kMostWalks; ++i) {
    Walk walk(model, path, sizes, options, atoms);
    walk.Run();
    if (!atoms.Changed()) return walk.Finish();
  }
  return InvalidInput("its reshapes take dimensions apart without end", path);
}

}  // namespace tessera
