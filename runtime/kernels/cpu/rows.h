#pragma once
// Loops over the rows of a tensor.

#include <cstdint>

#include "runtime/kernels/cpu/call.h"

namespace tessera {

// Calls f(row) for all rows, on the threads of the call.
template <typename F>
void ForEachRow(const KernelCall& call, int64_t rows, int64_t width, F f) {
  ForEachRange(call, rows, RowGrain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

}  // namespace tessera
