#include "runtime/kernels/cpu/call.h"

#include <memory>
#include <vector>

namespace tessera {
namespace {

// The tensors with those of 16 bits replaced by fp32 copies.
class Widened {
 public:
  explicit Widened(std::span<const LocalTensor> stored)
      : stored_(stored), tensors_(stored.begin(), stored.end()) {
    for (LocalTensor& tensor : tensors_) {
      if (!Is16Bit(tensor.dtype)) continue;
      if (tensor.data != nullptr) {
        const int64_t n = tensor.elements();
        buffers_.emplace_back(new float[static_cast<size_t>(n)]);
        Widen(tensor.data, tensor.dtype, n, buffers_.back().get());
        tensor.data = buffers_.back().get();
      }
      tensor.dtype = DType::kFloat32;
    }
  }

  std::span<const LocalTensor> tensors() const { return tensors_; }

  void Round() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!Is16Bit(stored_[i].dtype)) continue;
      Narrow(tensors_[i].as<const float>(), stored_[i].elements(),
             stored_[i].dtype, stored_[i].data);
    }
  }

 private:
  std::span<const LocalTensor> stored_;
  std::vector<LocalTensor> tensors_;
  std::vector<std::unique_ptr<float[]>> buffers_;
};

}  // namespace

void RunWidened(const KernelCall& call, void (*kernel)(const KernelCall&)) {
  const Widened operands(call.operands);
  // Results are widened, too: kernels may add to them or update them.
  const Widened results(call.results);
  KernelCall widened = call;
  widened.operands = operands.tensors();
  widened.results = results.tensors();
  kernel(widened);
  results.Round();
}

}  // namespace tessera
