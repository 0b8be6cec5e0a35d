#pragma once
// Weights as matrices, for an optimizer that keeps a number for each row and
// each column (Adafactor). A weight has a dimension for each factor, so that
// its rows may be several: "grdi" of a projection of queries has the rows (g r
// d) and the columns i.
//
// The operator that first reads a weight tells its form: rows are what of it
// the result has (outputs), columns what is summed or looked up (inputs), or
// the other way round, whichever stands first; in front may stand what another
// operand has, too (experts): a matrix for each of its indices. So Linear and
// Embedding have the form that they have in PyTorch. Of the weights of windows
// (convolutions) and of others of several dimensions the last two are the rows
// and the columns, as torch.optim.Adafactor takes them. What is added to a
// product (a bias) and what has one dimension is no matrix.
//
// Pure functions; thread-safe.

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

// Dimensions [0, batches) number the matrices, [batches, batches + rows) their
// rows, and those behind their columns. There are some of both.
struct MatrixForm {
  size_t batches = 0;
  size_t rows = 0;
  bool operator==(const MatrixForm&) const = default;
};

// Of the weights of a graph, in tensor order; nothing for what is no matrix.
std::vector<std::optional<MatrixForm>> MatrixForms(const Graph& graph);

// How many numbers an optimizer keeps that has one for each row, each column
// and each matrix, and one for each element of what is no matrix.
int64_t FactoredElements(const Graph& graph);

}  // namespace tessera
