#pragma once
// The weights of a model in its published files: one safetensors file, or
// several with an index ("model.safetensors.index.json": "weight_map" has the
// file of each tensor), as Hugging Face keeps them, or an ONNX file. Which
// tensor has which weight planner/io/published_weights.h says; other models'
// files have the graph's own names and shapes.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/published_weights.h"
#include "planner/plan/transfer.h"
#include "runtime/onnx_tensors.h"
#include "runtime/safetensors.h"

namespace tessera {

// Owns the mapped files. Immutable; const functions may be called from several
// threads.
class PublishedFiles {
 public:
  // `path`: a safetensors file, an index, or a folder with one of them called
  // as Hugging Face does, or, of an ONNX model, an ONNX file, which must have
  // tensors of the same names and shapes. Errors name the file, and of a family
  // a tensor that no weight of the graph is made of: that of a layer that the
  // model lacks. (Masks and the like, which are no weights, a head that is tied
  // and parts that the family's graph leaves out are passed over.) `layout` and
  // `graph` outlive the files.
  static Result<PublishedFiles> Open(const std::string& path,
                                     const PublishedLayout& layout,
                                     const Graph& graph);

  // The elements of `here` in fp32, read alone; those of rows that pad a
  // vocabulary (planner/ir/vocabulary.h), which no file has, are 0. Errors name
  // the file and the tensor that is missing, or has another shape or no
  // floating-point type.
  Result<std::vector<float>> Read(const Tensor& weight,
                                  const Placement& here) const;

  // The head that the files have beside the table to which the graph ties its
  // own, where they differ (which their beginnings tell); empty: none.
  std::string HeadThatDiffers() const;

  // What is passed over of parts that the graph leaves out, a line for each:
  // "12 tensors of the part that reads images are passed over, such as '…'".
  const std::vector<std::string>& passed_over() const { return passed_over_; }

 private:
  PublishedFiles() = default;
  // The name that the files have for a tensor, if it is there.
  std::optional<std::string> NameOf(const std::string& tensor) const;
  // Sets passed_over_.
  Result<void> CheckAllAreUsed();
  // What a tensor that is no weight of the graph is of, if that may be.
  std::string_view PartOf(const std::string& tensor) const;
  bool IsZero(const std::string& tensor) const;
  // Behind the last file: how they have experts.
  void ReadForm();
  Result<TensorView> Find(const PublishedPiece& piece) const;

  std::string path_;
  const PublishedLayout* layout_ = nullptr;
  const Graph* graph_ = nullptr;
  std::map<TensorId, int64_t> padded_;  // PaddedWeights of the graph
  PublishedExperts experts_ = PublishedExperts::kEach;
  std::vector<std::string> passed_over_;
  std::optional<OnnxTensors> onnx_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> file_of_;  // by tensor
};

// A tensor to be published, and the parts of weights that it is made of: none
// where it is zero.
struct PublishedTensor {
  struct Part {
    const Tensor* weight = nullptr;
    PublishedPiece piece;
  };
  std::string name;
  Shape shape;
  std::vector<Part> parts;
};

// All tensors of a graph's weights, by name.
std::vector<PublishedTensor> PublishedTensors(
    const PublishedLayout& layout, const Graph& graph,
    PublishedExperts experts = PublishedExperts::kEach);

// An error where a tensor's elements are those of several weights, which once
// trained differ: an ONNX file may have equal vectors once.
Result<void> CheckCanBePublished(const PublishedLayout& layout,
                                 const Graph& graph);

// Puts a weight's elements, whole, in their places in a tensor.
void PutPiece(const PublishedPiece& piece, const float* weight, float* tensor);

}  // namespace tessera
