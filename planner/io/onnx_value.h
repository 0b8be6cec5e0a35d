#pragma once
// What an ONNX graph's values are while it is read (planner/io/onnx_walk.h): a
// constant, a weight, or a view of a tensor of Tessera's graph.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/io/onnx_file.h"
#include "planner/io/onnx_fold.h"
#include "planner/io/onnx_form.h"
#include "planner/io/onnx_large.h"
#include "planner/io/onnx_slab.h"
#include "planner/ir/graph.h"

namespace tessera::onnx {

// Sums of sizes in bytes stay within int64.
inline constexpr double kMostElements = 0x1p50;

// How rows of tables start (Radford et al. 2018, section 4.1).
inline constexpr double kTableStddev = 0.02;

// The largest number of fp32.
inline constexpr double kMost = std::numeric_limits<float>::max();

// What is added to scores that are masked is below.
inline constexpr double kHidden = -1e4;

// A dimension of a tensor of Tessera's graph. A dimension of the file may be
// several of them, such as (heads, features), or none where its extent is 1.
struct Atom {
  int id = 0;
  int64_t extent = 1;
  char letter = 0;  // in rules, where it is free there
};
using Dim = std::vector<Atom>;

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
  // Whether it is one of those that another one is split into.
  bool IsPart(const Atom& atom) const {
    if (atom.id < 0) return false;
    const std::string& name = names_[static_cast<size_t>(atom.id)];
    return name.ends_with(".outer") || name.ends_with(".inner");
  }
  // Splits an atom into (outer, extent / outer).
  Dim Split(const Atom& atom, int64_t outer) {
    changed_ |= splits_.emplace(atom.id, outer).second;
    const std::string name = names_[static_cast<size_t>(atom.id)];
    return Make(name, atom.extent, atom.letter);
  }
  // The same where this walk takes nothing else apart, behind which it may fit
  // without.
  void SplitIfAlone(const Atom& atom, int64_t outer) {
    if (!alone_) alone_ = std::pair(atom.id, outer);
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
  // That slices divide a weight among them: it then is several.
  void CutWeight(const std::string& name) {
    changed_ |= cut_weights_.insert(name).second;
  }
  bool IsCutWeight(const std::string& name) const {
    return cut_weights_.contains(name);
  }
  // That what reads a weight leaves out extents of 1.
  void ReadWide(const std::string& name) {
    changed_ |= wide_weights_.insert(name).second;
  }
  bool IsReadWide(const std::string& name) const {
    return wide_weights_.contains(name);
  }
  // That the places of images are one dimension where the file makes a sequence
  // of them, since tensors with one for each direction have too many. What is
  // taken apart is found anew.
  void JoinPlaces() {
    if (std::exchange(joins_places_, true)) return;
    splits_.clear();
    changed_ = true;
  }
  bool JoinsPlaces() const { return joins_places_; }
  // Since it was asked the last time, which is behind each walk.
  bool Changed() {
    if (alone_ && !changed_) changed_ = splits_.insert(*alone_).second;
    alone_.reset();
    return std::exchange(changed_, false);
  }

 private:
  std::map<std::string, int> ids_;
  std::vector<std::string> names_;
  std::map<int, int64_t> splits_;
  std::map<int, std::vector<int64_t>> cuts_;
  std::set<std::string> cut_weights_;
  std::set<std::string> wide_weights_;
  std::optional<std::pair<int, int64_t>> alone_;
  bool joins_places_ = false;
  bool changed_ = false;
};

// What elementwise nodes make of a tensor x, node by node.
struct Expression;
struct Term {  // a number, another function of x, or neither: x itself
  std::optional<double> number;
  std::shared_ptr<const Expression> of_x;
};
struct Expression {
  std::string op;  // ONNX's, or one of FormOf's
  std::vector<Term> terms;
  std::string node;          // that it stands for
  std::optional<Form> form;  // where it may be an operator's
  int depth = 1;             // nodes behind one another
};

// A tensor of the graph as the file sees it, and a function that is applied to
// each element: elementwise nodes are gathered until something else reads them,
// so that an operator is recognised however an exporter spells it.
struct Activation {
  TensorId tensor;
  std::vector<Atom> own;                // the tensor's dimensions
  std::vector<Dim> dims;                // the file's
  std::shared_ptr<const Expression> f;  // null: x itself
};

// A gathered function that would be deeper is computed in two parts.
inline constexpr int kMostDepth = 60;

// The function that a node makes of terms.
std::shared_ptr<const Expression> MakeExpression(std::string op,
                                                 std::vector<Term> terms,
                                                 std::string node);

// Which keys a query sees: all, or where `causal` those up to its own place, of
// which `window` is how many, the last ones (0: all).
struct Mask {
  bool causal = false;
  int64_t window = 0;
};

// What both let a query see.
Mask Both(const Mask& a, const Mask& b);

// Attention's scores: the products of queries [b, heads, s, d] and keys [b,
// heads, d, t], as the file has them.
struct Scores {
  Activation q;
  Activation k;
  double scale = 1;
  Mask mask;
};

struct Value {
  enum class Kind {
    kUnknown,     // of a node that could not be mapped
    kConstant,    // its elements are known
    kLarge,       // a constant that is not computed
    kWeight,      // floating-point numbers of the file, with dimensions
    kActivation,  // computed
    kPieces,      // computed, in pieces along dimension `axis`
    kSteps,       // computed: a tensor for each step of the sequence `x`
    kSlab,        // floating-point numbers of the file that were moved
    kScores,      // of attention
    kSoftmax,     // probabilities, of `scores` or of `x`
    kSequence,    // several, by name
  };
  Kind kind = Kind::kUnknown;
  OnnxConstant constant;
  // Of a large one, where its shape, `constant.shape`, is known.
  std::optional<OnnxLarge> large;
  // Of a weight, of a number of the file in a dimension of 1, and of a tensor
  // whose elements are not known.
  const OnnxTensor* source = nullptr;
  std::string weight;  // its name
  // Of some places of a tensor's dimension: that tensor; `source` then has the
  // shape alone.
  const OnnxTensor* whole = nullptr;
  size_t cut_dim = 0;
  int64_t cut_begin = 0;
  int64_t copies = 1;         // of it behind each other in the whole
  std::vector<size_t> order;  // dimensions of `source`, in this order
  Activation x;
  std::vector<Activation> pieces;
  std::optional<Scores> scores;
  std::vector<TensorId> steps;  // (samples, features)
  Slab slab;
  size_t axis = 0;   // of a softmax, and of pieces
  bool log = false;  // a softmax's logarithm
  std::vector<std::string> sequence;

  bool Is(Kind is) const { return kind == is; }
};

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

  // Of a factor that is no atom.
  std::string Fresh() { return std::string(1, Free('u')); }

 private:
  char Of(const Atom& atom) {
    const auto found = letters_.find(atom.id);
    if (found != letters_.end()) return found->second;
    return letters_[atom.id] = Free(atom.letter);
  }
  char Free(char letter) {
    for (const char free : std::string_view("ogdifjkmnpqruvcaz")) {
      if (taken_.find(letter) == std::string::npos) break;
      letter = free;
    }
    taken_ += letter;
    return letter;
  }

  std::string taken_;
  std::map<int, char> letters_;
};

int64_t Extent(const Dim& dim);

Value ConstantValue(OnnxConstant constant);

// A constant that is not computed; without `large` nothing is known of it. One
// that is small after all is.
Value LargeValue(std::optional<OnnxLarge> large = std::nullopt);

Value ActivationValue(Activation x);

// c, where f is c x, and null is x.
std::optional<double> FactorOf(const Expression* f);

// An atom by those that it is split into, where it occurs.
void ReplaceIn(std::vector<Atom>& in, const Atom& atom, const Dim& parts);

// Whether one is the samples.
bool HasSamples(std::span<const Atom> atoms);

Shape ExtentsOf(std::span<const Atom> atoms);

// Without extents of 1.
Dim Wide(const Dim& dim);

// Whether both are of the same sizes; where one is taken apart and the other is
// not, the other will be.
bool Fit(Atoms& atoms, const Dim& a, const Dim& b);

std::vector<Atom> Flatten(std::span<const Dim> dims);

bool SameAtoms(std::span<const Atom> a, std::span<const Atom> b);

std::string TextOf(const Shape& shape);

double Number(int64_t value);
}  // namespace tessera::onnx
