#include "planner/lower/fused_kernels.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr auto kSiblings = FusedKernel::Kind::kSiblings;
constexpr auto kBranches = FusedKernel::Kind::kBranches;
constexpr size_t kAny = FusedKernel::kAnyOperand;

constexpr FusedKernel kKernels[] = {
    // The activation of a dense layer, and its gradient with that of the input
    // of the layer behind.
    {.first = "linear", .second = "gelu", .name = "linear+gelu"},
    {.first = "linear_dx",
     .second = "gelu_dx",
     .name = "linear_dx+gelu_dx",
     .keeps_first = false},
    // A gate (SwiGLU, Shazeer 2020), and its gradients.
    {.first = "silu",
     .second = "multiply",
     .name = "silu+multiply",
     .operand = kAny,
     .alike = true,
     .late = true},
    {.first = "multiply",
     .second = "silu_dx",
     .name = "multiply+silu_dx",
     .keeps_first = false,
     .alike = true},
    {.first = "multiply+silu_dx",
     .second = "multiply",
     .name = "multiply+silu_dx+multiply",
     .kind = kBranches,
     .alike = true},
    // A residual's sum and the norm behind it.
    {.first = "add", .second = "layer_norm", .name = "add+layer_norm"},
    {.first = "add", .second = "rms_norm", .name = "add+rms_norm"},
    // The gradients of a norm, with that of the residual beside it, and of the
    // bias in front, whose dy they are.
    {.first = "layer_norm_dx",
     .second = "sum",
     .name = "layer_norm_dx+sum",
     .operand = kAny,
     .keeps_first = false},
    {.first = "rms_norm_dx",
     .second = "sum",
     .name = "rms_norm_dx+sum",
     .operand = kAny,
     .keeps_first = false},
    {.first = "layer_norm_dx",
     .second = "layer_norm_dw",
     .name = "layer_norm_dx+dw",
     .kind = kSiblings,
     .accumulates = true},
    {.first = "rms_norm_dx",
     .second = "rms_norm_dw",
     .name = "rms_norm_dx+dw",
     .kind = kSiblings,
     .accumulates = true},
    {.first = "layer_norm_dx+sum",
     .second = "layer_norm_dw",
     .name = "layer_norm_dx+sum+dw",
     .kind = kSiblings,
     .accumulates = true},
    {.first = "rms_norm_dx+sum",
     .second = "rms_norm_dw",
     .name = "rms_norm_dx+sum+dw",
     .kind = kSiblings,
     .accumulates = true},
    {.first = "layer_norm_dx+dw",
     .second = "linear_db",
     .name = "layer_norm_dx+dw+db",
     .accumulates = true},
    {.first = "layer_norm_dx+sum+dw",
     .second = "linear_db",
     .name = "layer_norm_dx+sum+dw+db",
     .accumulates = true},
    // Updates of fp32 masters, and the parameters that are computed with.
    {.first = "adamw", .second = "cast", .name = "adamw+cast"},
    {.first = "adam", .second = "cast", .name = "adam+cast"},
};

}  // namespace

std::span<const FusedKernel> FusedKernels() {
  return kKernels;
}

bool HasOneShape(const IndexRule& rule) {
  const auto alike = [&](const Indices& indices) {
    return indices == rule.results[0];
  };
  return std::ranges::all_of(rule.operands, alike) &&
         std::ranges::all_of(rule.results, alike);
}

}  // namespace tessera
