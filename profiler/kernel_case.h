#pragma once
// What the profiler can time of a rank's own work: a kernel on its local shards
// or a copy, as a task of a lowered plan has it.

#include <map>
#include <vector>

#include "costmodel/price.h"
#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

struct KernelCase {
  // How the elements of an integer buffer are chosen; floats are random.
  enum class Fill : uint8_t { kRandom, kPositions, kIds };
  struct Buffer {
    DType dtype = DType::kFloat32;
    Shape shape;         // of rank 0's shard
    Shape global_shape;  // of the whole tensor
    Fill fill = Fill::kRandom;
  };

  const Kernel* kernel = nullptr;  // null: a copy of operands[0] to results[0]
  IndexRule rule;
  std::vector<Attribute> attributes;
  std::vector<Buffer> operands;
  std::vector<Buffer> results;
  int64_t ids = 1;  // kIds are below this
};

// The distinct compute and copy tasks of `plan`, by the keys under which the
// Pricer looks them up. Adds to `cases` what is not there yet. kNotFound for a
// task that no CPU kernel computes.
// REQUIRES: Validate(pricer.graph(), pricer.cluster(), plan) is empty.
Result<void> AddKernelCases(const Pricer& pricer, const Plan& plan,
                            const TrainingOptions& options,
                            std::map<ProfileKey, KernelCase>& cases);

// The buffers of a case with contents, and what runs it.
class PreparedKernel {
 public:
  explicit PreparedKernel(const KernelCase& kernel_case);
  void Run();

 private:
  std::vector<LocalTensor> Allocate(const std::vector<KernelCase::Buffer>& of);

  const KernelCase& case_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<LocalTensor> operands_;
  std::vector<LocalTensor> results_;
};

}  // namespace tessera
