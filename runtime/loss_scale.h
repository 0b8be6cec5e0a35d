#pragma once
// Dynamic loss scaling: gradients below fp16's smallest number vanish, so that
// the loss's gradient, and with it all others, is multiplied by a power of two,
// as large as the format allows (Micikevicius et al. 2018, section 3.2). The
// rule and its numbers are those of torch.amp.GradScaler, which has no least
// scale.

namespace tessera {

// The state, three fp32 numbers of Value::what "loss scale", equal on all
// ranks. A step whose sum of squared gradients is infinite or not a number is
// skipped and halves the scale (to no less than 1); kGrowthInterval good steps
// in a row double it, where the double is finite.
struct LossScale {
  float scale = 65536;
  float good_steps = 0;     // in a row
  float skipped_steps = 0;  // in all

  static constexpr int kNumbers = 3;
  static constexpr float kGrowthInterval = 2000;
};

}  // namespace tessera
