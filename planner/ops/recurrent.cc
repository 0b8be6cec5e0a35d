// Cells of recurrent networks behind their matrix products, for one step of a
// sequence. Gates are a factor g of their own, in PyTorch's order.
//
// LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
// 2000): of the gates (i, f, g, o) before their nonlinearities, and the cell c
// of the step before,
//   c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').
// A first step may lack c, which then is zero, and a last one the result c'.
//
// GRU (Cho et al. 2014, in the form of cuDNN and PyTorch): of the gates (r, z,
// n) of the input x and of the state h of the step before, and a bias b,
//   n' = tanh(x_n + sigmoid(x_r + h_r) (h_n + b)),
//   h' = n' + sigmoid(x_z + h_z) (h - n').
// A first step may lack the gates of h and h itself, which then are zero.

#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether `gates` is (b, g, j), with a g that is not split, and `state` (b, j).
bool AreGatesOf(const IndexRule& rule, const Indices& gates,
                const Indices& state) {
  return gates.size() == 3 && !rule.factors[gates[1]].splittable &&
         gates[1] == rule.FactorOf('g') && state == Indices{gates[0], gates[2]};
}

bool IsLstm(const IndexRule& rule) {
  if (rule.operands.empty() || rule.operands.size() > 2 ||
      rule.results.empty() || rule.results.size() > 2) {
    return false;
  }
  for (const auto& states :
       {std::vector(rule.operands.begin() + 1, rule.operands.end()),
        rule.results}) {
    for (const Indices& state : states) {
      if (!AreGatesOf(rule, rule.operands[0], state)) return false;
    }
  }
  return true;
}

bool IsGru(const IndexRule& rule) {
  const std::vector<Indices>& operands = rule.operands;
  if ((operands.size() != 2 && operands.size() != 4) ||
      rule.results.size() != 1 ||
      !AreGatesOf(rule, operands[0], rule.results[0]) ||
      operands[1] != Indices{operands[0][2]}) {
    return false;
  }
  return operands.size() == 2 ||
         (operands[2] == operands[0] && operands[3] == rule.results[0]);
}

template <int kGates>
std::string GatesProblem(const OpCall& call) {
  if (call.Extent('g') == kGates) return "";
  return "has " + std::to_string(call.Extent('g')) + " gates: expected " +
         std::to_string(kGates);
}

}  // namespace

std::vector<OpDef> RecurrentOps() {
  return {
      {.name = "lstm_gates",
       .summary = "an LSTM cell behind its matrix products",
       .form = {"gates and cell -> hidden state and cell, as in "
                "'bg!j,bj->bj,bj', without the cells where there are none",
                IsLstm},
       .adjoints = {{"lstm_gates_dx", "dy0,dy1,x0,x1->dx0,dx1"}},
       .flops = FlopsPerPoint<8>,
       .problem = GatesProblem<4>},
      {.name = "lstm_gates_dx",
       .summary = "gradients of lstm_gates' gates and cell",
       .flops = FlopsPerPoint<16>},
      {.name = "gru_gates",
       .summary = "a GRU cell behind its matrix products",
       .form = {"gates of the input, bias, gates of the state, state -> state, "
                "as in 'bg!j,j,bg!j,bj->bj', or the first two of them",
                IsGru},
       .adjoints = {{"gru_gates_dx", "dy0,x0,x1,x2,x3->dx0,dx2,dx3"},
                    {"gru_gates_db", "dy0,x0,x1,x2,x3->dx1"}},
       .flops = FlopsPerPoint<8>,
       .problem = GatesProblem<3>},
      {.name = "gru_gates_dx",
       .summary = "gradients of gru_gates' gates and state",
       .flops = FlopsPerPoint<16>,
       .linear = {{0}}},
      {.name = "gru_gates_db",
       .summary = "gradient of gru_gates' bias",
       .flops = FlopsPerPoint<10>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
