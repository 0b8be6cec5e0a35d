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

// The buffers of a case with contents, and what runs it. Runs take turns over
// as many sets of buffers as exceed a rank's share of the last-level cache: in
// a step a kernel seldom finds there what it works on, since all that the step
// touches lies in between.
class PreparedKernel {
 public:
  // Both outlive it.
  PreparedKernel(const KernelCase& kernel_case, ThreadPool& threads);
  void Run();

 private:
  struct Buffers {
    std::vector<std::vector<std::byte>> memory;
    std::vector<LocalTensor> operands;
    std::vector<LocalTensor> results;
  };
  void Allocate(const std::vector<KernelCase::Buffer>& of, Buffers& buffers,
                std::vector<LocalTensor>& tensors) const;

  const KernelCase& case_;
  ThreadPool& threads_;
  std::vector<Buffers> sets_;
  size_t next_ = 0;
};

}  // namespace tessera
