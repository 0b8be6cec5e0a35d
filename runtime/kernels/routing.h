#pragma once
// What the CPU's and CUDA's routers share.

namespace tessera {

// What the sum of the chosen scores has besides where they are divided by it:
// sigmoids may all be zero. As in transformers' and DeepSeek's own
// DeepseekV3TopkRouter; a softmax has a sum that this does not change.
inline constexpr double kOfNoScore = 1e-20;

}  // namespace tessera
