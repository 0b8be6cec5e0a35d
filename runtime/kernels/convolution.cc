#include "runtime/kernels/convolution.h"

#include <span>
#include <vector>

namespace tessera {

ConvolutionCall ConvolutionCallOf(const KernelCall& call) {
  ConvolutionCall c;
  const Indices* of_image = nullptr;
  const Indices* of_weight = nullptr;
  const Indices* of_result = nullptr;
  // By their last factors.
  const auto find = [&](const std::vector<Indices>& sides,
                        std::span<const LocalTensor> locals) {
    for (size_t i = 0; i < sides.size(); ++i) {
      switch (call.rule->factors[sides[i].back()].letter) {
        case 'w':
          c.image = &locals[i];
          of_image = &sides[i];
          break;
        case 'l':
          c.weight = &locals[i];
          of_weight = &sides[i];
          break;
        case 'x':
          c.result = &locals[i];
          of_result = &sides[i];
          break;
        default:
          break;  // the bias
      }
    }
  };
  find(call.rule->operands, call.operands);
  find(call.rule->results, call.results);
  ConvolutionExtents& extents = c.extents;
  extents.samples = c.image->shape[0];
  c.tall = call.rule->FactorOf('k') >= 0;
  const Shape& weight = c.weight->shape;
  for (size_t d = 0; d + (c.tall ? 2 : 1) < weight.size(); ++d) {
    const int f = (*of_weight)[d];
    const bool read = Holds(*of_image, f);
    const bool made = Holds(*of_result, f);
    (read && made ? extents.groups
     : read       ? extents.in
                  : extents.out) *= weight[d];
  }
  return c;
}

}  // namespace tessera
