// Cells of recurrent networks behind their matrix products
// (planner/ops/recurrent.cc), row by row of the batch.

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// Calls f(row, first, count) for the blocks of `features` of each row.
template <typename F>
void ForEachRowBlock(const KernelCall& call, int64_t rows, int64_t features,
                     F f) {
  ForEachRange(call, rows, RowGrain(features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      ForEachBlock(features,
                   [&](int64_t first, int64_t count) { f(row, first, count); });
    }
  });
}

// Gate `gate` of a row, from feature `first` on.
template <typename T>
T* GateAt(const LocalTensor& gates, int64_t row, int64_t gate, int64_t first) {
  return gates.as<T>() + (row * gates.shape[1] + gate) * gates.shape[2] + first;
}

template <typename T>
Block<T> LoadGate(const LocalTensor& gates, int64_t row, int64_t gate,
                  int64_t first, int64_t count) {
  return Load<T>(GateAt<const T>(gates, row, gate, first), count);
}

// Of a tensor (rows, features); zeros where there is none.
template <typename T>
Block<T> LoadState(const LocalTensor* state, int64_t row, int64_t first,
                   int64_t count) {
  if (state == nullptr) return Block<T>::Zero();
  return Load<T>(state->as<const T>() + row * state->shape[1] + first, count);
}

template <typename T>
void StoreState(const Block<T>& block, const LocalTensor& state, int64_t row,
                int64_t first, int64_t count) {
  Store<T>(block, count, state.as<T>() + row * state.shape[1] + first);
}

const LocalTensor* At(std::span<const LocalTensor> tensors, size_t i) {
  return i < tensors.size() ? &tensors[i] : nullptr;
}

// ---- LSTM

template <typename T>
struct LstmCell {
  Block<T> input, forget, candidate, output;  // behind their nonlinearities
  Block<T> cell;                              // the new one

  LstmCell(const LocalTensor& gates, const Block<T>& before, int64_t row,
           int64_t first, int64_t count)
      : input(Sigmoid<T>(LoadGate<T>(gates, row, 0, first, count))),
        forget(Sigmoid<T>(LoadGate<T>(gates, row, 1, first, count))),
        candidate(LoadGate<T>(gates, row, 2, first, count).tanh()),
        output(Sigmoid<T>(LoadGate<T>(gates, row, 3, first, count))),
        cell(forget * before + input * candidate) {}
};

// gates, c -> h', c'; without c or c' where the node has none.
template <typename T>
void LstmGates(const KernelCall& call) {
  const LocalTensor& gates = call.operands[0];
  const LocalTensor* const before = At(call.operands, 1);
  const LocalTensor* const cell = At(call.results, 1);
  ForEachRowBlock(call, gates.shape[0], gates.shape[2],
                  [&](int64_t row, int64_t first, int64_t count) {
                    const LstmCell<T> at(
                        gates, LoadState<T>(before, row, first, count), row,
                        first, count);
                    StoreState<T>(at.output * at.cell.tanh(), call.results[0],
                                  row, first, count);
                    if (cell != nullptr) {
                      StoreState<T>(at.cell, *cell, row, first, count);
                    }
                  });
}

// dh', dc', gates, c -> dgates, dc; without dc' or c where there is none.
template <typename T>
void LstmGatesDx(const KernelCall& call) {
  const size_t place = call.operands[1].shape.size() == 3 ? 1 : 2;
  const LocalTensor& gates = call.operands[place];
  const LocalTensor* const dcell = place == 2 ? &call.operands[1] : nullptr;
  const LocalTensor* const before = At(call.operands, place + 1);
  const LocalTensor* const dbefore = At(call.results, 1);
  ForEachRowBlock(
      call, gates.shape[0], gates.shape[2],
      [&](int64_t row, int64_t first, int64_t count) {
        const Block<T> c = LoadState<T>(before, row, first, count);
        const LstmCell<T> at(gates, c, row, first, count);
        const Block<T> bent = at.cell.tanh();
        const Block<T> dh = LoadState<T>(&call.operands[0], row, first, count);
        const Block<T> dc = LoadState<T>(dcell, row, first, count) +
                            dh * at.output * (T{1} - bent * bent);
        const Block<T> of_gates[] = {
            dc * at.candidate * at.input * (T{1} - at.input),
            dc * c * at.forget * (T{1} - at.forget),
            dc * at.input * (T{1} - at.candidate * at.candidate),
            dh * bent * at.output * (T{1} - at.output)};
        for (int gate = 0; gate < 4; ++gate) {
          Store<T>(of_gates[gate], count,
                   GateAt<T>(call.results[0], row, gate, first));
        }
        if (dbefore != nullptr) {
          StoreState<T>(dc * at.forget, *dbefore, row, first, count);
        }
      });
}

// ---- GRU

// What a call reads: gates of x, bias, gates of h, h, the last two perhaps not.
struct GruOperands {
  const LocalTensor& of_x;
  const LocalTensor& bias;
  const LocalTensor* of_h;
  const LocalTensor* h;

  explicit GruOperands(std::span<const LocalTensor> operands)
      : of_x(operands[0]),
        bias(operands[1]),
        of_h(At(operands, 2)),
        h(At(operands, 3)) {}
};

template <typename T>
struct GruCell {
  Block<T> reset, update, candidate;  // behind their nonlinearities
  Block<T> inner;                     // what `reset` multiplies
  Block<T> before;                    // the state

  GruCell(const GruOperands& in, int64_t row, int64_t first, int64_t count)
      : before(LoadState<T>(in.h, row, first, count)) {
    const auto of_h = [&](int64_t gate) -> Block<T> {
      if (in.of_h == nullptr) return Block<T>::Zero();
      return LoadGate<T>(*in.of_h, row, gate, first, count);
    };
    reset = Sigmoid<T>(LoadGate<T>(in.of_x, row, 0, first, count) + of_h(0));
    update = Sigmoid<T>(LoadGate<T>(in.of_x, row, 1, first, count) + of_h(1));
    inner = of_h(2) + Load<T>(in.bias.as<const T>() + first, count);
    candidate =
        (LoadGate<T>(in.of_x, row, 2, first, count) + reset * inner).tanh();
  }
};

template <typename T>
void GruGates(const KernelCall& call) {
  const GruOperands in(call.operands);
  ForEachRowBlock(call, in.of_x.shape[0], in.of_x.shape[2],
                  [&](int64_t row, int64_t first, int64_t count) {
                    const GruCell<T> at(in, row, first, count);
                    StoreState<T>(
                        at.candidate + at.update * (at.before - at.candidate),
                        call.results[0], row, first, count);
                  });
}

// The gradient of the candidate before its nonlinearity.
template <typename T>
Block<T> GruDCandidate(const GruCell<T>& at, const Block<T>& dy) {
  return dy * (T{1} - at.update) * (T{1} - at.candidate * at.candidate);
}

// dh', operands -> gradients of the gates of x, of those of h, and of h.
template <typename T>
void GruGatesDx(const KernelCall& call) {
  const GruOperands in(call.operands.subspan(1));
  const LocalTensor* const dof_h = At(call.results, 1);
  const LocalTensor* const dh = At(call.results, 2);
  ForEachRowBlock(
      call, in.of_x.shape[0], in.of_x.shape[2],
      [&](int64_t row, int64_t first, int64_t count) {
        const GruCell<T> at(in, row, first, count);
        const Block<T> dy = LoadState<T>(&call.operands[0], row, first, count);
        const Block<T> dn = GruDCandidate<T>(at, dy);
        const Block<T> of_x[] = {
            dn * at.inner * at.reset * (T{1} - at.reset),
            dy * (at.before - at.candidate) * at.update * (T{1} - at.update),
            dn};
        for (int gate = 0; gate < 3; ++gate) {
          Store<T>(of_x[gate], count,
                   GateAt<T>(call.results[0], row, gate, first));
          if (dof_h == nullptr) continue;
          const Block<T> of_h = gate < 2 ? of_x[gate] : dn * at.reset;
          Store<T>(of_h, count, GateAt<T>(*dof_h, row, gate, first));
        }
        if (dh != nullptr) {
          StoreState<T>(dy * at.update, *dh, row, first, count);
        }
      });
}

// dh', operands -> gradient of the bias, summed over rows in their order.
template <typename T>
void GruGatesDb(const KernelCall& call) {
  const GruOperands in(call.operands.subspan(1));
  const int64_t features = in.of_x.shape[2];
  const int64_t rows = in.of_x.shape[0];
  T* const db = call.results[0].as<T>();
  ForEachBlock(call, features, [&](int64_t first, int64_t count) {
    Block<T> sum = Block<T>::Zero();
    if (call.accumulate) sum = Load<T>(db + first, count);
    for (int64_t row = 0; row < rows; ++row) {
      const GruCell<T> at(in, row, first, count);
      sum += at.reset * GruDCandidate<T>(at, LoadState<T>(&call.operands[0],
                                                          row, first, count));
    }
    Store<T>(sum, count, db + first);
  });
}

}  // namespace

std::vector<Kernel> CpuRecurrentKernels() {
  return {
      {"lstm_gates", ByDType<LstmGates<float>, LstmGates<double>>},
      {"lstm_gates_dx", ByDType<LstmGatesDx<float>, LstmGatesDx<double>>},
      {"gru_gates", ByDType<GruGates<float>, GruGates<double>>},
      {"gru_gates_dx", ByDType<GruGatesDx<float>, GruGatesDx<double>>},
      {"gru_gates_db", ByDType<GruGatesDb<float>, GruGatesDb<double>>, true},
  };
}

}  // namespace tessera
