// Cells of recurrent networks behind their matrix products
// (planner/ops/recurrent.cc), a thread for each feature of each row.

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

// Gates (rows, gates, features). Those that a node lacks are zero, and are not
// written.
template <typename T>
struct Gates {
  Elements<T> elements;
  int64_t count = 0;
  int64_t features = 0;

  Gates() = default;
  explicit Gates(const LocalTensor& tensor)
      : elements(tensor), count(tensor.shape[1]), features(tensor.shape[2]) {}

  __device__ int64_t Place(int64_t row, int gate, int64_t feature) const {
    return (row * count + gate) * features + feature;
  }
  __device__ float Get(int64_t row, int gate, int64_t feature) const {
    if (elements.data == nullptr) return 0;
    return elements.Get(Place(row, gate, feature));
  }
  __device__ void Set(int64_t row, int gate, int64_t feature,
                      float value) const {
    if (elements.data == nullptr) return;
    elements.Set(Place(row, gate, feature), value);
  }
};

// A state (rows, features), the same way.
template <typename T>
__device__ float GetOrZero(const Elements<T>& state, int64_t i) {
  return state.data == nullptr ? 0 : state.Get(i);
}
template <typename T>
__device__ void SetIfThere(const Elements<T>& state, int64_t i, float value) {
  if (state.data != nullptr) state.Set(i, value);
}

template <typename T>
Elements<T> StateAt(std::span<const LocalTensor> tensors, size_t i) {
  return i < tensors.size() ? Elements<T>(tensors[i]) : Elements<T>();
}
template <typename T>
Gates<T> GatesAt(std::span<const LocalTensor> tensors, size_t i) {
  return i < tensors.size() ? Gates<T>(tensors[i]) : Gates<T>();
}

// Of operands and results.
std::vector<LocalTensor> AllOf(const KernelCall& call) {
  std::vector<LocalTensor> tensors(call.operands.begin(), call.operands.end());
  tensors.insert(tensors.end(), call.results.begin(), call.results.end());
  return tensors;
}

// Calls f(i, row, feature) for the elements of a state, on all threads.
template <typename F>
__device__ void ForEachFeature(int64_t n, int64_t features, F f) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += step) {
    f(i, i / features, i % features);
  }
}

// ---- LSTM

struct LstmCell {
  float input, forget, candidate, output, cell;

  template <typename T>
  __device__ LstmCell(const Gates<T>& gates, float before, int64_t row,
                      int64_t feature)
      : input(Sigmoid(gates.Get(row, 0, feature))),
        forget(Sigmoid(gates.Get(row, 1, feature))),
        candidate(tanhf(gates.Get(row, 2, feature))),
        output(Sigmoid(gates.Get(row, 3, feature))),
        cell(forget * before + input * candidate) {}
};

template <typename T>
__global__ void LstmForward(Gates<T> gates, Elements<T> before, Elements<T> h,
                            Elements<T> cell, int64_t n) {
  ForEachFeature(n, gates.features,
                 [&](int64_t i, int64_t row, int64_t feature) {
                   const LstmCell at(gates, GetOrZero(before, i), row, feature);
                   h.Set(i, at.output * tanhf(at.cell));
                   SetIfThere(cell, i, at.cell);
                 });
}

template <typename T>
__global__ void LstmBackward(Elements<T> dh, Elements<T> dcell, Gates<T> gates,
                             Elements<T> before, Gates<T> dgates,
                             Elements<T> dbefore, int64_t n) {
  ForEachFeature(
      n, gates.features, [&](int64_t i, int64_t row, int64_t feature) {
        const float c = GetOrZero(before, i);
        const LstmCell at(gates, c, row, feature);
        const float bent = tanhf(at.cell);
        const float of_h = dh.Get(i);
        const float dc =
            GetOrZero(dcell, i) + of_h * at.output * (1 - bent * bent);
        dgates.Set(row, 0, feature,
                   dc * at.candidate * at.input * (1 - at.input));
        dgates.Set(row, 1, feature, dc * c * at.forget * (1 - at.forget));
        dgates.Set(row, 2, feature,
                   dc * at.input * (1 - at.candidate * at.candidate));
        dgates.Set(row, 3, feature, of_h * bent * at.output * (1 - at.output));
        SetIfThere(dbefore, i, dc * at.forget);
      });
}

void LstmGates(const KernelCall& call) {
  const int64_t n = call.results[0].elements();
  ByType(AllOf(call), [&]<typename T>() {
    Launch(LstmForward<T>, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           Gates<T>(call.operands[0]), StateAt<T>(call.operands, 1),
           Elements<T>(call.results[0]), StateAt<T>(call.results, 1), n);
  });
}

// dh', dc', gates, c: the gates have one dimension more.
void LstmGatesDx(const KernelCall& call) {
  const int64_t n = call.operands[0].elements();
  const size_t place = call.operands[1].shape.size() == 3 ? 1 : 2;
  ByType(AllOf(call), [&]<typename T>() {
    Launch(LstmBackward<T>, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           Elements<T>(call.operands[0]),
           place == 2 ? Elements<T>(call.operands[1]) : Elements<T>(),
           Gates<T>(call.operands[place]), StateAt<T>(call.operands, place + 1),
           Gates<T>(call.results[0]), StateAt<T>(call.results, 1), n);
  });
}

// ---- GRU

template <typename T>
struct GruOperands {
  Gates<T> of_x;
  Elements<T> bias;
  Gates<T> of_h;
  Elements<T> h;

  explicit GruOperands(std::span<const LocalTensor> operands)
      : of_x(operands[0]),
        bias(operands[1]),
        of_h(GatesAt<T>(operands, 2)),
        h(StateAt<T>(operands, 3)) {}
};

struct GruCell {
  float reset, update, candidate;
  float inner;   // what `reset` multiplies
  float before;  // the state

  template <typename T>
  __device__ GruCell(const GruOperands<T>& in, int64_t i, int64_t row,
                     int64_t feature)
      : reset(Sigmoid(in.of_x.Get(row, 0, feature) +
                      in.of_h.Get(row, 0, feature))),
        update(Sigmoid(in.of_x.Get(row, 1, feature) +
                       in.of_h.Get(row, 1, feature))),
        candidate(0),
        inner(in.of_h.Get(row, 2, feature) + in.bias.Get(feature)),
        before(GetOrZero(in.h, i)) {
    candidate = tanhf(in.of_x.Get(row, 2, feature) + reset * inner);
  }

  // The gradient of the candidate before its nonlinearity.
  __device__ float DCandidate(float dy) const {
    return dy * (1 - update) * (1 - candidate * candidate);
  }
};

template <typename T>
__global__ void GruForward(GruOperands<T> in, Elements<T> y, int64_t n) {
  ForEachFeature(
      n, in.of_x.features, [&](int64_t i, int64_t row, int64_t feature) {
        const GruCell at(in, i, row, feature);
        y.Set(i, at.candidate + at.update * (at.before - at.candidate));
      });
}

template <typename T>
__global__ void GruBackward(Elements<T> dy, GruOperands<T> in, Gates<T> dof_x,
                            Gates<T> dof_h, Elements<T> dh, int64_t n) {
  ForEachFeature(
      n, in.of_x.features, [&](int64_t i, int64_t row, int64_t feature) {
        const GruCell at(in, i, row, feature);
        const float of_y = dy.Get(i);
        const float dn = at.DCandidate(of_y);
        const float dr = dn * at.inner * at.reset * (1 - at.reset);
        const float dz =
            of_y * (at.before - at.candidate) * at.update * (1 - at.update);
        dof_x.Set(row, 0, feature, dr);
        dof_x.Set(row, 1, feature, dz);
        dof_x.Set(row, 2, feature, dn);
        dof_h.Set(row, 0, feature, dr);
        dof_h.Set(row, 1, feature, dz);
        dof_h.Set(row, 2, feature, dn * at.reset);
        SetIfThere(dh, i, of_y * at.update);
      });
}

// A thread for each feature, which goes through the rows in their order.
template <typename T>
__global__ void GruBias(Elements<T> dy, GruOperands<T> in, Elements<Any> db,
                        int64_t rows, bool accumulate) {
  const int64_t features = in.of_x.features;
  ForEachFeature(features, features, [&](int64_t, int64_t, int64_t feature) {
    float sum = accumulate ? db.Get(feature) : 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = row * features + feature;
      const GruCell at(in, i, row, feature);
      sum += at.reset * at.DCandidate(dy.Get(i));
    }
    db.Set(feature, sum);
  });
}

void GruGates(const KernelCall& call) {
  const int64_t n = call.results[0].elements();
  ByType(AllOf(call), [&]<typename T>() {
    Launch(GruForward<T>, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           GruOperands<T>(call.operands), Elements<T>(call.results[0]), n);
  });
}

void GruGatesDx(const KernelCall& call) {
  const int64_t n = call.operands[0].elements();
  ByType(AllOf(call), [&]<typename T>() {
    Launch(GruBackward<T>, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           Elements<T>(call.operands[0]),
           GruOperands<T>(call.operands.subspan(1)), Gates<T>(call.results[0]),
           GatesAt<T>(call.results, 1), StateAt<T>(call.results, 2), n);
  });
}

void GruGatesDb(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  ByType(call.operands, [&]<typename T>() {
    Launch(GruBias<T>, BlocksFor(*call.queue, dy.shape[1]), kThreads, 0,
           *call.queue, Elements<T>(dy),
           GruOperands<T>(call.operands.subspan(1)),
           Elements<Any>(call.results[0]), dy.shape[0], call.accumulate);
  });
}

}  // namespace

std::vector<Kernel> CudaRecurrentKernels() {
  return {
      {"lstm_gates", LstmGates},
      {"lstm_gates_dx", LstmGatesDx},
      {"gru_gates", GruGates},
      {"gru_gates_dx", GruGatesDx},
      {"gru_gates_db", GruGatesDb, true},
  };
}

}  // namespace tessera
