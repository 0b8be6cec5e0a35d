#pragma once
// Where the weights of a Hugging Face model lie in its published files. A graph
// calls its weights as those files do (planner/io/huggingface.h), but has one
// of each projection, with a dimension for each factor, where a file may fuse
// them (c_attn, qkv_proj, query_key_value), transpose them (GPT-2's Conv1D) or
// keep one matrix for each expert.
//
// Layouts: what transformers 5.23 saves; tests/bench/published_weights.py holds
// each family to it.

#include <cstdint>
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
  // Transposed where not 0: element `r * columns + c` of the run is at
  // `offset + c * stride + r`. Else they follow each other there too.
  int64_t columns = 0;
  int64_t stride = 0;
  // The weight is what the file has plus this (Gemma's norms: 1).
  double added = 0;
};

// Whether the weights of models of `family` ("model_type") are known here.
bool HasPublishedWeights(std::string_view family);

// The pieces of a weight of `graph`, in order, which together are all of it.
// REQUIRES: HasPublishedWeights(family); the graph is of that family.
std::vector<PublishedPiece> PublishedPieces(std::string_view family,
                                            const Graph& graph,
                                            const Tensor& weight);

// What a tensor's name may have in front of it, or lack: models of one base
// were saved with and without their head ("transformer." of gpt2).
std::string_view PublishedPrefix(std::string_view family);

}  // namespace tessera
