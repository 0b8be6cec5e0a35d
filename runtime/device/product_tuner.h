#pragma once
// ProductTuner: a device's matrix products, where their algorithms can be
// chosen by timing. What is chosen decides about the bits of a product:
// runtime/product_choices.h lets all ranks of a job choose the same.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "runtime/kernels/cuda/matmul_choices.h"

namespace tessera {

class ProductTuner {
 public:
  virtual ~ProductTuner() = default;

  // The kind of device and the version of its library: what is chosen on one is
  // of no use to another.
  virtual std::string Maker() const = 0;

  // From text (Choices), with the name of its file for errors: kInvalidInput
  // where it is none, or of another maker.
  virtual Result<void> ReadChoices(std::string_view choices,
                                   std::string_view path) = 0;
  // All that was read, tuned or adopted so far.
  virtual std::string Choices() const = 0;

  // The products that have run without a choice, by the library's first guess,
  // since the last call.
  virtual std::vector<MatMulKey> TakeUntuned() = 0;

  // Times the algorithms of a product, by itself, and chooses the fastest; an
  // error, such as of no memory to time in, chooses nothing. Waits for all work
  // of the device without a look at peers: nothing that needs them may be under
  // way.
  virtual Result<MatMulChoice> Tune(const MatMulKey& key) = 0;
  // What runs from now on takes these.
  virtual void Adopt(const std::map<MatMulKey, MatMulChoice>& rows) = 0;
};

}  // namespace tessera
