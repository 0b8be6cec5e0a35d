#pragma once
// Kernel: runs one operator call of one rank on its local shards. A kernel has
// no state, allocates no result, and never communicates; the executor gives it
// row-major buffers, contiguous but for what RowsApart says. Kernels on
// redundant paths must be deterministic, since replicas have to stay bit-equal.
//
// Operands and results come in the order of the operator's rule; those of an
// adjoint in the order of its signature (AdjointDef). Statistics (mean,
// reciprocal deviation, log-sum-exp, states) and scalars may be fp32 or fp64,
// whatever the data's type; positions, ids and labels are int32.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "planner/ir/graph.h"
#include "planner/plan/layout.h"

namespace tessera {

class ThreadPool;
struct CudaQueue;

// One rank's block of a tensor. `offset` and `global_shape` place the block in
// the whole tensor (whole batch included), for operators that are keyed by
// global index or addressed by global ids.
struct LocalTensor {
  void* data = nullptr;  // null: an additive operand masked to zero here
  DType dtype = DType::kFloat32;
  Shape shape;
  Shape offset;
  Shape global_shape;
  // Where rows lie apart (RowsApart): element i, in row-major order, is at
  // i / row * row_stride + i % row. 0: there are no gaps.
  int64_t row = 0;
  int64_t row_stride = 0;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// What changes from step to step in a kernel's call.
struct StepNumbers {
  int64_t step = 0;  // 0-based optimizer step
  double learning_rate = 0;
};

// The same as a kernel gets it: by value, or where a call that is enqueued once
// runs in many steps, in the device's memory. Get is called where the kernel
// runs.
struct StepArgument {
  StepNumbers given;
  const StepNumbers* there = nullptr;

  constexpr StepNumbers Get() const {
    return there != nullptr ? *there : given;
  }
};

struct KernelCall {
  const IndexRule* rule = nullptr;
  std::span<const Attribute> attributes;
  std::span<const LocalTensor> operands;
  std::span<const LocalTensor> results;
  // Add to the results instead of overwriting them (weight gradients of later
  // microbatches, the loss). REQUIRES: Kernel::accumulates. Of cross_entropy's
  // results only the loss is added to, of (ghost_)batch_norm_dx's the gradients
  // of the weights. Attention's results are merged: they become those over the
  // keys of both calls.
  bool accumulate = false;
  // Of a factored optimizer's kernels: the elements of the first operand, and
  // of what else is of its shape, that are here (ZeRO's flat shards); the
  // buffers hold just these. None: all.
  std::optional<Range> run = {};
  uint64_t seed = 0;  // of the run
  int64_t step = 0;   // 0-based optimizer step
  // In the device's memory, read when the kernel runs: in place of `step` and
  // of the attribute "lr". Null: those.
  const StepNumbers* numbers = nullptr;
  int zigzag = 0;  // the sequence is in this order (Plan::zigzag)
  // Every element of attention's positions is its place in the whole row, so
  // that LocalTensor::offset tells what the CUDA kernels cannot read before
  // they are enqueued.
  bool places_are_positions = false;
  // On which the kernel may run; null: on the caller's thread alone. No bit of
  // a result depends on them.
  ThreadPool* threads = nullptr;
  // The order of sums may be any: runs need not be equal bit for bit, and no
  // other rank computes the same.
  bool any_order = false;
  // Where a CUDA kernel is enqueued (runtime/kernels/cuda/queue.h); null on the
  // CPU.
  CudaQueue* queue = nullptr;

  // REQUIRES: the attribute exists.
  double attribute(std::string_view name) const;
  // With 0 as learning rate where there is no attribute "lr".
  StepArgument step_argument() const;
};

// Which tensors of a call may have rows with gaps between them
// (LocalTensor::row).
enum class RowsApart { kNone, kFirstOperand, kResults };

struct Kernel {
  std::string_view name;  // the operator's, or "NAME.state"
  void (*run)(const KernelCall&);
  bool accumulates = false;  // honours KernelCall::accumulate
  // Several calls at once, with the results of one after the other, bit for
  // bit; null: there is no such form. The calls are of one task of the
  // optimizer: tensors have the same types in all of them, operands behind the
  // first are the same, and so are attributes but for weight_decay and salt. No
  // call writes what another one reads or writes, unless it accumulates.
  void (*run_list)(std::span<const KernelCall>) = nullptr;
  // Rows and gaps have multiples of 8 elements, addresses are of 16 bytes; of
  // fused kernels all tensors have one type then.
  RowsApart rows_apart = RowsApart::kNone;
};

// The CPU kernels, one for each row of kernels.def. They compute in fp64 or
// fp32 by the dtype of the call's first 16-bit tensor or else its first float
// one, with 16-bit data in fp32: operands are widened and results rounded once
// (runtime/float16.h), and fp32 results of 16-bit operands (gradients of
// weights) are not. Optimizer hyper-parameters arrive as attributes: lr, beta1,
// beta2, epsilon, weight_decay, clip; Adafactor's beta2_decay, epsilon1,
// epsilon2 and d.
std::span<const Kernel> CpuKernels();
Result<const Kernel*> FindCpuKernel(std::string_view name);

// The CUDA kernels, of the same names and meaning. They enqueue their work and
// return; the memory of operands and results is the GPU's. They compute in fp32
// (matrix products of 16-bit data on tensor cores, with fp32 sums), have no
// fp64, and give the same bits for the same call on the same device. Only
// where Tessera is built with CUDA.
std::span<const Kernel> CudaKernels();
Result<const Kernel*> FindCudaKernel(std::string_view name);
// Of the FusedKernels (planner/lower/fused_kernels.h), by name.
std::span<const Kernel> CudaFusedKernels();

}  // namespace tessera
