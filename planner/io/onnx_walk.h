#pragma once
// Maps the nodes of an ONNX graph to those of Tessera's (planner/io/onnx.h).
// Not for several threads.

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/importer.h"
#include "planner/io/losses.h"
#include "planner/io/onnx.h"
#include "planner/io/onnx_angles.h"
#include "planner/io/onnx_file.h"
#include "planner/io/onnx_fold.h"
#include "planner/io/onnx_value.h"
#include "planner/ir/graph.h"

namespace tessera::onnx {

struct BoundInput {
  const OnnxInput* input = nullptr;
  std::string name;  // in Tessera's graph
  Shape shape;
  bool is_float = false;
  bool all_ones = false;  // a mask of padding, of which there is none
};

struct BoundSizes {
  int64_t batch = 0;
  int64_t seq_len = 1;
  std::vector<BoundInput> inputs;
};

// A window's places in one direction, as ONNX's MaxPool defines them.
struct WindowPlaces {
  int64_t count = 1;
  int64_t pad = 0;     // in front
  int64_t behind = 0;  // padding, too
  int64_t stride = 1;
  int64_t window = 1;
  int64_t dilation = 1;
};

// Of a weight's first dimension, where it is one of several pieces.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;  // 0: all
};

// Places of a short sequence.
inline constexpr int64_t kFewPlaces = 8;

// A mask that is added to scores, or by whose zeros these are selected.
enum class MaskForm { kAdded, kSeen, kUnseen };

// What is read in a walk over a small batch: masks and states are as large as
// the batch, and those of a large one are not computed.
struct Found {
  int64_t places = 0;                     // of a sequence, where it was read
  std::map<const OnnxNode*, Mask> masks;  // by the nodes that apply them
  // Those that are computed row by row, once for all layers that have them.
  struct LargeMask {
    OnnxLarge mask;
    MaskForm form = MaskForm::kAdded;
    Result<Mask> read;
  };
  std::vector<LargeMask> large_masks;
  // Initial states of recurrent layers that are zero: operands.
  std::set<std::pair<const OnnxNode*, size_t>> zeros;
  std::map<const OnnxNode*, Angles>
      angles;  // by a rotary embedding's last node
};

// The key that says in how many groups of a microbatch's samples a batch norm
// is (planner/ops/batch_norm.cc).
inline constexpr char kBatchNormGroups[] = "batch_norm_groups";
// The key that names tensors of the file which are constants, in patterns of
// the shell, separated by commas or as a list.
inline constexpr char kFrozen[] = "frozen";
// kNotFound where one is of no tensor.
Result<std::vector<std::string>> FrozenPatterns(const OnnxModel& model,
                                                const ImportOptions& options,
                                                const std::string& path);
// What an override says in words: a string without its quotes.
std::string WordsOf(const JsonValue& value);

// One walk over the nodes, in their order: Run once, and then one of Finish and
// FinishComputation once, unless the walk has taken an atom apart: its graph is
// of no use then, and another walk with the same atoms follows
// (Atoms::Changed). What it is made of must live as long as it does.
class Walk {
 public:
  // `outputs`: what is wanted; nodes that it does not need are left out.
  // `frozen`: patterns of names. `found`: by another walk; this one's is added.
  Walk(const OnnxModel& model, const std::string& path, const BoundSizes& sizes,
       const ImportOptions& options, std::span<const std::string> outputs,
       std::span<const std::string> frozen, Atoms& atoms, Found& found);

  // Nodes behind others that cannot be mapped are looked at, too: tensors of
  // the same shapes stand for what these make. Such a walk is of no use but for
  // its problems, and takes dimensions apart that another one would not.
  void LookBehindProblems() { stands_in_ = true; }
  void Run();
  bool HasProblems() const { return !problems_.empty(); }
  // Whether it went through all nodes.
  bool IsWhole() const { return whole_; }
  // The graph with the loss of the output that is wanted, and into the options
  // its layout and warnings; an error that names all problems where there are
  // some. REQUIRES: Run.
  Result<Graph> Finish();
  // The same with the sum of all outputs, without warnings.
  Result<OnnxComputation> FinishComputation();

  using Handler = Result<void> (Walk::*)(const OnnxNode&);
  struct Row {
    std::string_view name;
    std::string_view summary;  // what becomes of it
    Handler handler;
  };
  static std::span<const Row> Rows();

 private:
  // All nodes that could not be mapped, if any.
  Result<void> Problems() const;

  // Nodes that the outputs are made of.
  void FindNeeded();
  // Losses of an output, which `where` names.
  Result<TensorId> CrossEntropy(const Activation& x, const std::string& where);
  Result<TensorId> ElementLoss(const LossRow& row, const Activation& x,
                               const std::string& where);

  // ---- values
  const Value& In(const OnnxNode& node, size_t i) const;
  bool Has(const OnnxNode& node, size_t i) const;
  void Set(const OnnxNode& node, Value value, size_t i = 0);
  // Operand `i`; errors where it is of another kind.
  Result<OnnxConstant> Constant(const OnnxNode& node, size_t i) const;
  Result<std::vector<int64_t>> Ints(const OnnxNode& node, size_t i) const;
  // ONNX's type of operand `i`; of what is computed a floating-point one stands
  // for all. Nothing where it is of whole numbers or bools that are not told
  // apart here.
  std::optional<int64_t> TypeOf(const OnnxNode& node, size_t i) const;
  Result<Activation> Computed(const OnnxNode& node, size_t i);
  static Shape ShapeOf(const Value& value);
  // Of a Transpose of `rank` dimensions, by their places in its operand.
  static Result<std::vector<size_t>> OrderOf(const OnnxNode& node, size_t rank);

  // ---- nodes of Tessera's graph
  std::string Unique(const std::string& name);
  static std::string NameOf(const OnnxNode& node);
  // Of a dimension that a node makes.
  static std::string AtomOf(const OnnxNode& node, std::string_view which);
  // One atom, which no reshape may take apart.
  Result<Atom> Whole(const std::string& name, int64_t extent, char letter);
  // Applies what is gathered, so that the tensor is the value itself.
  Result<Activation> Materialise(Activation x);
  // Operand `i`, computed in part where it is too deep for another function.
  Result<Activation> ForAnother(const OnnxNode& node, size_t i);
  // f of a tensor whose dimensions have these letters.
  Result<TensorId> Apply(TensorId x, const std::string& letters,
                         const std::shared_ptr<const Expression>& f);
  // A single number of the file, which is a constant to most nodes, as a weight
  // of one element; other values as they are.
  static Value AsWeight(const Value& value);
  // A weight as a tensor that is computed, without its extents of 1.
  Result<Activation> Trained(const Value& value);
  // Operand `i`, whose numbers are known, as a tensor that is not trained,
  // without its extents of 1.
  Result<Activation> Known(const OnnxNode& node, size_t i);
  // With its tensor's dimensions in the order of the file's.
  Result<Activation> Contiguous(const OnnxNode& node, Activation x);
  // The same of x's last dimension and of all others that no Expand repeats.
  Result<Activation> EndingInLast(const OnnxNode& node, Activation x);
  // With dimension d one atom of its tensor, which is what reads it may ask
  // for: atoms of several are joined, a dimension of 1 is made.
  Result<Activation> Joined(const OnnxNode& node, Activation x, size_t d);
  // The same, of several atoms or none, with an atom that has no id: what reads
  // it gives it one, or takes it apart (WithDim).
  Result<Activation> Merged(const OnnxNode& node, Activation x, size_t d);
  // y, in whose tensor dimension `at` has `extent` places that are called
  // `name`, as dimension d: one atom, or up to three that it is taken apart
  // into behind y, by a node of their own.
  Result<Activation> WithDim(const OnnxNode& node, Activation y, size_t d,
                             size_t at, const std::string& name, int64_t extent,
                             char letter);
  // Without an atom of 1.
  Activation WithoutOne(const OnnxNode& node, Activation x, const Atom& one);
  // With its tensor's dimensions in the order `wanted`: all but some of extent
  // 1.
  Activation Reordered(const OnnxNode& node, Activation x,
                       std::span<const Atom> wanted);
  // Whether x's tensor has all of x's dimensions that no Expand repeats, these
  // last.
  static bool EndsIn(const Activation& x, std::span<const Atom> features);
  // The weight `value`, its dimensions in the order `order` and of the shape
  // `shape`, which may take them apart.
  Result<TensorId> Weight(const Value& value, std::vector<size_t> order,
                          const Shape& shape, double stddev,
                          double constant = 0, RowRange rows = {});
  // Where several nodes read a matrix, some of them features of which a
  // dimension of 1 is left, such as of an image, all read it without.
  void ReadAlike(const std::string& weight, const Shape& shape);
  // A layer's bias. Where nodes share the layer's matrix they share it, too.
  Result<TensorId> BiasOf(const Value& bias, const Value& matrix,
                          const Shape& shape, RowRange rows = {});
  // y = x w + bias over the last dimension of x. `transposed`: w is (in, out).
  Result<void> Dense(const OnnxNode& node, Activation x, const Value& w,
                     bool transposed, const Value* bias, const std::string& to);
  // Whether operand 0 is one number for all features of all samples, such as
  // the zeros that a loop over cells begins with.
  bool IsFirstState(const OnnxNode& node) const;
  // It as one row, which a layer reads as it reads the states behind it.
  Result<Activation> FirstState(const OnnxNode& node);
  // What adds a bias to a product and alone reads it, or null.
  const OnnxNode* BiasBehind(const OnnxNode& node, int64_t features);
  // Images or signals; where `features` is true, features alone too.
  Result<Activation> Image(const OnnxNode& node, size_t i,
                           bool features = false);
  // Of a node, in each direction; the last one is the width. Counts are 0.
  static Result<std::vector<WindowPlaces>> WindowOf(const OnnxNode& node,
                                                    const Shape& window);
  // The same with the places in images like x.
  static Result<std::vector<WindowPlaces>> PlacesIn(const OnnxNode& node,
                                                    const Activation& x,
                                                    const Shape& window);
  // Images that a node makes of x, of these channels and extents behind them.
  Result<Activation> Made(const OnnxNode& node, TensorId tensor,
                          const Activation& x, const Dim& channels,
                          const Shape& extents);
  // Channels of what a node makes of x; where it has groups, x becomes one in
  // these. A rule has not more than three letters of channels on both sides:
  // else the channels are one, and where what reads them takes them apart in
  // other groups, in the node's; Made makes of these what they are.
  Result<Dim> ChannelsFor(const OnnxNode& node, Activation& x, int64_t channels,
                          int64_t groups);
  Result<void> Pool(const OnnxNode& node, std::string_view op,
                    std::vector<Attribute> more);
  Result<Activation> Relabelled(Activation x, const Shape& shape);
  // The node's result: its first operand in another shape.
  Result<void> SetReshaped(const OnnxNode& node, const Shape& to);
  Result<void> Binary(const OnnxNode& node, Activation x, Activation y);
  // Scores by a number; false where these are not the two operands.
  Result<bool> ScaledScores(const OnnxNode& node);
  // A mask added to scores, or to scores that have had something added:
  // computed by the file, too large for that, or kept beside its weights. False
  // where what is added is no mask.
  Result<bool> MaskedScores(const OnnxNode& node);
  // Whether operand `i` is a weight that is added to a sequence, a row to each
  // place.
  bool HasRowForEachPlace(const OnnxNode& node, size_t i) const;
  // An operand of a node element by element: the number that all its elements
  // are, where the other one's shape holds them all, or a tensor.
  struct NumberOrTensor {
    std::optional<double> number;
    std::optional<Activation> tensor;
  };
  Result<NumberOrTensor> ElementOperand(const OnnxNode& node, size_t i);
  // Where operand `i` is one number, of as many samples as there are, and the
  // other one, such as a bias, is the same for all: the result is, too. False
  // where they are others.
  Result<bool> WithNumberOfEachSample(const OnnxNode& node, size_t i);
  // Of three tensors, or tensors and numbers, by the first one.
  Result<void> Choose(const OnnxNode& node);
  // Whether a tensor of shape `from` is broadcast to the shape of `to` alone.
  static bool Broadcasts(const Shape& from, const Value& to);
  // Puts the dimensions of x and y but the last `dims` beside each other, with
  // empty ones in front, and appends those of both to `result`.
  Result<void> Align(const OnnxNode& node, size_t dims, Activation& x,
                     Activation& y, std::vector<Dim>& result);
  // The letters of x's tensor where x has the dimensions `as`.
  static std::string RuleOf(const Activation& x, std::span<const Dim> as,
                            Letters& letters);
  // That a dimension which a tensor has twice is none of samples.
  Result<void> CheckNotSamples(const Atom& atom) const;
  // That a node of these tensors can be.
  Result<void> CheckRule(std::span<const Atom> result,
                         std::span<const Activation* const> operands);
  Result<void> CheckRule(std::span<const Atom> result,
                         std::initializer_list<const Activation*> operands) {
    return CheckRule(result, std::span<const Activation* const>(
                                 operands.begin(), operands.size()));
  }
  // The matrix product of the last two dimensions.
  Result<Activation> ProductOf(const OnnxNode& node, Activation x,
                               Activation y);
  // Scores that are not attention's.
  Result<Activation> ScoresOf(const OnnxNode& node, const Scores& scores);
  // Scores, in whose last two dimensions places see others, with `number` (or a
  // very negative one that all types have) for those of later places.
  Result<Activation> Hidden(const OnnxNode& node, Activation scores,
                            const Mask& mask, double number = -HUGE_VAL);
  Result<Activation> SoftmaxOf(const OnnxNode& node, Activation x, size_t axis,
                               bool log);
  // Every `step`-th of dimension d's places.
  Result<Activation> SliceOf(const OnnxNode& node, Activation x, size_t d,
                             int64_t start, int64_t step, int64_t places,
                             const std::string& what);
  // Places of dimension d, `step` apart: of all the nearest one below, or
  // where `linear` is true between both neighbours.
  Result<Activation> Resampled(const OnnxNode& node, Activation x, size_t d,
                               int64_t places, double start, double step,
                               bool linear);
  // `op` makes `places` places of dimension d.
  Result<Activation> Placed(const OnnxNode& node, Activation x, size_t d,
                            int64_t places, std::string_view op,
                            std::vector<Attribute> attributes,
                            const std::string& what);
  // Tensors that are joined along dimension `axis`, with what one of them has
  // for each sample, or each place of another dimension, and others for all:
  // these become sums with zeros that are made of that one.
  Result<std::vector<Activation>> EachWhole(const OnnxNode& node,
                                            std::vector<Activation> parts,
                                            size_t axis);
  // REQUIRES: there are some, of which the first has dimension `axis`.
  Result<Activation> JoinedTensors(const OnnxNode& node,
                                   std::vector<Activation> parts, size_t axis);
  // Places of `value` in front of dimension d's and behind them.
  Result<Activation> Padded(const OnnxNode& node, Activation x, size_t d,
                            int64_t before, int64_t behind, double value);
  // ---- ids
  // Operand `i`, which has ids.
  Result<Activation> Ids(const OnnxNode& node, size_t i);
  // The atom of dimension d, in which elements are chosen.
  Result<Atom> Picked(const Activation& x, size_t d);
  // The best elements of operand 0 in dimension `axis`, and their ids.
  Result<std::array<Activation, 2>> Best(const OnnxNode& node, size_t axis,
                                         int64_t count, bool largest,
                                         bool last);
  // 1 where ids are `first`, `first` + 1, ... in `places` places of dimension
  // d, in which there is one id, else 0.
  Result<Activation> Marks(const OnnxNode& node, Activation ids, size_t d,
                           int64_t first, int64_t places);
  // Marks of ids that are compared with numbers; false where others are.
  Result<bool> EqualToConstant(const OnnxNode& node);
  Result<Activation> GatherOf(const OnnxNode& node, Activation x, size_t axis,
                              Activation ids);
  // That they are of the same sizes in all dimensions but `axis`.
  Result<void> SameBut(const Activation& x, const Activation& y, size_t axis);
  // The number that all elements of a constant are, were it not computed.
  std::optional<double> UniformIn(const OnnxNode& node, size_t i) const;

  // ---- nodes that stand for several
  // The name of a tensor that a part of a node makes.
  std::string Named(const OnnxNode& node, Activation x);
  // The name of a number, and of a list of whole ones.
  std::string NumberOf(const OnnxNode& node, double value);
  std::string IntsOf(const OnnxNode& node, const Shape& values);
  // (x - mean) / sqrt(variance + epsilon) over dimensions; `mean` and
  // `deviation` become names of the mean and of the quotient's divisor.
  Result<std::string> Standardised(const OnnxNode& node, const std::string& x,
                                   const Shape& axes, double epsilon,
                                   std::string& mean, std::string& deviation);
  // Maps a part of a node and gives the name of its result.
  Result<std::string> Part(const OnnxNode& node, std::string op,
                           std::vector<std::string> inputs,
                           std::vector<OnnxAttribute> attributes = {});
  // The node's result is a part's.
  void Rename(const OnnxNode& node, const std::string& part);
  // An input of whole numbers for each place of a sample that the data has and
  // the file need not.
  TensorId Extra(const std::string& name, int64_t places);
  // Of an encoder, or null.
  const BoundInput* Source() const;
  // What attention's mask reads of `places`; invalid where the data has no such
  // input.
  TensorId PositionsOf(const Atom& places, bool causal);
  // The dimensions of samples and of places in a sequence.
  Atom SampleAtom();
  Atom PlaceAtom();
  // Rows of a table, looked up by such an input: `table` in the order `order`
  // and of the shape `rows`.
  Result<Activation> Lookup(const std::string& name, const Value& table,
                            std::vector<size_t> order, const Shape& rows,
                            const std::string& input);
  // Whether the rows that a Gather reads are of places: ids for each place of a
  // sequence.
  bool IsOfPlaces(const OnnxNode& node);
  // Operand `i` of a Where, which takes all of it, in the shape of all
  // operands.
  Result<void> Chosen(const OnnxNode& node, size_t i);
  // Which keys are seen by a mask.
  Result<Mask> MaskOf(const OnnxNode& node, size_t operand, MaskForm form);
  // Of one whose elements are computed row by row.
  Result<Mask> MaskOfLarge(const OnnxLarge& mask, MaskForm form);
  // That a mask which is not computed is as in a short sequence.
  Result<void> CheckNoWindow(const std::string& mask) const;
  // `number` in place of elements of operand `operand` that the operand `mask`
  // hides, which is of 0 and 1; false where they are no such.
  Result<bool> Masked(const OnnxNode& node, size_t operand, size_t mask,
                      MaskForm form, double number);
  // The only node besides Shape that reads a value, if it is of `op`.
  const OnnxNode* OnlyReader(const std::string& value, std::string_view op);
  // Of a Slice of places of one dimension behind each other; nothing of others.
  struct SlicePlaces {
    size_t dim = 0;
    RowRange range;
  };
  std::optional<SlicePlaces> PlacesOf(const OnnxNode& node, const Shape& shape);
  // Sorts ranges, and whether there are several that divide all places among
  // them.
  static bool Divide(std::vector<RowRange>& ranges, int64_t extent);
  // A piece of a weight that nodes cut into pieces, each then a weight of its
  // own; false where they do not.
  Result<bool> CutWeight(const OnnxNode& node);
  Value PieceOfWeight(const Value& weight, size_t dim, RowRange range);
  // Of its results.
  Result<std::vector<int64_t>> SizesOfSplit(const OnnxNode& node,
                                            const Shape& shape) const;
  // Whether x is all that a dense layer makes, and nothing was computed of it.
  bool IsLayer(const Activation& x) const;
  // A slice of the features of a dense layer that is cut at its ends; false
  // where it is another one, or the layer is whole in this walk.
  Result<bool> SlicePiece(const OnnxNode& node);
  // Whether a value is one token, of each sample or of all, that nothing reads
  // but `joint`.
  bool IsClassToken(const std::string& name, int64_t features,
                    const OnnxNode& joint);
  void FindPatches();
  Result<void> JoinPatches(const OnnxNode& node);
  // Of two tensors that are computed: attention's.
  Result<void> Product(const OnnxNode& node);
  bool IsSoftened(const OnnxNode& node);
  // Attention whose products are equations; false where this is none.
  Result<bool> EinsumOfAttention(const OnnxNode& node,
                                 std::span<const std::string> labels);
  Result<void> Attention(const OnnxNode& node, Scores scores, Activation v);
  Result<void> MeanOfImage(const OnnxNode& node);

  // ---- rotary embeddings
  // x cos + turned sin, where `turned` has the halves of x's features in the
  // other order and the first of them negated.
  struct Rotary {
    std::string x;
    std::string cos;
    std::string sin;
    const OnnxNode* low = nullptr;  // slices of x
    const OnnxNode* high = nullptr;
    const OnnxNode* split = nullptr;  // or both in one
  };
  void FindRotary();
  // Tensors of the file that are no weights: tables of angles, and what only
  // says which keys are seen, or is a constant.
  void FindNumbers();
  // Transposes of parameters, which exporters compute, become these.
  void TieTransposes();
  // Tensors that are one row for each sample, all of them equal.
  void FindRows();
  // Whether all nodes that read a value, wherever its elements are moved, are
  // such.
  bool AreRead(const std::string& value,
               const std::function<bool(const OnnxNode&)>& by) const;
  // Whether the user says that a tensor of the file is a constant.
  bool IsFrozen(const std::string& name) const;
  // Whether a tensor of one number is trained.
  bool IsTrainedNumber(const OnnxTensor& tensor) const;
  // That `node` reads a trained tensor of the file as it reads what is
  // computed.
  void NoteTrained(const OnnxNode& node, const Value& value);
  void WarnOfTrained() const;
  std::optional<Rotary> RotaryOf(const OnnxNode& cos_side,
                                 const OnnxNode& sin_side);
  Result<void> Rotate(const OnnxNode& node, const Rotary& rotary);
  // The node that makes a value, if it is of `op`.
  const OnnxNode* Producer(const std::string& value, std::string_view op) const;
  // That atoms of dimension d are the tensor's, not repeated by an Expand.
  static Result<void> CheckOwn(const Activation& x, size_t d);
  // Numbers of the file that only other numbers meet, such as frequencies: no
  // weights.
  Result<bool> FoldNumbers(const OnnxNode& node);

  // ---- recurrent layers
  // What a node asks for, and its sizes.
  struct LayerCall {
    std::string name;
    bool batch_first = false;
    bool reverse = false;  // its one direction
    bool apart = false;    // a layer for each gate, not one for all
    bool sampled = false;  // of samples, not of tensors of the file alone
    int64_t directions = 1;
    int64_t samples = 0;
    int64_t inputs = 0;
    int64_t hidden = 0;
  };
  // Of one direction, for all gates together or for each.
  struct LayerWeights {
    std::vector<TensorId> of_inputs;
    std::vector<TensorId> of_states;
    std::vector<TensorId> biases;
    TensorId candidate_bias;  // of gru_gates
    bool sampled = true;
  };
  // Between steps; invalid: zeros.
  struct CellState {
    TensorId hidden;
    TensorId cell;  // of an LSTM
  };
  // Nodes that make weights of recurrent layers of tensors of the file.
  void FindSlabs();
  Result<Slab> SlabIn(const OnnxNode& node, size_t i) const;
  Result<void> PartOfSlab(const OnnxNode& node);
  TensorId LayerWeight(std::vector<PublishedPiece> pieces,
                       const std::string& suffix, const Shape& shape,
                       double stddev);
  TensorId Stacked(const std::string& name, bool sampled,
                   const std::vector<TensorId>& steps);
  // Without dimensions of extent 1 of its tensor beside those of x.
  Result<Activation> WithoutOnes(const OnnxNode& node, Activation x);
  // The steps of operand 0, of which x becomes the whole, (samples, steps,
  // features).
  Result<std::vector<TensorId>> StepsOf(const OnnxNode& node, size_t samples,
                                        size_t steps, Activation& x);
  // Of one direction; invalid: zeros.
  Result<TensorId> InitialState(const OnnxNode& node, size_t operand,
                                const LayerCall& call, int64_t direction);
  // That the node asks for nothing else than the operators compute.
  Result<void> CheckCell(const OnnxNode& node) const;
  // Of operand 0, whose steps x and `inputs` become as by StepsOf.
  Result<LayerCall> LayerCallOf(const OnnxNode& node, Activation& x,
                                std::vector<TensorId>& inputs);
  Result<LayerWeights> WeightsOf(const OnnxNode& node, const LayerCall& call,
                                 int64_t direction);
  // `keeps`: the cell of an LSTM is read.
  CellState Step(const OnnxNode& node, const std::string& prefix,
                 const LayerWeights& weights, TensorId x, CellState state,
                 bool keeps);
  CellState StepApart(const OnnxNode& node, int64_t direction,
                      const std::string& prefix, const LayerWeights& weights,
                      TensorId x, CellState state);
  // One direction: the states of all steps, by their places, and in `last` that
  // behind the last one.
  Result<std::vector<TensorId>> StatesOf(const OnnxNode& node,
                                         const LayerCall& call,
                                         int64_t direction,
                                         std::span<const TensorId> inputs,
                                         CellState& last);
  // Whether something reads a node's result.
  bool IsRead(const OnnxNode& node, size_t result) const;
  // States, which lack the dimension that they are joined along, as one tensor.
  Result<Activation> JoinedStates(const OnnxNode& node, const Value& value);
  // States that lack dimension `axis` beside each other along it; false where
  // an operand is something else.
  Result<bool> JoinStates(const OnnxNode& node);
  // Some of them; false where others are asked for.
  Result<bool> CutStates(const OnnxNode& node);
  // Of the shape `to`, the features of both directions beside each other; false
  // where that is not what the shapes say.
  Result<bool> JoinDirections(const OnnxNode& node, const Shape& to);

  // ---- behind nodes that could not be mapped
  // Maps a node, or says why it is not. One that reads what such nodes make is
  // named where it could not be mapped whatever these make.
  void MapOrName(const OnnxNode& node);
  // Whether it is mapped where its operands are only of these shapes.
  bool MapWithStandIns(const OnnxNode& node,
                       std::span<const std::string> operands);
  // A tensor of this shape, which stands for what could not be mapped; unknown
  // where there can be none.
  Value StandIn(const std::string& name, const Shape& shape);
  // The shape of a node's result, as the file or its operands say.
  std::optional<Shape> ShapeOfResult(const OnnxNode& node, size_t i);

  // ---- nodes of the file
  // Its results, still unknown.
  Result<void> Declare(const OnnxNode& node);
  Result<void> Map(const OnnxNode& node);
  struct OperandKinds {
    bool constants = true;  // all of them
    bool known = true;      // the same, were they computed
    bool large = false;     // one of them
    // One is behind a node that could not be mapped; the rest was not read.
    bool behind_problem = false;
  };
  // Errors say which operand is none.
  Result<OperandKinds> KindsOfOperands(const OnnxNode& node) const;
  bool MovesLarge(const OnnxNode& node) const;
  Value FoldedLarge(const OnnxNode& node) const;
  // Of operands that are all constants; false where the node is computed all
  // the same.
  Result<bool> FoldConstants(const OnnxNode& node);
  // That no result is too large.
  Result<void> CheckSizes(const OnnxNode& node);
  Result<void> ArgMax(const OnnxNode& node);
  Result<void> AveragePool(const OnnxNode& node);
  Result<void> CastLike(const OnnxNode& node);
  Result<void> Clip(const OnnxNode& node);
  Result<void> Function1(const OnnxNode& node);
  Result<void> GeneralGemm(const OnnxNode& node);
  Result<void> GeneralNorm(const OnnxNode& node);
  Result<void> GlobalMaxPool(const OnnxNode& node);
  // A reduction over all places of each channel.
  Result<void> ReducedPlaces(const OnnxNode& node,
                             const std::string& reduction);
  Result<void> GroupNorm(const OnnxNode& node);
  Result<void> LpNorm(const OnnxNode& node);
  Result<void> Pad(const OnnxNode& node);
  Result<void> Parametric(const OnnxNode& node);
  Result<void> PRelu(const OnnxNode& node);
  Result<void> Reduce(const OnnxNode& node);
  Result<void> ReduceLogSumExp(const OnnxNode& node);
  Result<void> ReduceMore(const OnnxNode& node);
  Result<void> Resize(const OnnxNode& node);
  Result<void> Slice(const OnnxNode& node);
  Result<void> Variadic(const OnnxNode& node);
  Result<void> BatchNorm(const OnnxNode& node);
  Result<void> Concat(const OnnxNode& node);
  Result<void> Convolution(const OnnxNode& node);
  Result<void> TransposedConvolution(const OnnxNode& node);
  Result<void> Depth(const OnnxNode& node);
  Result<void> Dropout(const OnnxNode& node);
  Result<void> Einsum(const OnnxNode& node);
  Result<void> Elementwise(const OnnxNode& node);
  Result<void> Flat(const OnnxNode& node);
  Result<void> Gather(const OnnxNode& node);
  Result<void> GatherElements(const OnnxNode& node);
  Result<void> GatherND(const OnnxNode& node);
  Result<void> Gelu(const OnnxNode& node);
  Result<void> Gemm(const OnnxNode& node);
  Result<void> GlobalAveragePool(const OnnxNode& node);
  Result<void> Identity(const OnnxNode& node);
  Result<void> Hardmax(const OnnxNode& node);
  Result<void> LayerNorm(const OnnxNode& node);
  Result<void> MatMul(const OnnxNode& node);
  Result<void> MaxPool(const OnnxNode& node);
  Result<void> OneHot(const OnnxNode& node);
  Result<void> Recurrent(const OnnxNode& node);
  Result<void> Reshape(const OnnxNode& node);
  Result<void> Expand(const OnnxNode& node);
  Result<void> Tile(const OnnxNode& node);
  Result<void> IsNaN(const OnnxNode& node);
  Result<void> ScatterElements(const OnnxNode& node);
  Result<void> Select(const OnnxNode& node);
  Result<void> SequenceAt(const OnnxNode& node);
  Result<void> Softmax(const OnnxNode& node);
  Result<void> Split(const OnnxNode& node);
  Result<void> SplitToSequence(const OnnxNode& node);
  Result<void> TopK(const OnnxNode& node);
  Result<void> Where(const OnnxNode& node);
  Result<void> Squeeze(const OnnxNode& node);
  Result<void> Transpose(const OnnxNode& node);
  Result<void> Unsqueeze(const OnnxNode& node);

  struct Patches {
    const OnnxNode* conv = nullptr;
    const OnnxNode* flat = nullptr;
    const OnnxNode* turned = nullptr;
    const OnnxNode* joined = nullptr;  // with the class token
    int64_t side = 0;                  // as many in a row
  };
  struct MadeWeight {
    TensorId tensor;
    std::vector<size_t> order;
    Shape shape;
  };

  const OnnxModel& model_;
  const std::string& path_;
  const ImportOptions& options_;
  const BoundSizes& sizes_;
  Atoms& atoms_;
  Found& found_;
  GraphBuilder builder_;
  TensorId labels_;
  std::map<const OnnxInput*, TensorId> inputs_;  // but images in patches
  std::map<std::string, Value, std::less<>> values_;
  std::vector<std::string> outputs_;
  std::set<const OnnxNode*> needed_;
  std::map<std::string_view, const OnnxNode*> producers_;
  std::map<const OnnxNode*, Rotary> rotary_;  // by their last nodes
  std::map<std::string_view, int> types_;  // of the file's tensors and inputs
  std::map<std::string, int> uses_;  // how many nodes and outputs read a value
  std::map<std::string, std::vector<const OnnxNode*>> readers_;
  std::set<const OnnxNode*> done_;  // by a node in front of them
  std::set<std::string> names_;
  std::map<std::string, size_t> repeats_;  // of a name, so far
  std::set<TensorId> ids_;                 // tensors of whole numbers
  std::set<TensorId> marks_;  // of the graph's type, but of 0 and 1
  std::map<std::string, MadeWeight> weights_;
  // Transposes, by the matrix that they become.
  std::map<std::string, std::vector<const OnnxTensor*>> tied_;
  std::map<std::string, std::vector<const OnnxTensor*>> copies_;  // of tensors
  // By the layer's matrix and the bias.
  std::map<std::pair<std::string, std::string>, TensorId> biases_;
  PublishedLayout layout_;
  std::map<std::pair<TensorId, std::shared_ptr<const Expression>>, TensorId>
      materialised_;
  std::map<std::string, Activation> trained_;
  std::map<std::string, Activation> known_;
  std::vector<std::string> frozen_;         // patterns of names
  std::set<std::string> buffers_;           // trained all the same
  std::set<std::string> doubtful_weights_;  // that may be buffers
  std::set<std::string> repeated_;          // vectors that are trained apart
  std::set<std::string> averages_;          // vectors that are each norm's own
  int parts_deep_ = 0;  // nodes that the one which is mapped stands for
  std::set<const OnnxNode*> of_slabs_;
  std::map<std::string, TensorId> layer_weights_;
  std::set<std::string> runs_of_steps_;                // blocks
  std::map<std::vector<TensorId>, TensorId> stacked_;  // by the steps
  std::map<TensorId, std::vector<TensorId>> unstacked_;
  // The features that a matrix's first node makes, by the matrix and which of
  // its dimensions they are.
  std::map<std::pair<std::string, size_t>, Dim> made_by_;
  // Atoms that are all features of a dense layer, and what that makes.
  std::map<int, TensorId> whole_layers_;
  std::vector<const OnnxNode*> rows_;  // Expands, in place of FindRows' tensors
  // By tensor, the atoms of all dimensions, and which of these is one.
  std::map<std::tuple<TensorId, std::vector<std::vector<int>>, size_t>,
           Activation>
      joined_;
  std::map<std::string, std::vector<RowRange>> slices_;  // of a value, so far
  std::map<std::string, size_t> slice_dims_;
  std::deque<OnnxTensor> cut_tensors_;
  std::set<const OnnxNode*> turns_;  // rotary products with cosines and sines
  std::deque<OnnxNode> parts_;
  int next_part_ = 0;
  std::vector<std::string> problems_;
  std::set<std::string, std::less<>> doubtful_;  // values behind such nodes
  int behind_problems_ = 0;  // nodes that were not looked at
  bool stands_in_ = false;
  bool whole_ = false;
  std::map<std::string, TensorId> extras_;
  int64_t seq_len_ = 1;  // places of a sample
  std::optional<Patches> patches_;
  int dropouts_ = 0;
};

}  // namespace tessera::onnx
