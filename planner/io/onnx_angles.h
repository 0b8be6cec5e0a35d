#pragma once
// Which rotary embedding (planner/ops/rotary.cc) has the cosines and sines that
// a file has. Thread-safe: functions without state.

#include <optional>
#include <string>
#include <vector>

#include "planner/io/onnx_fold.h"
#include "planner/ir/op.h"

namespace tessera::onnx {

struct Angles {
  std::string op;  // "rotary", "rotary_linear", ...
  std::vector<Attribute> attributes;
};

// The embedding of all features whose cosines and sines are rows of
// [.., places, features]; what is in front repeats them. It is told by the
// angles of place 1, so that of several embeddings which are the same, such as
// Llama 3.1's of twice the frequencies at half the positions, one is taken.
// Nothing where no embedding has these angles.
std::optional<Angles> AnglesOf(const OnnxConstant& cos,
                               const OnnxConstant& sin);

}  // namespace tessera::onnx
