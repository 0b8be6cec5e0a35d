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

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "planner/base/append.h"
#include "planner/io/onnx.h"
#include "tests/support/host_tensor.h"
#include "tests/support/onnx_values.h"

namespace tessera {
namespace {

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

// Inputs that the data has and the file does not, as runtime/data fills them:
// of images in patches the first place is the class token's.
void FillExtra(const Tensor& input, HostTensor& tensor) {
  const int64_t places = input.shape.size() > 1 ? input.shape[1] : 1;
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const int64_t place = i % places;
    if (input.name.ends_with("positions")) {
      tensor.Set(i, static_cast<double>(place));
    }
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
  const auto fill = [&](TensorId id, HostTensor& tensor) -> Result<void> {
    const Tensor& input = graph.tensor(id);
    const auto given =
        std::ranges::find(made->inputs, id, &OnnxComputation::Input::tensor);
    if (given == made->inputs.end()) {
      FillExtra(input, tensor);
      if (input.name == "patches" && !FillPatches(folder + "/0.in", tensor)) {
        return InvalidInput("expected images of these patches",
                            folder + "/0.in");
      }
      return {};
    }
    const std::string file =
        folder + "/" + std::to_string(given - made->inputs.begin()) + ".in";
    const bool read = IsFloat(tensor.dtype())
                          ? ReadElements<float>(file, tensor)
                          : ReadElements<int32_t>(file, tensor);
    if (read) return {};
    return InvalidInput(
        "expected " + std::to_string(tensor.elements()) + " elements", file);
  };
  const auto tensors = ComputeOnnx(*made, path, fill);
  if (!tensors) return Refuse(tensors.error());
  std::ofstream used(folder + "/operators");
  for (const Node& node : graph.nodes) used << node.op->name << "\n";
  for (size_t i = 0; i < made->outputs.size(); ++i) {
    const OnnxComputation::Output& output = made->outputs[i];
    std::ofstream file(folder + "/" + std::to_string(i) + ".out",
                       std::ios::binary);
    for (double value : ValuesOf(output, *tensors)) {
      const auto single = static_cast<float>(value);
      file.write(reinterpret_cast<const char*>(&single), sizeof single);
    }
    std::string text;
    for (int64_t extent : output.shape) {
      AppendTo(text, " ", std::to_string(extent));
    }
    std::cout << text << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--operators") {
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
