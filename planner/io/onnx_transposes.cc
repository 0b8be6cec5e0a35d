#include "planner/io/onnx_transposes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "planner/io/onnx_elements.h"

namespace tessera {
namespace {

// Zeros and identities of two layers are equal before training; of random
// numbers half are different, or as many as 16 bits tell apart.
constexpr int64_t kLeastValues = 256;

// Nothing where elements are nowhere. `distinct`: only where there are so many
// values that they are of one matrix.
std::optional<bool> IsTranspose(const OnnxTensor& a, const OnnxTensor& b,
                                const std::string& path, bool distinct) {
  const int64_t rows = a.dims[0];
  const int64_t columns = a.dims[1];
  const int64_t count = rows * columns;
  OnnxElementReader of_a(a, path);
  OnnxElementReader of_b(b, path);
  if (std::isnan(of_a.At(0)) || std::isnan(of_b.At(0))) return std::nullopt;
  std::set<double> values;
  const int64_t compared = std::min(count, kMostComparedElements);
  for (int64_t i = 0; i < compared; ++i) {
    const int64_t at = PlaceOfComparedElement(i, count);
    if (at >= count) break;
    const double value = of_a.At(at);
    if (value != of_b.At(at % columns * rows + at / columns)) return false;
    if (std::ssize(values) < kLeastValues) values.insert(value);
    // Constants need not be read to their end.
    if (distinct && i == kLeastValues && values.size() < 4) return false;
  }
  return !distinct ||
         std::ssize(values) >= std::min(kLeastValues, count / 2 + 1);
}

// PyTorch's older exporter calls what it computes "onnx::MatMul_7".
bool IsComputed(const std::string& name) {
  return name.find("::") != std::string::npos;
}

}  // namespace

void FindTransposes(OnnxModel& model, const std::string& path) {
  std::map<std::pair<int64_t, int64_t>, std::vector<const OnnxTensor*>> of_size;
  for (const OnnxTensor& tensor : model.initializers) {
    if (tensor.dims.size() != 2 || !IsOnnxFloat(tensor.type) ||
        std::ranges::any_of(tensor.dims, [](int64_t d) { return d < 1; })) {
      continue;
    }
    if (tensor.is_folded || IsComputed(tensor.name)) continue;
    of_size[{tensor.dims[0], tensor.dims[1]}].push_back(&tensor);
  }
  for (OnnxTensor& tensor : model.initializers) {
    if (tensor.dims.size() != 2 || !IsOnnxFloat(tensor.type)) continue;
    const auto reversed = of_size.find({tensor.dims[1], tensor.dims[0]});
    if (reversed == of_size.end()) continue;
    for (const OnnxTensor* other : reversed->second) {
      const bool named =
          tensor.is_copy &&
          tensor.made_of == std::vector<std::string>{other->name};
      const bool older = !tensor.is_folded && IsComputed(tensor.name);
      if ((!named && !older) || other->type != tensor.type) continue;
      // Where elements are nowhere the file's word is all there is.
      if (IsTranspose(tensor, *other, path, older).value_or(named)) {
        tensor.transpose_of = other->name;
        break;
      }
    }
  }
}

}  // namespace tessera
