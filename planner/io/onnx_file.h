#pragma once
// ONNX files (onnx.ai) as plain structs: nodes in their order, initializers,
// inputs and outputs. Of the values in other files only those of small tensors
// and of whole numbers are read, and none where such a file is not there: a
// graph follows from shapes. Thread-safe: functions without state.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"

namespace tessera {

// The element types of TensorProto.DataType that are told apart.
inline constexpr int kOnnxFloat = 1;
inline constexpr int kOnnxInt32 = 6;
inline constexpr int kOnnxInt64 = 7;
inline constexpr int kOnnxBool = 9;
inline constexpr int kOnnxFloat16 = 10;
inline constexpr int kOnnxDouble = 11;
inline constexpr int kOnnxBFloat16 = 16;
bool IsOnnxFloat(int type);  // of any width

struct OnnxTensor {
  std::string name;
  int type = 0;
  Shape dims;
  // One of both has the elements; none where they are in another file.
  std::string raw;
  std::vector<double> typed;
  // Such a file, beside this one, where it was not read, and the place in it.
  std::string location;
  int64_t offset = 0;
  // Whether it is, or is made of, a parameter; else a buffer, or computed from
  // numbers alone. Nothing where the file does not say: PyTorch's newer
  // exporter does.
  std::optional<bool> is_parameter;
  // Whether it was computed from others when the file was written, and from
  // which parameters, where the file says so.
  bool is_folded = false;
  std::vector<std::string> made_of;
  // Whether from nothing else, by one step: laid out otherwise.
  bool is_copy = false;
  // Whether a step of it repeats elements, by its name.
  bool is_repeated = false;
  // What was computed on the way from its parameters, where that is more than
  // to lay them out otherwise: "exp", "div".
  std::string arithmetic;
  // Of planner/io/onnx_parameters.h. Whether all that reads it reads one
  // parameter; else vectors that several nodes read may be several, which were
  // equal when the file was written.
  bool is_one = false;
  // The tensor in the file that has its numbers, where it has no others.
  std::string stored_as;
  // The tensor that it is a copy of, which is read in its place.
  std::string copy_of;
  // The parameter whose transpose it is (planner/io/onnx_transposes.h).
  std::string transpose_of;

  // All elements, row by row, as doubles (integers of up to 53 bits are exact);
  // empty where the file does not have as many as the dimensions say.
  std::vector<double> Values() const;
};

struct OnnxAttribute {
  std::string name;
  double f = 0;
  int64_t i = 0;
  std::string s;
  std::vector<double> floats;
  std::vector<int64_t> ints;
  std::vector<std::string> strings;
  OnnxTensor t;
};

// A note of PyTorch's newer exporter: of which call of PyTorch a node is a part
// ("linear_3"), what that reads, by PyTorch's names, and the path of the module
// that has it.
struct TorchCall {
  std::string name;  // empty: the file does not say
  std::vector<std::string> reads;
  std::string module;
};

struct OnnxNode {
  std::string name;  // may be empty
  std::string op;    // with its domain, where it is not the standard one
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::vector<OnnxAttribute> attributes;
  TorchCall call;

  // Null where the node lacks it.
  const OnnxAttribute* Find(std::string_view attribute) const;
  int64_t Int(std::string_view attribute, int64_t fallback) const;
  double Float(std::string_view attribute, double fallback) const;
  std::vector<int64_t> Ints(std::string_view attribute,
                            std::vector<int64_t> fallback) const;
  std::string Text(std::string_view attribute, std::string fallback) const;
};

struct OnnxDimension {
  int64_t extent = 0;  // 0: not known
  std::string symbol;  // may be empty
};

struct OnnxInput {
  std::string name;
  int type = 0;
  std::vector<OnnxDimension> dims;
};

// A tensor of a PyTorch model, as the file's notes list it.
struct TorchTensor {
  std::string name;  // "layers.0.weight"
  bool is_parameter = false;
};

struct OnnxModel {
  int64_t opset = 0;  // of the standard operators
  std::string producer;
  // By what PyTorch's calls have them as: "p_layers_0_weight".
  std::map<std::string, TorchTensor> torch_tensors;
  // Tensors of which the file does not say it: those that are taken for one
  // parameter, and for several (planner/io/onnx_parameters.h).
  std::vector<std::string> maybe_several;
  std::vector<std::string> maybe_one;
  std::vector<OnnxNode> nodes;
  std::vector<OnnxTensor> initializers;
  std::vector<OnnxInput> inputs;  // without those that have initializers
  std::vector<std::string> outputs;
  // Of what nodes make, by name, as far as the file says.
  std::map<std::string, std::vector<OnnxDimension>> shapes;
};

// The file beside that at `path` which has a tensor's elements; empty where
// `location` leads elsewhere.
std::string OnnxDataFile(const std::string& path, const std::string& location);

// kInvalidInput where the file is none, is cut off, has no graph or no standard
// opset, or names that are not printable. `where` is the path.
Result<OnnxModel> ReadOnnxFile(const std::string& path);

}  // namespace tessera
