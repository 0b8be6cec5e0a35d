#include "tests/support/onnx_values.h"

#include "planner/io/onnx_fold.h"
#include "runtime/published_files.h"
#include "tests/support/kernel_cases.h"

namespace tessera {

Result<std::vector<HostTensor>> ComputeOnnx(
    const OnnxComputation& made, const std::string& path,
    const std::function<Result<void>(TensorId id, HostTensor& input)>& fill) {
  const Graph& graph = made.graph;
  std::vector<HostTensor> tensors;
  for (const Tensor& tensor : graph.tensors) {
    tensors.emplace_back(tensor.shape, tensor.dtype);
  }
  TESSERA_TRY(const PublishedFiles files,
              PublishedFiles::Open(path, made.layout, graph));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = graph.tensors[i];
    std::vector<double> values = tensor.values;  // of a constant
    if (tensor.kind == TensorKind::kWeight) {
      Box whole;
      for (int64_t extent : tensor.shape) whole.push_back({0, extent});
      TESSERA_TRY(const std::vector<float> read,
                  files.Read(tensor, WholeBlock(whole)));
      values.assign(read.begin(), read.end());
    } else if (tensor.kind == TensorKind::kInput && values.empty()) {
      TESSERA_RETURN_IF_ERROR(fill(TensorId(i), tensors[i]));
    }
    for (size_t e = 0; e < values.size(); ++e) {
      tensors[i].Set(static_cast<int64_t>(e), values[e]);
    }
  }
  for (const Node& node : graph.nodes) {
    Problem problem;
    problem.op = node.op;
    problem.rule = node.rule;
    problem.attributes = node.attributes;
    for (TensorId id : node.operands) {
      problem.operands.push_back(tensors[id.index()]);
    }
    for (TensorId id : node.results) {
      problem.initial.push_back(tensors[id.index()]);
    }
    const Tensors results = Compute(problem);
    for (size_t k = 0; k < results.size(); ++k) {
      tensors[node.results[k].index()] = results[k];
    }
  }
  return tensors;
}

std::vector<double> ValuesOf(const OnnxComputation::Output& output,
                             const std::vector<HostTensor>& tensors) {
  if (!output.tensor.valid()) return output.values;
  const HostTensor& tensor = tensors[output.tensor.index()];
  return TransposeOnnx({tensor.shape(), tensor.Values(), true}, output.order)
      .values;
}

}  // namespace tessera
