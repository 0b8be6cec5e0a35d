// Dense layer with optional bias: y[M,N] = x[M,K] w[N,K]^T + bias[N], where M,
// N and K are runs of factors: "bsi,oi+o->bso", "bsi,grdi+grd->bsgrd". The
// node gives the rule; x is (M, K), w is (N, K), y is (M, N), in these orders.

#include "planner/ir/op.h"

namespace tessera {

std::vector<OpDef> LinearOps() {
  return {
      {.name = "linear",
       .summary = "dense layer, optional bias",
       .op_class = OpClass::kMatmul,
       .adjoints = {{"linear_dx", "dy0,x1->dx0"},
                    {"linear_dw", "dy0,x0->dx1"},
                    {"linear_db", "dy0->dx2"}},
       .flops = FlopsPerPoint<2>},
      {.name = "linear_dx",
       .summary = "gradient of linear's input: dy w",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>},
      {.name = "linear_dw",
       .summary = "gradient of linear's weight: dy^T x",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>},
      {.name = "linear_db",
       .summary = "gradient of linear's bias: column sums of dy",
       .flops = FlopsPerPoint<1>},
  };
}

}  // namespace tessera
