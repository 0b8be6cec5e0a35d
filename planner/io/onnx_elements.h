#pragma once
// Elements of an ONNX file's tensors, in the file or beside it.

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "planner/io/onnx_file.h"

namespace tessera {

// Reads one element after another. The tensor must live as long. Not for
// several threads. `path`: of the file.
class OnnxElementReader {
 public:
  OnnxElementReader(const OnnxTensor& tensor, const std::string& path);

  // Not a number where it is not there.
  double At(int64_t i);

 private:
  const OnnxTensor& tensor_;
  std::ifstream file_;
};

// Elements that are compared: all of a small tensor.
inline constexpr int64_t kMostComparedElements = int64_t{1} << 14;
// The i-th of those of `count`: everywhere, and not in one column. It may be
// behind the last one.
int64_t PlaceOfComparedElement(int64_t i, int64_t count);

// Whether tensors of one shape have the same elements, as far as they are
// compared; nothing where elements are nowhere.
std::optional<bool> AreEqualElements(const OnnxTensor& a, const OnnxTensor& b,
                                     const std::string& path);

// Whether all elements are 0; false where they are nowhere.
bool AreZeros(const OnnxTensor& tensor, const std::string& path);

}  // namespace tessera
