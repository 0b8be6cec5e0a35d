// Runs an ONNX file on the CPU kernels, node by node on one rank, for
// tests/bench/onnx_node_tests.py and against_onnx.py.
//
//   tessera_onnx_outputs --operators
//   tessera_onnx_outputs FILE.onnx FOLDER [BATCH [SEQ_LEN]]
//
// The first form prints the operators that are mapped. The second reads the
// file's inputs from FOLDER/NUMBER.in, in their order, as fp32 or int32, and
// writes outputs to FOLDER/NUMBER.out as fp32, and the names of the operators
// of the graph to FOLDER/operators; it prints the shape of each output in a
// line. Weights are those of the file, as `tessera run --load` reads them. Exit
// status 2 with a message where the file is refused.

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "planner/io/onnx.h"
#include "planner/io/onnx_fold.h"
#include "runtime/published_files.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

// Elementwise ones, which are not rows of the importer's table.
constexpr const char* kElementwise[] = {"Abs",
                                        "Add",
                                        "Cos",
                                        "Div",
                                        "Erf",
                                        "Exp",
                                        "Log",
                                        "Mul",
                                        "Neg",
                                        "Pow",
                                        "Relu",
                                        "Sigmoid",
                                        "Sin",
                                        "Softplus",
                                        "Sub",
                                        "Sqrt",
                                        "Reciprocal",
                                        "Tanh",
                                        "Equal",
                                        "Less",
                                        "LessOrEqual",
                                        "Greater",
                                        "GreaterOrEqual",
                                        "And",
                                        "Or",
                                        "Xor",
                                        "Not"};

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

// Inputs that the data has and the file does not, as runtime/data fills them:
// of images in patches the first place is the class token's.
void FillExtra(const Tensor& input, HostTensor& tensor) {
  const int64_t places = input.shape.size() > 1 ? input.shape[1] : 1;
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const int64_t place = i % places;
    if (input.name == "positions") tensor.Set(i, static_cast<double>(place));
    if (input.name == "patch_rows") tensor.Set(i, place == 0 ? -1 : 0);
  }
}

// Images [b, c, side, side] as patches [b, 1 + patches, c, size, size].
bool FillPatches(const std::string& path, HostTensor& tensor) {
  const Shape& shape = tensor.shape();
  const int64_t per_row =
      std::llround(std::sqrt(static_cast<double>(shape[1] - 1)));
  const int64_t size = shape[3];
  const int64_t side = per_row * size;
  HostTensor images({shape[0], shape[2], side, side}, tensor.dtype());
  if (!ReadElements<float>(path, images)) return false;
  int64_t out = 0;
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t place = 0; place < shape[1]; ++place) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t y = 0; y < size; ++y) {
          for (int64_t x = 0; x < size; ++x, ++out) {
            if (place == 0) continue;
            const int64_t row = (place - 1) / per_row * size + y;
            const int64_t column = (place - 1) % per_row * size + x;
            tensor.Set(out, images.At(((b * shape[2] + c) * side + row) * side +
                                      column));
          }
        }
      }
    }
  }
  return true;
}

int Run(const std::string& path, const std::string& folder, int64_t batch,
        int64_t seq_len) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  const auto made = ImportOnnxComputation(path, options);
  if (!made) return Refuse(made.error());
  const Graph& graph = made->graph;
  std::vector<HostTensor> tensors;
  for (const Tensor& tensor : graph.tensors) {
    tensors.emplace_back(tensor.shape, tensor.dtype);
  }
  const auto files = PublishedFiles::Open(path, made->layout, graph);
  if (!files) return Refuse(files.error());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& weight = graph.tensors[i];
    if (weight.kind != TensorKind::kWeight) continue;
    Box whole;
    for (int64_t extent : weight.shape) whole.push_back({0, extent});
    const auto values = files->Read(weight, WholeBlock(whole));
    if (!values) return Refuse(values.error());
    for (size_t e = 0; e < values->size(); ++e) {
      tensors[i].Set(static_cast<int64_t>(e), (*values)[e]);
    }
  }
  std::set<TensorId> given;
  for (size_t i = 0; i < made->inputs.size(); ++i) {
    const TensorId id = made->inputs[i].tensor;
    if (!id.valid() || id.index() >= tensors.size()) continue;
    given.insert(id);
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
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& input = graph.tensors[i];
    if (input.kind != TensorKind::kInput || given.contains(TensorId(i))) {
      continue;
    }
    FillExtra(input, tensors[i]);
    for (size_t e = 0; e < input.values.size(); ++e) {
      tensors[i].Set(static_cast<int64_t>(e), input.values[e]);
    }
    if (input.name == "patches" && !FillPatches(folder + "/0.in", tensors[i])) {
      std::cerr << folder << "/0.in: expected images of these patches\n";
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
  std::ofstream used(folder + "/operators");
  for (const Node& node : graph.nodes) used << node.op->name << "\n";
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
  if (argc < 3 || argc > 5) {
    std::cerr
        << "usage: tessera_onnx_outputs FILE.onnx FOLDER [BATCH [SEQ_LEN]]\n";
    return 2;
  }
  return tessera::Run(argv[1], argv[2], argc > 3 ? std::atoll(argv[3]) : 0,
                      argc > 4 ? std::atoll(argv[4]) : 0);
}
