#pragma once
// Where the weights of a model lie in its published files: of a Hugging Face
// model as its family has them, of an ONNX file as its importer reads them.
//
// A graph calls its weights as a family's files do (planner/io/huggingface.h),
// but has one of each projection, with a dimension for each factor, where a
// file may fuse them (c_attn, qkv_proj, query_key_value), transpose them
// (GPT-2's Conv1D) or keep one matrix for each expert.
//
// Families: what transformers 5.24 saves; tests/bench/published_weights.py
// holds each of them to it.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"

namespace tessera {

// A run of a weight's elements, row-major, and where they are in a tensor of
// the files.
struct PublishedPiece {
  std::string tensor;
  Shape shape;  // of that tensor
  int64_t begin = 0;
  int64_t count = 0;
  int64_t offset = 0;  // of the first of them in the tensor
  // The run as a row-major block, each of whose dimensions has a stride in the
  // tensor; empty: its elements follow each other there too.
  struct Dim {
    int64_t extent = 1;
    int64_t stride = 1;
  };
  std::vector<Dim> block;
  // The weight is what the file has plus this (Gemma's norms: 1).
  double added = 0;
  // The weight is the sum of this run and of these, as long each (an LSTM has
  // two biases). Written back, they are 0.
  std::vector<PublishedPiece> plus;
  // The tensor that has it in files without `tensor`: of several that are equal
  // an ONNX file may have one. Empty: none.
  std::string stored_as;

  // Of element `i` of the run, its place in the tensor.
  int64_t PlaceOf(int64_t i) const;
};

// Where the weights of a graph lie in files of its model.
struct PublishedLayout {
  std::string family;  // "model_type" of a config.json, or empty
  bool onnx = false;
  // Of an ONNX model, by weight: what PublishedPieces gives for a family.
  std::map<std::string, std::vector<PublishedPiece>, std::less<>> pieces = {};
};

// Whether the weights of models of `family` ("model_type") are known here.
bool HasPublishedWeights(std::string_view family);

// How files have the experts of a mixture.
enum class PublishedExperts {
  kEach,  // "experts.3.up_proj.weight": a matrix for each one, as is published
  kFused  // "experts.gate_up_proj": of all, as transformers 5 has them in
          // memory
};

// The pieces of a weight of `graph`, in order, which together are all of it.
// REQUIRES: HasPublishedWeights(family); the graph is of that family.
std::vector<PublishedPiece> PublishedPieces(
    std::string_view family, const Graph& graph, const Tensor& weight,
    PublishedExperts experts = PublishedExperts::kEach);

// A tensor that a family's files have, though the graph has no such weight: it
// is zero in what is trained here.
struct PublishedZeros {
  std::string tensor;
  Shape shape;
};
std::vector<PublishedZeros> ZerosInFiles(std::string_view family,
                                         const Graph& graph);

// What a tensor's name may have in front of it, or lack: models of one base
// were saved with and without their head ("transformer." of gpt2).
std::string_view PublishedPrefix(std::string_view family);

// The name that a tensor has in older files, or in those with transformers 5's
// names in memory; its own where that is the same there.
std::string OtherPublishedName(std::string_view family, std::string tensor);

// What a tensor is of that a family's files may have, and the graph has nothing
// of: "the part that reads images"; empty: of nothing that is known.
std::string_view PartLeftOut(std::string_view family, const Graph& graph,
                             std::string_view tensor);

// Why transformers takes no files of this model, which are then as its graph
// has the weights; empty: it takes them.
std::string WhyNotPublished(const PublishedLayout& layout, const Graph& graph);

}  // namespace tessera
