#include "runtime/kernels/alibi.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera {

std::vector<double> AlibiSlopes(const KernelCall& call, const LocalTensor& q) {
  const auto attribute = std::ranges::find(
      call.attributes, std::string_view("alibi_heads"), &Attribute::name);
  if (attribute == call.attributes.end()) return {};
  const auto power = static_cast<int64_t>(
      std::bit_floor(static_cast<uint64_t>(attribute->value)));
  const auto m = static_cast<double>(power);
  std::vector<double> slopes;
  for (int64_t g = q.offset[2]; g < q.offset[2] + q.shape[2]; ++g) {
    for (int64_t r = q.offset[3]; r < q.offset[3] + q.shape[3]; ++r) {
      const int64_t head = g * q.global_shape[3] + r;
      const auto i = static_cast<double>(head);
      slopes.push_back(std::exp2(head < power ? -8 * (i + 1) / m
                                              : -4 * (2 * (i - m) + 1) / m));
    }
  }
  return slopes;
}

}  // namespace tessera
