// Runs an ONNX file on the CPU kernels, node by node on one rank, for
// tests/bench/onnx_node_tests.py.
//
//   tessera_onnx_outputs --operators
//   tessera_onnx_outputs FILE.onnx FOLDER
//
// The first form prints the operators that are mapped. The second reads the
// file's inputs from FOLDER/NUMBER.in, in their order, as fp32 or int32, and
// writes outputs to FOLDER/NUMBER.out as fp32; it prints the shape of each in a
// line. Exit status 2 with a message where the file is refused.

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "planner/io/onnx.h"
#include "planner/io/onnx_file.h"
#include "planner/io/onnx_fold.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

// Elementwise ones, which are not rows of the importer's table.
constexpr const char* kElementwise[] = {
    "Abs", "Add",      "Cos", "Div",  "Erf",        "Exp",
    "Log", "Mul",      "Neg", "Pow",  "Relu",       "Sigmoid",
    "Sin", "Softplus", "Sub", "Sqrt", "Reciprocal", "Tanh"};

int Refuse(const Error& error) {
  std::cerr << error.ToString() << "\n";
  return 2;
}

// Elements of a file, as the dtype says.
template <typename T>
bool ReadElements(const std::string& path, HostTensor& tensor) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.size() != static_cast<size_t>(tensor.elements()) * sizeof(T)) {
    return false;
  }
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + static_cast<size_t>(i) * sizeof(T),
                sizeof(T));
    tensor.Set(i, static_cast<double>(value));
  }
  return true;
}

// `values` of `shape` with the dimensions in the order `order`.
std::vector<double> Reordered(const std::vector<double>& values,
                              const Shape& shape,
                              const std::vector<size_t>& order) {
  return TransposeOnnx({shape, values, true}, order).values;
}

int Run(const std::string& path, const std::string& folder) {
  ImportOptions options;
  options.global_batch = 0;
  options.seq_len = 0;
  const auto made = ImportOnnxComputation(path, options);
  if (!made) return Refuse(made.error());
  const auto model = ReadOnnxFile(path);
  if (!model) return Refuse(model.error());
  const Graph& graph = made->graph;
  std::vector<HostTensor> tensors;
  for (const Tensor& tensor : graph.tensors) {
    tensors.emplace_back(tensor.shape, tensor.dtype);
  }
  for (const OnnxComputation::Weight& weight : made->weights) {
    for (const OnnxTensor& source : model->initializers) {
      if (source.name != weight.name) continue;
      HostTensor& tensor = tensors[weight.tensor.index()];
      std::vector<double> values = source.Values();
      // A part of it is a weight, or its numbers are not in the file.
      if (static_cast<int64_t>(values.size()) != tensor.elements() ||
          OnnxElements(source.dims) != tensor.elements()) {
        std::cerr << "cannot read the weight '" << weight.name << "'\n";
        return 2;
      }
      values = Reordered(values, source.dims, weight.order);
      for (size_t i = 0; i < values.size(); ++i) {
        tensor.Set(static_cast<int64_t>(i), values[i]);
      }
    }
  }
  for (size_t i = 0; i < made->inputs.size(); ++i) {
    const TensorId id = made->inputs[i].tensor;
    if (!id.valid() || id.index() >= tensors.size()) continue;
    HostTensor& tensor = tensors[id.index()];
    const std::string file = folder + "/" + std::to_string(i) + ".in";
    const bool read = IsFloat(tensor.dtype())
                          ? ReadElements<float>(file, tensor)
                          : ReadElements<int32_t>(file, tensor);
    if (!read) {
      std::cerr << file << ": expected " << tensor.elements() << " elements\n";
      return 2;
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
  for (size_t i = 0; i < made->outputs.size(); ++i) {
    const OnnxComputation::Output& output = made->outputs[i];
    std::vector<double> values = output.values;
    if (output.tensor.valid()) {
      const HostTensor& tensor = tensors[output.tensor.index()];
      values = Reordered(tensor.Values(), tensor.shape(), output.order);
    }
    std::ofstream file(folder + "/" + std::to_string(i) + ".out",
                       std::ios::binary);
    for (double value : values) {
      const auto single = static_cast<float>(value);
      file.write(reinterpret_cast<const char*>(&single), sizeof single);
    }
    std::string text;
    for (int64_t extent : output.shape) {
      text += (text.empty() ? "" : " ") + std::to_string(extent);
    }
    std::cout << text << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--operators") {
    for (const char* name : tessera::kElementwise) std::cout << name << "\n";
    for (const auto& op : tessera::OnnxOperators()) {
      std::cout << op.name << "\n";
    }
    return 0;
  }
  if (argc != 3) {
    std::cerr << "usage: tessera_onnx_outputs FILE.onnx FOLDER\n";
    return 2;
  }
  return tessera::Run(argv[1], argv[2]);
}
