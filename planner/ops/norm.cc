// Layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019) over the
// last dimension h. Results behind y are the statistics that backward reads:
// mean and reciprocal standard deviation, or the reciprocal root mean square.

#include "planner/ir/op.h"

namespace tessera {

std::vector<OpDef> NormOps() {
  return {
      {.name = "layer_norm",
       .summary = "layer norm with scale and shift",
       .rule = "bsh!,h,h->bsh,bs,bs",
       .adjoints = {{"layer_norm_dx", "dy0,x0,x1,y1,y2->dx0"},
                    {"layer_norm_dw", "dy0,x0,y1,y2->dx1,dx2"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0}}},
      {.name = "layer_norm_dx",
       .summary = "gradient of layer norm's input",
       .flops = FlopsPerPoint<11>,
       .linear = {{0}}},
      {.name = "layer_norm_dw",
       .summary = "gradients of layer norm's scale and shift",
       .flops = FlopsPerPoint<5>,
       .linear = {{0}}},
      {.name = "rms_norm",
       .summary = "root-mean-square norm with scale",
       .rule = "bsh!,h->bsh,bs",
       .adjoints = {{"rms_norm_dx", "dy0,x0,x1,y1->dx0"},
                    {"rms_norm_dw", "dy0,x0,y1->dx1"}},
       .flops = FlopsPerPoint<4>,
       .attributes = {{.name = "epsilon", .least = 0}}},
      {.name = "rms_norm_dx",
       .summary = "gradient of RMS norm's input",
       .flops = FlopsPerPoint<7>,
       .linear = {{0}}},
      {.name = "rms_norm_dw",
       .summary = "gradient of RMS norm's scale",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
  };
}

}  // namespace tessera
