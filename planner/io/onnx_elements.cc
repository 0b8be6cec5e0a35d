#include "planner/io/onnx_elements.h"

#include <algorithm>
#include <cmath>

#include "planner/base/element_count.h"

namespace tessera {
namespace {

// 0 where there are more than any file has.
int64_t CountOf(const OnnxTensor& tensor) {
  constexpr double kMost = 1e15;
  return LargeElementCount(tensor.dims) > kMost ? 0 : ElementCount(tensor.dims);
}

}  // namespace

OnnxElementReader::OnnxElementReader(const OnnxTensor& tensor,
                                     const std::string& path)
    : tensor_(tensor) {
  if (tensor.typed.empty() && tensor.raw.empty()) {
    const std::string elsewhere = OnnxDataFile(path, tensor.location);
    if (!elsewhere.empty()) file_.open(elsewhere, std::ios::binary);
  }
}

double OnnxElementReader::At(int64_t i) {
  const auto at = static_cast<size_t>(i);
  if (!tensor_.typed.empty()) {
    return at < tensor_.typed.size() ? tensor_.typed[at] : NAN;
  }
  const bool wide = tensor_.type == kOnnxDouble;
  const bool narrow =
      tensor_.type == kOnnxFloat16 || tensor_.type == kOnnxBFloat16;
  const size_t size = wide ? 8 : narrow ? 2 : 4;
  OnnxTensor one;  // of no dimensions
  one.type = tensor_.type;
  if (!tensor_.raw.empty()) {
    if ((at + 1) * size > tensor_.raw.size()) return NAN;
    one.raw = tensor_.raw.substr(at * size, size);
  } else {
    one.raw.resize(size);
    file_.seekg(tensor_.offset + static_cast<int64_t>(at * size));
    if (!file_.read(one.raw.data(), static_cast<int64_t>(size))) return NAN;
  }
  return one.Values()[0];
}

int64_t PlaceOfComparedElement(int64_t i, int64_t count) {
  return count <= kMostComparedElements
             ? i
             : i * (count / kMostComparedElements) + i % 97;
}

std::optional<bool> AreEqualElements(const OnnxTensor& a, const OnnxTensor& b,
                                     const std::string& path) {
  const int64_t count = CountOf(a);
  OnnxElementReader of_a(a, path);
  OnnxElementReader of_b(b, path);
  if (std::isnan(of_a.At(0)) || std::isnan(of_b.At(0))) return std::nullopt;
  for (int64_t i = 0; i < std::min(count, kMostComparedElements); ++i) {
    const int64_t at = PlaceOfComparedElement(i, count);
    if (at < count && of_a.At(at) != of_b.At(at)) return false;
  }
  return true;
}

bool AreZeros(const OnnxTensor& tensor, const std::string& path) {
  OnnxElementReader reader(tensor, path);
  for (int64_t i = 0; i < CountOf(tensor); ++i) {
    if (reader.At(i) != 0) return false;
  }
  return true;
}

}  // namespace tessera
