#include "planner/io/recurrent.h"

#include <cmath>

namespace tessera {
namespace {

// Of PyTorch's uniform distribution in +-1/sqrt(hidden).
double Stddev(int64_t hidden) {
  return 1 / std::sqrt(3 * static_cast<double>(hidden));
}

}  // namespace

RecurrentSizes ReadRecurrentSizes(ModelConfig& config) {
  RecurrentSizes sizes;
  const std::string cell = config.String("cell", "lstm");
  if (cell != "lstm" && cell != "gru") {
    config.Wrong("cell", "is '" + cell + "': expected lstm or gru");
  }
  sizes.cell = cell == "gru" ? CellKind::kGru : CellKind::kLstm;
  sizes.hidden = config.Size("hidden_size");
  sizes.embedding = config.Size("embedding_size", sizes.hidden);
  sizes.layers = config.Layers("num_layers");
  // 0.99: with nothing kept there is nothing to scale.
  sizes.dropout = config.Number("dropout", 0, 0, 0.99);
  sizes.steps_per_block = config.Size("steps_per_block", 10);
  return sizes;
}

Recurrent::Recurrent(const ModelConfig& config, const ImportOptions& options,
                     const RecurrentSizes& sizes)
    : builder_(GraphName(config.path()), options.global_batch, options.seq_len,
               options.dtype.value_or(DType::kFloat32)),
      sizes_(sizes),
      batch_(options.global_batch) {
  builder_.BeginBlock("embed");
}

TensorId Recurrent::Input(std::string name, int64_t places) {
  return builder_.Input(std::move(name), {batch_, places}, DType::kInt32);
}

TensorId Recurrent::Matrix(std::string name, Shape shape) {
  return builder_.Weight(std::move(name), std::move(shape),
                         {.stddev = Stddev(sizes_.hidden)},
                         /*weight_decay=*/true);
}

TensorId Recurrent::Dropout(std::string name, TensorId x) {
  if (sizes_.dropout == 0) return x;
  return builder_.Add1("dropout", std::move(name), {x}, "bh->bh",
                       {{"probability", sizes_.dropout},
                        {"salt", static_cast<double>(dropouts_++)}});
}

Steps Recurrent::Lookup(const std::string& name, TensorId ids,
                        const Vocabulary& vocabulary) {
  const TensorId table =
      Matrix(name + ".weight", {vocabulary.rows, sizes_.embedding});
  const TensorId rows = builder_.Add1("embedding", name, {ids, table}, "",
                                      vocabulary.attributes());
  const int64_t places = builder_.shape(ids)[1];
  std::string rule = "bd!h->bh";
  for (int64_t i = 1; i < places; ++i) rule += ",bh";
  Steps steps = builder_.Add("unstack", name + ".steps", {rows}, rule,
                             {{"steps", static_cast<double>(places)}});
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i] = Dropout(name + ".dropout." + std::to_string(i), steps[i]);
  }
  return steps;
}

Steps Recurrent::Layers(const std::string& name, Steps x, int64_t inputs,
                        std::vector<State>& states, bool continues) {
  states.resize(static_cast<size_t>(sizes_.layers));
  for (size_t layer = 0; layer < states.size(); ++layer) {
    const std::string suffix = "_l" + std::to_string(layer);
    x = Layer(name, suffix, x, inputs, states[layer], continues);
    if (layer + 1 < states.size()) {
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = Dropout(name + suffix + ".dropout." + std::to_string(i), x[i]);
      }
    }
    inputs = sizes_.hidden;
  }
  return x;
}

Steps Recurrent::Layer(const std::string& name, const std::string& suffix,
                       const Steps& x, int64_t inputs, State& state,
                       bool continues) {
  const bool lstm = sizes_.cell == CellKind::kLstm;
  const int64_t gates = lstm ? 4 : 3;
  const int64_t hidden = sizes_.hidden;
  TensorId of_x;
  TensorId of_h;
  TensorId bias;
  TensorId candidate_bias;
  Steps out;
  for (size_t i = 0; i < x.size(); ++i) {
    const std::string step = name + suffix + ".";
    const std::string prefix = step + std::to_string(i);
    if (i % static_cast<size_t>(sizes_.steps_per_block) == 0) {
      builder_.BeginBlock(prefix);
    }
    if (i == 0) {
      of_x = Matrix(name + ".weight_ih" + suffix, {gates, hidden, inputs});
      of_h = Matrix(name + ".weight_hh" + suffix, {gates, hidden, hidden});
      bias = builder_.Weight(name + ".bias" + suffix, {gates, hidden}, {},
                             /*weight_decay=*/false);
      if (!lstm) {
        candidate_bias = builder_.Weight(name + ".bias_hn" + suffix, {hidden},
                                         {}, /*weight_decay=*/false);
      }
    }
    TensorId input = builder_.Add1("linear", prefix + ".ih", {x[i], of_x, bias},
                                   "bi,gji+gj->bgj");
    TensorId recurrent;
    if (state.hidden.valid()) {
      recurrent = builder_.Add1("linear", prefix + ".hh", {state.hidden, of_h},
                                "bi,gji->bgj");
    }
    if (!lstm) {
      std::vector<TensorId> operands = {input, candidate_bias};
      std::string rule = "bg!j,j";
      if (recurrent.valid()) {
        operands.insert(operands.end(), {recurrent, state.hidden});
        rule += ",bg!j,bj";
      }
      state.hidden =
          builder_.Add1("gru_gates", prefix, operands, rule + "->bj");
    } else {
      if (recurrent.valid()) {
        input = builder_.Add1("add", prefix + ".gates", {input, recurrent},
                              "bgj,bgj->bgj");
      }
      std::vector<TensorId> operands = {input};
      std::string rule = "bg!j";
      if (state.cell.valid()) {
        operands.push_back(state.cell);
        rule += ",bj";
      }
      const bool keeps = continues || i + 1 < x.size();
      const auto results = builder_.Add("lstm_gates", prefix, operands,
                                        rule + (keeps ? "->bj,bj" : "->bj"));
      state = {results[0], keeps ? results[1] : TensorId()};
    }
    out.push_back(state.hidden);
  }
  return out;
}

TensorId Recurrent::Stack(std::string name, const Steps& steps) {
  std::string rule = "bh";
  for (size_t i = 1; i < steps.size(); ++i) rule += ",bh";
  return builder_.Add1("stack", std::move(name), steps, rule + "->bd!h",
                       {{"steps", static_cast<double>(steps.size())}});
}

TensorId Recurrent::Linear(const std::string& name, TensorId x, int64_t outputs,
                           int64_t inputs, bool bias) {
  std::vector<TensorId> operands = {
      x, Matrix(name + ".weight", {outputs, inputs})};
  if (bias) {
    operands.push_back(builder_.Weight(name + ".bias", {outputs}, {},
                                       /*weight_decay=*/false));
  }
  return builder_.Add1("linear", name, operands,
                       bias ? "bsi,vi+v->bsv" : "bsi,vi->bsv");
}

TensorId Recurrent::Attend(const std::string& name, int64_t heads, TensorId x,
                           TensorId memory, TensorId positions,
                           TensorId memory_positions) {
  const int64_t h = sizes_.hidden;
  const int64_t d = h / heads;
  const auto project = [&](const char* part, TensorId from, Shape shape,
                           const char* rule) {
    const std::string whole = name + "." + part;
    return builder_.Add1("linear", whole,
                         {from, Matrix(whole + ".weight", std::move(shape))},
                         rule);
  };
  const TensorId q = project("q", x, {heads, 1, d, h}, "bsi,grdi->bsgrd");
  const TensorId k = project("k", memory, {heads, d, h}, "bsi,gdi->bsgd");
  const TensorId v = project("v", memory, {heads, d, h}, "bsi,gei->bsge");
  const TensorId seen =
      builder_.Add1("attention_bidirectional", name,
                    {q, k, v, positions, memory_positions}, "",
                    {{"causal", 0},
                     {"scale", 1 / std::sqrt(static_cast<double>(d))},
                     {"window", 0}});
  const TensorId of_memory =
      project("out", seen, {h, heads, 1, d}, "bsgre,ogre->bso");
  const TensorId of_x = Linear(name + ".hidden", x, h, h, /*bias=*/false);
  const TensorId sum =
      builder_.Add1("add", name + ".add", {of_memory, of_x}, "bsh,bsh->bsh");
  return builder_.Add1("tanh", name + ".tanh", {sum}, "bsh->bsh");
}

Result<Graph> Recurrent::Finish(TensorId logits, TensorId labels,
                                std::vector<Attribute> attributes) {
  const TensorId count = builder_.Add1("count_labels", "count", {labels});
  return builder_.Finish(builder_.Add1("cross_entropy", "loss",
                                       {logits, labels, count}, "",
                                       std::move(attributes)));
}

}  // namespace tessera
