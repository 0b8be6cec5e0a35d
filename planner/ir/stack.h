#pragma once
// Stack: the training software that runs on a cluster, as far as it decides how
// long a step takes and what it keeps: what its kernels are, how fast its host
// starts them, what it runs beside each other, and what lies in the devices'
// memory besides the values of the plan.
//
// A plain value. The default is Tessera's own runtime; other stacks are rows of
// planner/topology/stacks.h.

#include <cstdint>
#include <string>

#include "planner/base/units.h"

namespace tessera {

// What products of activations and weights are computed in.
enum class ProductType : uint8_t { kAsValues, kFp8, kFp4 };

enum class StackAttention : uint8_t {
  kFused,    // FlashAttention-2, on Hopper and later cuDNN's
  kFlash1,   // FlashAttention as it first was
  kUnfused,  // writes the scores of every pair of tokens to memory and reads
             // them back (product, softmax, dropout, product)
};

// Which activations, that ranks of a stage hold alike, cross to the next one in
// parts: each rank sends one, and the receivers gather them.
enum class SplitSends : uint8_t { kNever, kForward, kAlways };

// What becomes of the logits between the head and the loss.
enum class StackLogits : uint8_t {
  kAsValues,  // read by the loss as the head leaves them
  kFp32,      // copied to fp32, in which their softmax is kept for backward
  kNever,     // head and loss are one kernel, which never has all of them
};

// What a device's memory holds beyond what Tessera's own kernels keep.
struct StackMemory {
  // Masks of the dropouts on residuals, a byte an element, and where attention
  // is not fused the mask and the result of that on its probabilities
  // (Korthikanti et al. 2022, section 4.1). (Tessera draws them again.)
  bool dropout_masks = false;
  // Gradients of fp16 models in fp16, and of bf16 models in bf16, kept and
  // reduced; else in fp32.
  bool fp16_gradients = false;
  bool bf16_gradients = false;
  // These copied to fp32 for the step.
  bool gradient_copies = false;
  // Gradients that ZeRO cuts are whole until the end of the backward: their
  // reductions are combined into one.
  bool whole_gradients = false;
  // Of each of two flat buffers of an optimizer that is made for ZeRO: through
  // one go gradients to be reduced, through the other parameters that were
  // gathered.
  Bytes zero_bucket = {};
  StackLogits logits = StackLogits::kAsValues;
  // Of a process before its first tensor: the driver's context and the code of
  // kernels.
  Bytes context = {};
  // Buffers of each communicator that a device belongs to.
  Bytes communicator = {};
  // What the allocator holds of free blocks, over what lives for less than a
  // step.
  double fragmentation = 0;
  bool operator==(const StackMemory&) const = default;
};

struct Stack {
  std::string name = "tessera";
  std::string source = "Tessera's own runtime";
  // Of the host, to start the kernels of one operator's forward or backward,
  // of experts one after the other. A device that computes faster waits for it.
  Duration host_per_operator;
  // Whether communication runs beside compute.
  bool overlaps = true;
  StackAttention attention = StackAttention::kFused;
  // Layers that read the same activation (queries, keys and values; gate and
  // up) are one product.
  bool fuses_projections = false;
  // Elementwise operators that hand on to each other are one kernel, and the
  // kernel before a product rounds its operand (costmodel/fusion.h).
  bool fuses_elementwise = false;
  // Times that the loss goes over its logits in fp32, beyond the fused kernel
  // that reads them once in each direction. As they are: kernel_traffic is not
  // theirs.
  double logits_passes = 0;
  // Memory traffic of kernels between the products (norms, activations, sums)
  // over that of one pass over their operands and results.
  double kernel_traffic = 1;
  // Memory traffic of the optimizer's step over that of a fused kernel which
  // reads and writes each value once.
  double optimizer_traffic = 1;
  // What matrix products reach in a long step of what they reach alone: clocks
  // sink under sustained power, caches are cold. In (0, 1].
  double sustained = 1;
  // The share of the time of collectives of activations over tensor-parallel
  // ranks that no product hides. In [0, 1].
  double tensor_exposed = 1;
  // The same of the exchanges between tokens and experts: software may run them
  // beside another microbatch's products. In [0, 1].
  double experts_exposed = 1;
  // Whether a token is sent once to each host that has some of its experts, not
  // once for each expert.
  bool experts_once_per_host = false;
  // What gathers of cut parameters amid the passes (ZeRO-3) reach at most,
  // whatever the links do: they may come one by one, each waited for. 0: no
  // bound.
  BytesPerSecond sharded_bandwidth;
  // Of the host, for each rank that a cut parameter is gathered from, or its
  // gradient reduced to: of lists of tensors each is sliced and copied by
  // itself. Parameters below kLeastSharded elements are not cut in truth.
  Duration host_per_shard;
  static constexpr int64_t kLeastSharded = 100'000;
  SplitSends split_sends = SplitSends::kNever;
  ProductType products = ProductType::kAsValues;
  StackMemory memory;
  bool operator==(const Stack&) const = default;
};

}  // namespace tessera
