#pragma once
// What the profiler can time of a rank's own work: a kernel on its local shards
// or a copy, as a task of a lowered plan has it.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/fused_kernels.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/plan.h"
#include "runtime/device/device.h"
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

  std::string kernel;  // empty: a copy of operands[0] to results[0]
  IndexRule rule;
  std::vector<Attribute> attributes;
  std::vector<Buffer> operands;
  std::vector<Buffer> results;
  int64_t ids = 1;  // kIds are below this
  bool accumulate = false;
  // What the ranks of the plans are predicted to spend on it, all together;
  // analytical. What is worth most is timed first.
  double seconds = 0;
  double run_s = 0;  // of one run, as predicted
};

// That of a compute or copy task, whose key (Pricer::ProfileKeyOf) is `key`.
KernelCase CaseOf(const Task& task, const TaskGraph& tasks, const Graph& graph,
                  const ProfileKey& key, const TrainingOptions& options);

// That of a fused kernel, from those of the kernels that it stands for, in the
// order in which they are fused (FusedNode::parts).
KernelCase FusedCaseOf(const KernelCase& first,
                       std::span<const KernelCase> others,
                       std::span<const FusedKernel* const> kernels);

// Whether the device has its kernel.
bool HasKernel(const RankDevice& device, const KernelCase& kernel_case);

// Where a buffer may begin behind `bytes` of others.
int64_t AlignedBytes(int64_t bytes);

// Runs take turns over so many sets of buffers of `set_bytes` each that
// `rotated` bytes of others are touched before a set is again, but not more
// than kMostSets. In a step a kernel seldom finds in a cache what it works on,
// since all that the step touches lies in between. A set of four times
// `rotated` is alone: of it a cache half as large as that keeps an eighth at
// most.
inline constexpr int64_t kMostSets = 64;
int64_t SetsInTurn(Bytes rotated, int64_t set_bytes);

// The sets of buffers of a case on a device, with contents, and what runs it.
class PreparedKernel {
 public:
  // Both outlive it. kNotFound for a kernel that the device has not,
  // kUnavailable where its memory is too small.
  static Result<std::unique_ptr<PreparedKernel>> Make(
      const KernelCase& kernel_case, RankDevice& device, Bytes rotated);
  // Waits for nothing; the device's memory is freed.
  ~PreparedKernel();
  PreparedKernel(const PreparedKernel&) = delete;
  PreparedKernel& operator=(const PreparedKernel&) = delete;

  // Enqueues it, on a device with queues.
  void Run();

 private:
  struct Buffers {
    std::vector<LocalTensor> operands;
    std::vector<LocalTensor> results;
  };
  PreparedKernel(const KernelCase& kernel_case, RankDevice& device)
      : case_(kernel_case), device_(device) {}
  Buffers At(std::byte* data) const;

  const KernelCase& case_;
  RankDevice& device_;
  const Kernel* kernel_ = nullptr;  // null: a copy
  void* memory_ = nullptr;          // of all sets
  std::vector<Buffers> sets_;
  size_t next_ = 0;
};

}  // namespace tessera
