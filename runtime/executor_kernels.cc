// RankExecutor: what kernels a task calls on this rank, with which operands and
// attributes.

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "planner/base/fnv1a.h"
#include "planner/ir/running_average.h"
#include "planner/ir/statistics_dtype.h"
#include "planner/ir/vocabulary.h"
#include "runtime/executor.h"
#include "runtime/kernels/counter.h"

namespace tessera {
namespace {

// The dtype of scalars and statistics.
DType ScalarType(const Graph& graph) {
  return StatisticsDType(graph.dtype);
}

// The attributes that optimizer kernels read.
std::vector<Attribute> OptimizerAttributes(const TrainingOptions& options,
                                           bool weight_decay) {
  return {{"beta1", options.beta1},
          {"beta2", options.beta2},
          {"clip", options.clip},
          {"epsilon", options.epsilon},
          {"lr", options.learning_rate},
          {"weight_decay", weight_decay ? options.weight_decay : 0}};
}

// Those of factored kernels, whose state is of type `dtype`.
std::vector<Attribute> FactoredAttributes(const TrainingOptions& options,
                                          bool weight_decay, DType dtype) {
  const double machine = dtype == DType::kFloat64
                             ? std::numeric_limits<double>::epsilon()
                             : std::numeric_limits<float>::epsilon();
  return {{"beta2_decay", options.beta2_decay},
          {"d", options.d},
          {"epsilon1", options.epsilon1.value_or(machine)},
          {"epsilon2", options.epsilon2},
          {"lr", options.learning_rate},
          {"weight_decay", weight_decay ? options.weight_decay : 0}};
}

void SetAttribute(std::vector<Attribute>& attributes, std::string_view name,
                  double value) {
  for (Attribute& attribute : attributes) {
    if (attribute.name == name) attribute.value = value;
  }
}

// The dimensions of a value of a weight of `rank` dimensions that belong
// together: of a matrix its batches, rows and columns, or as many of these as
// the value has; of another weight all.
std::vector<size_t> GroupsOf(const std::optional<MatrixForm>& form, size_t rank,
                             size_t dims) {
  if (!form) return {dims};
  if (dims == rank) {
    return {form->batches, form->rows, rank - form->batches - form->rows};
  }
  if (dims <= form->batches) return {dims};
  return {form->batches, dims - form->batches};
}

// The lists of a factored optimizer's task (planner/lower/factored_update.h),
// and what its calls have of them: one for each piece, or weight.
class FactoredLists {
 public:
  FactoredLists(const TaskGraph& tasks, const Task& task,
                const FactoredKernel& kernel)
      : tasks_(tasks),
        kernel_(kernel),
        reads_(task.reads),
        writes_(task.writes) {
    while (!reads_.empty() && !tasks.value(reads_.back()).tensor.valid()) {
      scalars_.insert(scalars_.begin(), reads_.back());
      reads_.pop_back();
    }
    if (scalars_.empty()) scalars_.push_back(ValueId());
    for (ValueId read : reads_) {
      const TensorId weight = tasks.value(read).tensor;
      if (std::ranges::find(weights_, weight) == weights_.end()) {
        weights_.push_back(weight);
      }
    }
    if (kernel.piece_reads > 0) {
      pieces_ = (reads_.size() - Size(kernel.weight_reads) * weights_.size()) /
                Size(kernel.piece_reads);
    }
    const auto is_whole = [&](size_t entries, int of_pieces, int of_weights) {
      return entries ==
             Size(of_pieces) * pieces_ + Size(of_weights) * weights_.size();
    };
    TESSERA_CHECK(
        is_whole(reads_.size(), kernel.piece_reads, kernel.weight_reads) &&
        is_whole(writes_.size(), kernel.piece_writes, kernel.weight_writes))
        << task.kernel << " reads " << reads_.size() << " and writes "
        << writes_.size();
  }

  size_t calls() const {
    return kernel_.piece_reads == 0 ? weights_.size() : pieces_;
  }
  TensorId WeightOf(size_t call) const {
    return tasks_.value(reads_[call]).tensor;
  }
  // With the scalars: the clip coefficient, which is invalid where there is
  // none, and the loss scale.
  std::vector<ValueId> ReadsOf(size_t call) const {
    std::vector<ValueId> reads =
        EntriesOf(call, reads_, kernel_.piece_reads, kernel_.weight_reads);
    reads.insert(reads.end(), scalars_.begin(), scalars_.end());
    return reads;
  }
  std::vector<ValueId> WritesOf(size_t call) const {
    return EntriesOf(call, writes_, kernel_.piece_writes,
                     kernel_.weight_writes);
  }

 private:
  static size_t Size(int lists) { return static_cast<size_t>(lists); }

  std::vector<ValueId> EntriesOf(size_t call, const std::vector<ValueId>& of,
                                 int of_pieces, int of_weights) const {
    const auto weight = static_cast<size_t>(
        std::ranges::find(weights_, WeightOf(call)) - weights_.begin());
    std::vector<ValueId> entries;
    for (size_t list = 0; list < Size(of_pieces); ++list) {
      entries.push_back(of[list * pieces_ + call]);
    }
    for (size_t list = 0; list < Size(of_weights); ++list) {
      entries.push_back(
          of[Size(of_pieces) * pieces_ + list * weights_.size() + weight]);
    }
    return entries;
  }

  const TaskGraph& tasks_;
  const FactoredKernel& kernel_;
  std::vector<ValueId> reads_;  // without the scalars
  const std::vector<ValueId>& writes_;
  std::vector<ValueId> scalars_;
  std::vector<TensorId> weights_;
  size_t pieces_ = 0;
};

}  // namespace

Result<TaskCall> RankExecutor::MakeCall(const RankDevice& device,
                                        std::string_view kernel,
                                        std::vector<ValueId> reads,
                                        std::vector<ValueId> writes) const {
  TaskCall call;
  TESSERA_TRY(call.kernel, device.FindKernel(kernel));
  for (ValueId read : reads) {
    call.operands.push_back(read.valid() ? view_.local(read) : LocalTensor());
  }
  for (ValueId written : writes) call.results.push_back(view_.local(written));
  call.reads = std::move(reads);
  call.writes = std::move(writes);
  return call;
}

bool RankExecutor::ReadsPositions(const std::vector<ValueId>& values) const {
  bool some = false;
  for (ValueId id : values) {
    if (!id.valid() || tasks_.value(id).dtype != DType::kInt32) continue;
    const TensorId tensor = tasks_.value(id).tensor;
    if (!tensor.valid() || graph_.tensor(tensor).name != "positions") {
      return false;
    }
    some = true;
  }
  return some;
}

// Optimizer kernels: the task lists all weights of a block, and each is a call
// of its own on flat shards (Task::reads in planner/lower/task_graph.h).
class RankExecutor::ListCalls {
 public:
  // Adds the calls of a task to its work.
  using Maker = Result<void> (ListCalls::*)();

  ListCalls(RankExecutor& executor, const Task& task, KernelFacts& facts,
            TaskWork& work)
      : executor_(executor),
        view_(executor.view_),
        tasks_(executor.tasks_),
        graph_(executor.graph_),
        task_(task),
        facts_(facts),
        work_(work),
        device_(executor.DeviceOf(task)) {}

  // Null for other kernels.
  static Maker MakerOf(std::string_view kernel) {
    struct Row {
      std::string_view kernel;
      Maker maker;
    };
    static constexpr Row kRows[] = {
        {"clip_coefficient", &ListCalls::ClipCoefficient},
        {"cast", &ListCalls::Casts},
        {"stochastic_cast", &ListCalls::StochasticCasts},
        {"running_average", &ListCalls::RunningAverages},
        {"square_sum", &ListCalls::SquareSums},
    };
    if (MomentsOf(kernel)) return &ListCalls::Updates;
    const auto row = std::ranges::find(kRows, kernel, &Row::kernel);
    return row == std::end(kRows) ? nullptr : row->maker;
  }

 private:
  // The call is valid until the next one is added.
  Result<TaskCall*> Add(std::vector<ValueId> reads, std::vector<ValueId> writes,
                        bool weight_decay = false) {
    TESSERA_TRY(TaskCall call,
                executor_.MakeCall(device_, task_.kernel, std::move(reads),
                                   std::move(writes)));
    call.attributes = OptimizerAttributes(executor_.options_, weight_decay);
    work_.calls.push_back(std::move(call));
    return &work_.calls.back();
  }

  Result<void> ClipCoefficient() {
    TESSERA_RETURN_IF_ERROR(Add(task_.reads, task_.writes));
    return {};
  }

  Result<void> Casts() {
    for (size_t i = 0; i < task_.reads.size(); ++i) {
      TESSERA_RETURN_IF_ERROR(Add({task_.reads[i]}, {task_.writes[i]}));
    }
    return {};
  }

  Result<void> StochasticCasts() {
    for (size_t i = 0; i < task_.reads.size(); ++i) {
      const ValueId written = task_.writes[i];
      if (view_.IsAbsent(written)) continue;
      TESSERA_TRY(TaskCall* const call, Add({task_.reads[i]}, {written}));
      call->results[0] = view_.InWeight(written, call->run);
      call->attributes = executor_.RoundingAttributes(written);
    }
    return {};
  }

  Result<void> RunningAverages() {
    std::vector<double>& momenta = facts_.running_momenta;
    if (momenta.empty()) momenta = RunningMomenta(graph_);
    for (size_t i = 0; i < task_.writes.size(); ++i) {
      const ValueId written = task_.writes[i];
      if (view_.IsAbsent(written)) continue;
      TESSERA_TRY(TaskCall* const call, Add({task_.reads[i]}, {written}));
      const double kept = 1 - momenta[tasks_.value(written).tensor.index()];
      call->attributes = {{"rate", 1 - std::pow(kept, tasks_.microbatches)}};
    }
    return {};
  }

  Result<void> SquareSums() {
    const bool of_weights =
        !task_.writes.empty() && tasks_.value(task_.writes[0]).tensor.valid();
    return of_weights ? SquareSumsOfWeights() : SquareSumOfAll();
  }

  // Of parameters, a sum for each weight.
  Result<void> SquareSumsOfWeights() {
    for (ValueId sum : task_.writes) {
      bool first = true;
      for (ValueId read : task_.reads) {
        if (tasks_.value(read).tensor != tasks_.value(sum).tensor ||
            view_.IsAbsent(read)) {
          continue;
        }
        TESSERA_TRY(TaskCall* const call, Add({read}, {sum}));
        call->accumulate = !std::exchange(first, false);
      }
    }
    return {};
  }

  Result<void> SquareSumOfAll() {
    // Starts as zero: masks may leave nothing to add on this rank.
    if (!task_.accumulate) work_.zeroes = task_.writes;
    const DeviceGroup& group = tasks_.group(task_.group);
    for (size_t i = 0; i < task_.reads.size(); ++i) {
      const AxisSet mask = task_.masks.empty() ? 0 : task_.masks[i];
      if (group.Coordinate(view_.position(task_.group), mask) != 0) {
        continue;
      }
      TESSERA_TRY(TaskCall* const call, Add({task_.reads[i]}, task_.writes));
      call->accumulate = true;
    }
    return {};
  }

  // The optimizer's own kernel: parameters and their moments.
  Result<void> Updates() {
    const auto per_weight = 1 + static_cast<size_t>(*MomentsOf(task_.kernel));
    const size_t weights = task_.writes.size() / per_weight;
    TESSERA_CHECK(task_.writes.size() == weights * per_weight &&
                  task_.reads.size() >= weights &&
                  task_.reads.size() <= weights + 2)
        << task_.kernel << " reads " << task_.reads.size() << " and writes "
        << task_.writes.size();
    // The coefficient, and the loss scale.
    std::vector<ValueId> scalars(
        task_.reads.begin() + static_cast<int64_t>(weights), task_.reads.end());
    if (scalars.empty()) scalars.push_back(ValueId());
    for (size_t w = 0; w < weights; ++w) {
      const auto written =
          task_.writes.begin() + static_cast<int64_t>(w * per_weight);
      if (view_.IsAbsent(*written)) continue;
      const TensorId weight = tasks_.value(*written).tensor;
      std::vector<ValueId> reads = {task_.reads[w]};
      reads.insert(reads.end(), scalars.begin(), scalars.end());
      TESSERA_TRY(TaskCall* const call,
                  Add(std::move(reads),
                      {written, written + static_cast<int64_t>(per_weight)},
                      graph_.tensor(weight).weight_decay &&
                          OptimizerNamed(task_.kernel).decays));
      if (!scalars[0].valid()) {
        TESSERA_TRY(call->operands[1].data,
                    executor_.buffers_.One(device_, ScalarType(graph_)));
        call->operands[1].dtype = ScalarType(graph_);
      }
    }
    return {};
  }

  RankExecutor& executor_;
  const RankView& view_;
  const TaskGraph& tasks_;
  const Graph& graph_;
  const Task& task_;
  KernelFacts& facts_;
  TaskWork& work_;
  RankDevice& device_;
};

// A kernel of a graph's node, or one without a node that works alike ("sum").
Result<void> RankExecutor::PrepareCompute(const Task& task, KernelFacts& facts,
                                          TaskWork& work) {
  if (const ListCalls::Maker make = ListCalls::MakerOf(task.kernel)) {
    ListCalls calls(*this, task, facts, work);
    TESSERA_RETURN_IF_ERROR((calls.*make)());
    PlanLaunches(work);
    return {};
  }
  if (const FactoredKernel* kernel = FindFactoredKernel(task.kernel)) {
    return PrepareFactoredKernel(task, *kernel, facts, work);
  }
  const int here = view_.position(task.group);
  const DeviceGroup& group = tasks_.group(task.group);
  TESSERA_TRY(TaskCall call,
              MakeCall(DeviceOf(task), task.kernel, task.reads, task.writes));
  for (size_t i = 0; i < task.masks.size(); ++i) {
    if (group.Coordinate(here, task.masks[i]) == 0) continue;
    call.reads[i] = ValueId();
  }
  if (task.node.valid()) {
    call.rule = &graph_.node(task.node).rule;
    call.attributes = graph_.node(task.node).attributes;
  }
  if (task.kernel == "dropout" && lender_ != nullptr) {
    SetAttribute(call.attributes, "probability", 0);
  }
  if (task.kernel.starts_with("tracked_") && lender_ != nullptr) {
    SetAttribute(call.attributes, "momentum", -1);  // norms by the averages
  }
  call.reads_positions = ReadsPositions(call.reads);
  call.alone = std::ranges::all_of(
      task.writes, [this](ValueId value) { return view_.IsAlone(value); });
  call.accumulate = task.accumulate;
  if (call.accumulate && !call.kernel->accumulates) {
    return InvalidInput("kernel '" + std::string(task.kernel) +
                        "' does not accumulate");
  }
  work.calls.push_back(std::move(call));
  return {};
}

Result<void> RankExecutor::PrepareFactoredKernel(const Task& task,
                                                 const FactoredKernel& kernel,
                                                 KernelFacts& facts,
                                                 TaskWork& work) {
  RankDevice& device = DeviceOf(task);
  if (facts.matrix_forms.empty()) {
    const std::vector<TensorId> weights = Weights(graph_);
    const auto forms = MatrixForms(graph_);
    for (size_t w = 0; w < weights.size(); ++w) {
      facts.matrix_forms.emplace(weights[w], forms[w]);
    }
  }
  const FactoredLists lists(tasks_, task, kernel);
  const std::map<TensorId, int64_t> padded = PaddedWeights(graph_);
  std::set<TensorId> begun;
  for (size_t i = 0; i < lists.calls(); ++i) {
    const std::vector<ValueId> results = lists.WritesOf(i);
    if (view_.IsAbsent(results[0])) continue;
    const std::vector<ValueId> operands = lists.ReadsOf(i);
    TESSERA_TRY(TaskCall call,
                MakeCall(device, task.kernel, operands, results));
    const TensorId id = lists.WeightOf(i);
    const Tensor& weight = graph_.tensor(id);
    call.attributes = FactoredAttributes(options_, weight.weight_decay,
                                         tasks_.value(results[0]).dtype);
    call.accumulate = !begun.insert(id).second;
    if (kernel.piece_reads > 0) call.run = view_.placement(operands[0]).run;
    // Dimensions of a matrix are brought together.
    const auto& form = facts.matrix_forms.at(id);
    const auto regroup = [&](const std::vector<ValueId>& ids,
                             std::vector<LocalTensor>& tensors) {
      for (size_t k = 0; k < ids.size(); ++k) {
        if (!ids[k].valid() || !tasks_.value(ids[k]).tensor.valid()) continue;
        const size_t dims = tasks_.value(ids[k]).shape.size();
        tensors[k] =
            view_.Regrouped(ids[k], GroupsOf(form, weight.shape.size(), dims));
      }
    };
    regroup(operands, call.operands);
    regroup(results, call.results);
    // Means are over the rows that are not padding, which are all zero.
    if (const auto rows = padded.find(id); rows != padded.end()) {
      int64_t& whole =
          call.operands[0].global_shape[form && form->batches == 0 ? 1 : 0];
      whole = whole / weight.shape[0] * rows->second;
    }
    if (!operands.back().valid()) {
      TESSERA_TRY(call.operands.back().data,
                  buffers_.One(device, ScalarType(graph_)));
      call.operands.back().dtype = ScalarType(graph_);
    }
    work.calls.push_back(std::move(call));
  }
  return {};
}

std::vector<Attribute> RankExecutor::RoundingAttributes(ValueId id) const {
  const Tensor& weight = graph_.tensor(tasks_.value(id).tensor);
  return {
      {"salt", static_cast<double>(Fnv1a().Add(weight.name).value() >> 11)}};
}

std::vector<std::byte> RankExecutor::RoundedMasters(ValueId parameter,
                                                    std::span<float> masters,
                                                    int64_t steps) const {
  const Value& value = tasks_.value(parameter);
  std::vector<std::byte> rounded(masters.size() *
                                 static_cast<size_t>(SizeOf(value.dtype)));
  LocalTensor from;
  from.data = masters.data();
  from.shape = {std::ssize(masters)};
  KernelCall call;
  LocalTensor to = view_.InWeight(parameter, call.run);
  to.data = rounded.data();
  const std::vector<Attribute> attributes = RoundingAttributes(parameter);
  call.operands = {&from, 1};
  call.results = {&to, 1};
  call.attributes = attributes;
  call.seed = seed_;
  call.step = steps - 1;
  const bool at_random = options_.stochastic_rounding && steps > 0;
  FindCpuKernel(at_random ? "stochastic_cast" : "cast").value()->run(call);
  return rounded;
}

void RankExecutor::set_learning_rate(double rate) {
  learning_rate_ = rate;
  for (TaskWork& work : work_) {
    for (TaskCall& call : work.calls) SetAttribute(call.attributes, "lr", rate);
  }
}

}  // namespace tessera
