#include "tests/support/plan_check.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <utility>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/plan_io.h"
#include "planner/lower/check_order.h"
#include "planner/lower/lower.h"
#include "planner/plan/stages.h"
#include "planner/plan/validate.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

// Candidates of which the generator takes the one that was needed most.
constexpr int kCandidates = 12;

const Cluster& ClusterOf(int ranks) {
  static auto* const clusters = new std::map<int, Cluster>();
  const auto [it, is_new] = clusters->try_emplace(ranks);
  if (is_new) {
    it->second = MakeCluster("local-cpu:" + std::to_string(ranks)).value();
  }
  return it->second;
}

// Whether some ranks of a group may send nothing of what others hold alike,
// where a prediction lets all stage a message.
bool ReplicasRest(const TaskGraph& tasks, GroupId group) {
  return std::any_of(
      tasks.tasks.begin(), tasks.tasks.end(), [&](const Task& task) {
        return task.kind == TaskKind::kSend && task.group == group &&
               tasks.value(task.reads[0]).layout.sharded() !=
                   tasks.group(group).all_axes();
      });
}

// What is predicted for a rank by its own shards is never less than the truth,
// up to the scalar 1 that an optimizer without clipping reads, and little more:
// small shards may by chance lie in an order that needs no staging. What is
// predicted for the fullest of a set is at least that. Concurrent streams may
// hold less than issue order would.
std::string ComparePeaks(const TaskGraph& tasks, MemoryTier tier,
                         bool concurrent, const std::vector<MemoryUse>& peaks) {
  constexpr int64_t kScalar = 8;
  const std::vector<MemoryUse> of_sets = PeakMemory(tasks, tier);
  const std::vector<DeviceSet> sets = DeviceSets(tasks.plan_groups());
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::vector<MemoryUse> of_ranks =
        PeakMemoryOf(tasks, sets[i].devices, tier);
    bool above = concurrent;
    for (GroupId group : sets[i].groups) {
      above = above || ReplicasRest(tasks, group);
    }
    for (size_t d = 0; d < of_ranks.size(); ++d) {
      const DeviceId device = sets[i].devices[d];
      const int64_t actual = peaks[device.index()].total.value;
      const int64_t expected = of_ranks[d].total.value;
      const int64_t most = of_sets[i].total.value;
      if (expected + kScalar >= actual &&
          (above || 20 * expected <= 21 * actual) && most >= expected) {
        continue;
      }
      return "peak " + std::string(NameOf(tier)) + " memory of rank " +
             std::to_string(device.value) + ": " + std::to_string(actual) +
             " bytes, predicted " + std::to_string(expected) + ", and " +
             std::to_string(most) + " for the fullest rank";
    }
  }
  return "";
}

std::string CheckPrice(const Graph& graph, const Cluster& cluster,
                       const Plan& plan, const TrainingOptions& options) {
  const Evaluator evaluator(graph, cluster, nullptr, options);
  const Evaluation fast = evaluator.Evaluate(plan);
  const TaskGraph tasks = Lower(graph, cluster, plan, options);
  const Timeline exact =
      Simulate(evaluator.pricer(), tasks, {.share_links = false});
  if (fast.step_time != exact.step_time) {
    return "the evaluator says " + std::to_string(fast.step_time.picoseconds) +
           " ps, the simulator " + std::to_string(exact.step_time.picoseconds);
  }
  if (fast.memory != PeakMemory(tasks)) {
    return "the evaluator predicts other memory than the task graph takes";
  }
  return "";
}

std::string CheckFile(const Graph& graph, const Plan& plan) {
  const std::string path =
      (std::filesystem::temp_directory_path() /
       ("tessera.plan_check." + std::to_string(getpid()) + ".txtpb"))
          .string();
  if (auto written = WritePlan(path, graph, plan); !written) {
    return written.error().ToString();
  }
  const auto read = ReadPlan(path, graph);
  std::filesystem::remove(path);
  if (!read) return read.error().ToString();
  return *read == plan ? "" : "the plan's file holds another plan";
}

}  // namespace

TrainInMemoryOptions CheckedRun(int optimizer) {
  TrainInMemoryOptions run = {
      .training = {.learning_rate = 0.01, .clip = 0.01, .epsilon = 1e-3}};
  if (optimizer == 1) {
    run.training.optimizer = "adafactor";
    run.training.epsilon1 = 1e-9;  // of gradients as short as they are clipped
  }
  return run;
}

PlanChecker::Model& PlanChecker::ModelOf(const GraphSpec& spec) {
  std::unique_ptr<Model>& model = models_[ToText(spec)];
  if (model == nullptr) model = std::make_unique<Model>(spec);
  return *model;
}

const Trained& PlanChecker::SerialOf(const GraphSpec& spec, int microbatches,
                                     int optimizer) {
  Model& model = ModelOf(spec);
  // Batch norms are over a microbatch; others do not see them.
  if (spec.image != 2) microbatches = 1;
  std::optional<Trained>& serial = model.serial[{microbatches, optimizer}];
  if (!serial) {
    const TrainInMemoryOptions run = CheckedRun(optimizer);
    const Plan plan = *MakePlan(model.index, {.microbatches = microbatches});
    auto trained = TrainInMemory(
        model.graph, Lower(model.graph, ClusterOf(1), plan, run.training), run);
    TESSERA_CHECK(trained.has_value()) << trained.error().ToString();
    serial = *std::move(trained);
  }
  return *serial;
}

std::optional<Plan> PlanChecker::ValidPlan(const Case& c) {
  const Model& model = ModelOf(c.graph);
  std::optional<Plan> plan = MakePlan(model.index, c.plan);
  if (!plan || !IsValid(model.index, ClusterOf(RanksOf(c.plan)), *plan)) {
    return {};
  }
  return plan;
}

std::string PlanChecker::Check(const Case& c) {
  const auto plan = ValidPlan(c);
  if (!plan) return "";
  return Check(c.graph, ClusterOf(RanksOf(c.plan)), *plan, c.plan.optimizer,
               c.plan.key);
}

std::string PlanChecker::Check(const GraphSpec& spec, const Cluster& cluster,
                               const Plan& plan, int optimizer, int key) {
  const Graph& graph = ModelOf(spec).graph;
  if (std::string wrong = CheckFile(graph, plan); !wrong.empty()) return wrong;
  if (std::string wrong =
          CheckPrice(graph, cluster, plan, CheckedRun(optimizer).training);
      !wrong.empty()) {
    return wrong;
  }
  return CheckTraining(spec, cluster, plan, optimizer, key, nullptr);
}

std::string PlanChecker::CheckTraining(const Case& c, const Change& change) {
  const auto plan = ValidPlan(c);
  if (!plan) return "";
  return CheckTraining(c.graph, ClusterOf(RanksOf(c.plan)), *plan,
                       c.plan.optimizer, c.plan.key, change);
}

std::string PlanChecker::CheckTraining(const GraphSpec& spec,
                                       const Cluster& cluster, const Plan& plan,
                                       int optimizer, int key,
                                       const Change& change) {
  const Graph& graph = ModelOf(spec).graph;
  TrainInMemoryOptions run = CheckedRun(optimizer);
  TaskGraph tasks = Lower(graph, cluster, plan, run.training);
  if (change) {
    if (!change(tasks)) return "";
  } else if (const auto errors = CheckOrder(tasks, graph); !errors.empty()) {
    return errors[0].ToString();
  }
  constexpr std::array kStreams = {StreamsRun::kInOrder, StreamsRun::kOnThreads,
                                   StreamsRun::kInQueues,
                                   StreamsRun::kOnLoopback};
  run.streams = kStreams[static_cast<size_t>(key) % kStreams.size()];
  run.graphs = run.streams >= StreamsRun::kInQueues &&
               static_cast<size_t>(key) / kStreams.size() % 2 == 1;
  const auto trained = TrainInMemory(graph, tasks, run);
  if (!trained) return trained.error().ToString();
  std::string wrong =
      Difference(*trained, SerialOf(spec, plan.microbatches, optimizer));
  // In queues memory is taken once, for all of a step.
  const bool concurrent = run.streams == StreamsRun::kOnThreads;
  const bool in_queues = run.streams >= StreamsRun::kInQueues;
  if (wrong.empty() && !in_queues) {
    wrong =
        ComparePeaks(tasks, MemoryTier::kDevice, concurrent, trained->peaks);
  }
  if (wrong.empty() && !in_queues) {
    wrong =
        ComparePeaks(tasks, MemoryTier::kHost, concurrent, trained->host_peaks);
  }
  if (wrong.empty()) {
    wrong = ComparePeaks(tasks, MemoryTier::kFile, false, trained->files);
  }
  return wrong;
}

CaseGenerator::CaseGenerator(uint64_t seed, int models, PlanChecker& checker)
    : rng_(seed), checker_(checker) {
  for (int i = 0; i < models; ++i) models_.push_back(RandomGraphSpec(rng_));
}

Case CaseGenerator::Next(RowSet wanted) {
  std::optional<Case> best;
  RowSet best_rows = 0;
  int64_t best_count = 0;
  for (int made = 0; made < kCandidates;) {
    Case c;
    c.graph = models_[rng_.Below(static_cast<uint32_t>(models_.size()))];
    c.plan = RandomPlanSpec(c.graph, rng_);
    const auto plan = checker_.ValidPlan(c);
    if (!plan) continue;
    const RowSet rows = RowsOf(checker_.ModelOf(c.graph).index, *plan);
    if (wanted != 0 && (rows & wanted) == 0) continue;
    ++made;
    const int64_t count = coverage_.Rarest(rows);
    if (best && count >= best_count) continue;
    best = c;
    best_rows = rows;
    best_count = count;
  }
  coverage_.Add(best_rows);
  return *best;
}

Case Shrink(const Case& c, const std::function<bool(const Case&)>& fails) {
  Case smallest = c;
  const size_t fields = FieldsOf(smallest).size();
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t i = 0; i < fields; ++i) {
      const Field now = FieldsOf(smallest)[i];
      // The least value, half way to it, one less, and for a mesh one axis
      // less.
      const int values[] = {now.least, (*now.value + now.least) / 2,
                            *now.value / 10, *now.value % 10, *now.value - 1};
      for (int value : values) {
        if (value < now.least || value >= *now.value) continue;
        Case candidate = smallest;
        *FieldsOf(candidate)[i].value = value;
        if (!fails(candidate)) continue;
        smallest = candidate;
        smaller = true;
        break;
      }
    }
  }
  return smallest;
}

}  // namespace tessera
