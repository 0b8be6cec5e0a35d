#pragma once
// The parts that recurrent networks share, on top of GraphBuilder: lookups,
// layers unrolled over the steps of a sequence, the loss. Not for several
// threads.
//
// A layer's weights are called as in PyTorch's modules, NAME.weight_ih_l0
// [gates, hidden, inputs] and NAME.weight_hh_l0 [gates, hidden, hidden], but
// there is one bias, NAME.bias_l0, where PyTorch adds two; a GRU has besides
// NAME.bias_hn_l0, the bias of the candidate's product with the state. All
// steps share them.
//
// Blocks. A layer is a row of blocks of some steps each, layer after layer, so
// that stages of a pipeline are runs of layers or of a layer's steps: while one
// device runs the last steps of a layer, another has begun the next layer.

#include <string>
#include <string_view>
#include <vector>

#include "planner/io/importer.h"
#include "planner/io/model_config.h"
#include "planner/io/vocabulary.h"
#include "planner/ir/graph.h"

namespace tessera {

enum class CellKind : uint8_t { kLstm, kGru };

// What configs of recurrent networks have in common: "cell" ("lstm" or "gru"),
// "hidden_size", "embedding_size" (the hidden size), "num_layers", "dropout"
// (0; behind lookups and between layers), "steps_per_block" (10).
struct RecurrentSizes {
  CellKind cell = CellKind::kLstm;
  int64_t hidden = 1;
  int64_t embedding = 1;
  int64_t layers = 1;
  double dropout = 0;
  int64_t steps_per_block = 10;
};
RecurrentSizes ReadRecurrentSizes(ModelConfig& config);

// One tensor (samples, features) for each step.
using Steps = std::vector<TensorId>;

class Recurrent {
 public:
  // What a step hands to the next; invalid: zeros.
  struct State {
    TensorId hidden;
    TensorId cell;  // of an LSTM
  };

  Recurrent(const ModelConfig& config, const ImportOptions& options,
            const RecurrentSizes& sizes);

  void BeginBlock(std::string name) { builder_.BeginBlock(std::move(name)); }
  TensorId Input(std::string name, int64_t places);
  TensorId Matrix(std::string name, Shape shape);

  // Rows of the table NAME.weight of tokens by ids (samples, places), a step
  // for each place.
  Steps Lookup(const std::string& name, TensorId ids,
               const Vocabulary& vocabulary);
  // Layers NAME, each in blocks of its own, that begin in `states` and leave
  // their last ones there, one for each layer. `inputs` are the features of x.
  // Only where `continues` are the cells of the last step kept.
  Steps Layers(const std::string& name, Steps x, int64_t inputs,
               std::vector<State>& states, bool continues);
  // Steps as a sequence (samples, places, features).
  TensorId Stack(std::string name, const Steps& steps);
  // NAME.weight and NAME.bias over the last dimension of a sequence.
  TensorId Linear(const std::string& name, TensorId x, int64_t outputs,
                  int64_t inputs, bool bias);
  // tanh(WX x + WC c), where c is what each place of x sees of `memory`: scaled
  // dot-product attention with projections of queries, keys and values. Keys at
  // negative positions are not seen. REQUIRES: `heads` divides the hidden size.
  TensorId Attend(const std::string& name, int64_t heads, TensorId x,
                  TensorId memory, TensorId positions,
                  TensorId memory_positions);
  // The mean cross-entropy over the labels that are not negative.
  Result<Graph> Finish(TensorId logits, TensorId labels,
                       std::vector<Attribute> attributes = {});

 private:
  Steps Layer(const std::string& name, const std::string& suffix,
              const Steps& x, int64_t inputs, State& state, bool continues);
  TensorId Dropout(std::string name, TensorId x);

  GraphBuilder builder_;
  RecurrentSizes sizes_;
  int64_t batch_;
  int dropouts_ = 0;
};

}  // namespace tessera
