#pragma once
// What ONNX files compute, by the CPU kernels: node by node on one rank.

#include <functional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/onnx.h"
#include "tests/support/host_tensor.h"

namespace tessera {

// Values of all tensors of `made`, which is of the file at `path`, by id;
// weights are those of the file, as `tessera run --load` reads them. `fill`
// puts elements into the inputs, but for those that are constants.
Result<std::vector<HostTensor>> ComputeOnnx(
    const OnnxComputation& made, const std::string& path,
    const std::function<Result<void>(TensorId id, HostTensor& input)>& fill);

// Those of an output, in the file's order.
std::vector<double> ValuesOf(const OnnxComputation::Output& output,
                             const std::vector<HostTensor>& tensors);

}  // namespace tessera
