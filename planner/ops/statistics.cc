// A layer norm in parts, so that mean and deviation can be computed on
// different devices: mean = avg(x), std = sqrt(avg((x - avg(x))^2) + epsilon)
// and y = (x - mean) / std * scale + shift, over the last dimension h. The
// mean's sum can be split; the deviation needs whole rows.

#include "planner/ir/op.h"

namespace tessera {

std::vector<OpDef> StatisticsOps() {
  return {
      {.name = "row_mean",
       .summary = "mean over the last dimension",
       .rule = "bsh->bs",
       .adjoints = {{"row_mean_dx", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
      {.name = "row_mean_dx",
       .summary = "gradient of row_mean",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
      {.name = "row_std",
       .summary = "standard deviation over the last dimension",
       .rule = "bsh!->bs",
       .adjoints = {{"row_std_dx", "dy0,x0,y0->dx0"}},
       .flops = FlopsPerPoint<4>,
       .attributes = {{.name = "epsilon", .least = 0}}},
      {.name = "row_std_dx",
       .summary = "gradient of row_std",
       .flops = FlopsPerPoint<4>,
       .linear = {{0}}},
      {.name = "normalize",
       .summary = "(x - mean) / std * scale + shift",
       .rule = "bsh,bs,bs,h,h->bsh",
       .adjoints = {{"normalize_dx", "dy0,x2,x3->dx0"},
                    {"normalize_dmean", "dy0,x2,x3->dx1"},
                    {"normalize_dstd", "dy0,x0,x1,x2,x3->dx2"},
                    {"normalize_dw", "dy0,x0,x1,x2->dx3,dx4"}},
       .flops = FlopsPerPoint<4>},
      {.name = "normalize_dx",
       .summary = "gradient of normalize's input",
       .flops = FlopsPerPoint<2>,
       .linear = {{0}, {2}}},
      {.name = "normalize_dmean",
       .summary = "gradient of normalize's mean",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}, {2}}},
      {.name = "normalize_dstd",
       .summary = "gradient of normalize's deviation",
       .flops = FlopsPerPoint<5>,
       .linear = {{0}, {4}}},
      {.name = "normalize_dw",
       .summary = "gradients of normalize's scale and shift",
       .flops = FlopsPerPoint<5>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
