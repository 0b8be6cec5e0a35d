// Some places of a dimension, and a dimension with more of them. Tensors are
// (outer, places, inner).

#include <algorithm>

#include "runtime/kernels/attributes.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/places.h"

namespace tessera {
namespace {

// from -> to, place `first` + i `step` of `from` to place i of `to`.
template <typename T>
void Take(const KernelCall& call, const PlacesOf& from, const PlacesOf& to,
          int64_t first, int64_t step) {
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, to.outer, RowGrain(to.places * to.inner),
               [&](int64_t begin, int64_t end) {
                 for (int64_t o = begin; o < end; ++o) {
                   for (int64_t i = 0; i < to.places; ++i) {
                     std::copy_n(x + from.At(o, first + i * step), to.inner,
                                 y + to.At(o, i));
                   }
                 }
               });
}

// The other way, and `value` in the places that are not written.
template <typename T>
void Spread(const KernelCall& call, const PlacesOf& from, const PlacesOf& to,
            int64_t first, int64_t step, T value) {
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, to.outer, RowGrain(to.places * to.inner),
               [&](int64_t begin, int64_t end) {
                 std::fill(y + to.At(begin, 0), y + to.At(end, 0), value);
                 for (int64_t o = begin; o < end; ++o) {
                   for (int64_t i = 0; i < from.places; ++i) {
                     std::copy_n(x + from.At(o, i), from.inner,
                                 y + to.At(o, first + i * step));
                   }
                 }
               });
}

template <typename T>
void Slice(const KernelCall& call) {
  const auto [from, to] = PlacesOfCall(call);
  Take<T>(call, from, to, WholeAttribute(call, "start"),
          WholeAttribute(call, "step"));
}
template <typename T>
void SliceDx(const KernelCall& call) {
  const auto [from, to] = PlacesOfCall(call);
  Spread<T>(call, from, to, WholeAttribute(call, "start"),
            WholeAttribute(call, "step"), T{0});
}
template <typename T>
void Pad(const KernelCall& call) {
  const auto [from, to] = PlacesOfCall(call);
  Spread<T>(call, from, to, WholeAttribute(call, "before"), 1,
            static_cast<T>(call.attribute("value")));
}
template <typename T>
void PadDx(const KernelCall& call) {
  const auto [from, to] = PlacesOfCall(call);
  Take<T>(call, from, to, WholeAttribute(call, "before"), 1);
}

}  // namespace

std::vector<Kernel> CpuSliceKernels() {
  return {
      {"slice", ByDType<Slice<float>, Slice<double>>},
      {"slice_dx", ByDType<SliceDx<float>, SliceDx<double>>},
      {"pad", ByDType<Pad<float>, Pad<double>>},
      {"pad_dx", ByDType<PadDx<float>, PadDx<double>>},
  };
}

}  // namespace tessera
