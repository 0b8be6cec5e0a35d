#include "costmodel/whatif/predict.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/rent.h"
#include "planner/base/element_count.h"
#include "planner/ir/host_size.h"
#include "planner/plan/matrix_form.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

// Of all devices; nothing where one has no figure.
std::optional<double> WattsOf(const Cluster& cluster) {
  double sum = 0;
  for (const Device& device : cluster.devices) {
    const double watts =
        cluster.device_types[static_cast<size_t>(device.type)].upkeep.power;
    if (watts == 0) return {};
    sum += watts;
  }
  return sum;
}

// 1 / sum of 1 / M over the devices that a plan uses: failures add up.
double MtbfOf(const Cluster& cluster, const std::vector<DeviceId>& used) {
  double rate = 0;
  for (const DeviceId device : used) {
    const double mtbf = cluster.TypeOf(device).upkeep.mtbf;
    if (mtbf == 0) return 0;
    rate += 1 / mtbf;
  }
  return 1 / rate;
}

// What a plan that cannot run has too little of; empty where it lacks none.
std::string_view LackOf(const Prediction& prediction) {
  if (prediction.memory > prediction.capacity) return "memory capacity";
  // All devices have enough, so what overflows is a host; without a price
  // nothing is known of memory.
  const bool host =
      prediction.priced() && prediction.evaluation.overflow > Bytes{};
  return host ? "host capacity" : "";
}

// What most of the step is due to.
void NameBottleneck(Prediction& result) {
  const Evaluation& evaluation = result.evaluation;
  if (!evaluation.feasible()) {
    result.bottleneck = LackOf(result);
    result.bottleneck_share = result.bottleneck.empty() ? 0 : 1;
    return;
  }
  if (!result.sensitivity && evaluation.breakdown == Breakdown{}) return;
  const std::vector<StepPart> parts = BindingParts(result);
  const auto most = std::ranges::max_element(parts, {}, &StepPart::share);
  result.bottleneck = most->name;
  result.bottleneck_share = most->share;
}

// All that are paid for: those that stand by, too.
const Cluster& RentedOf(const Case& of) {
  return of.left ? *of.left : of.cluster;
}

void FillUpkeep(const Case& of, const Plan& plan, const PredictOptions& options,
                Prediction& result) {
  const Cluster& cluster = of.cluster;
  const Graph& graph = *of.graph;
  const Cluster& rented = RentedOf(of);
  const std::vector<DeviceId> used = World(plan).devices;
  result.usd_per_hour = UsdPerHour(rented);
  result.watts = WattsOf(rented);
  if (!result.usd_per_hour) result.missing.emplace_back("device.price");
  if (!result.watts) result.missing.emplace_back("device.power");

  const double step = result.evaluation.step_time.seconds();
  GoodputInput input;
  input.step = step;
  input.every = options.run.checkpoint_every;
  input.mtbf = MtbfOf(cluster, used);
  if (input.mtbf == 0) result.missing.emplace_back("device.mtbf");
  input.restart = options.run.restart;
  // The slowest host is waited for.
  const BytesPerSecond written =
      SlowestOfHosts(cluster, used, &Host::storage_write);
  const BytesPerSecond read =
      SlowestOfHosts(cluster, used, &Host::storage_read);
  std::set<int> nodes_used;
  for (const DeviceId device : used) {
    nodes_used.insert(cluster.devices[device.index()].node);
  }
  const auto nodes = static_cast<double>(nodes_used.size());
  const double state = CheckpointBytes(graph, options.training) / nodes;
  if (written.value > 0) {
    input.checkpoint = state / written.value;
  } else {
    result.missing.emplace_back("host.storage_write");
  }
  if (read.value > 0) {
    input.restart += state / read.value;
    input.load = DataBytes(graph) / nodes / read.value;
  } else {
    result.missing.emplace_back("host.storage_read");
  }
  result.goodput = GoodputOf(input);
  if (options.run.tokens > 0) {
    result.run = CostOfRun(
        options.run.tokens,
        static_cast<double>(graph.global_batch * graph.seq_len),
        result.goodput.seconds_per_step, result.usd_per_hour, result.watts);
  }
}

}  // namespace

double CheckpointBytes(const Graph& graph, const TrainingOptions& training) {
  const OptimizerRow& optimizer = OptimizerNamed(training.optimizer);
  const int64_t numbers = (1 + optimizer.moments) * ParameterCount(graph) +
                          (optimizer.factored ? FactoredElements(graph) : 0);
  return 4.0 * static_cast<double>(numbers);
}

double DataBytes(const Graph& graph) {
  double bytes = 0;
  double label = 0;  // of a sample
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kInput || tensor.sample_dim < 0) continue;
    const double elements = LargeElementCount(tensor.shape);
    const std::string_view name = tensor.name;
    if (name == "tokens" || name == "source" || name == "dense" ||
        name.starts_with("categories.")) {
      bytes += 4 * elements;
    } else if (name == "images") {
      bytes += elements;
    } else if (name == "patches") {
      // The first patch of a sample is none of the image.
      bytes += elements * (1 - 1 / static_cast<double>(tensor.shape[1]));
    }
    if (name == "dense") label = 4;
    if (name == "images" || name == "patches") label = 1;
  }
  return bytes + label * static_cast<double>(graph.global_batch);
}

std::string_view EndlessText(const Prediction& prediction) {
  if (!prediction.run || std::isfinite(prediction.run->days)) return "";
  return "the run never ends: devices fail sooner than steps are saved "
         "(device.mtbf)";
}

std::optional<double> UtilizationOf(Flops work, const Cluster& cluster,
                                    const Plan& plan, DType dtype,
                                    Duration step) {
  const std::vector<DeviceId> used = World(plan).devices;
  const bool is_assumed = std::ranges::all_of(used, [&](DeviceId device) {
    return cluster.TypeOf(device).shared_memory;
  });
  if (is_assumed || work == Flops{} || step == Duration{}) return {};
  FlopsPerSecond peak;
  for (const DeviceId device : used) peak += cluster.TypeOf(device).Peak(dtype);
  return work.value / (step.seconds() * peak.value);
}

FullestDevice FullestOf(const Cluster& cluster, const Plan& plan,
                        const Evaluation& evaluation) {
  std::optional<FullestDevice> fullest;
  double most = 0;
  const auto look_at = [&](const std::vector<DeviceId>& devices,
                           const MemoryUse& use) {
    for (const DeviceId device : devices) {
      const Bytes capacity = cluster.TypeOf(device).memory;
      const double share = static_cast<double>(use.total.value) /
                           static_cast<double>(capacity.value);
      if (fullest && share <= most) continue;
      fullest = {use, capacity};
      most = share;
    }
  };
  for (const DeviceMemory& alike : evaluation.devices) {
    look_at(alike.devices, alike.memory);
  }
  if (fullest) return *fullest;
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    look_at(sets[s].devices, evaluation.memory[s]);
  }
  return *fullest;
}

std::vector<StepPart> BindingParts(const Prediction& prediction) {
  const Evaluation& evaluation = prediction.evaluation;
  const double bubble =
      evaluation.breakdown.idle.seconds() / evaluation.step_time.seconds();
  std::vector<StepPart> parts = {{"pipeline bubble", bubble}};
  if (!prediction.sensitivity) return parts;
  for (const Elasticity& e : prediction.sensitivity->resources) {
    auto part = std::ranges::find(parts, e.resource->part, &StepPart::name);
    if (part == parts.end()) part = parts.insert(part, {e.resource->part, 0});
    part->share += e.value * (1 - bubble);
  }
  return parts;
}

Prediction Predict(const Case& of, const Plan& plan,
                   const PredictOptions& options) {
  const Graph& graph = *of.graph;
  const Cluster& cluster = of.cluster;
  Prediction result;
  const Cluster& rented = RentedOf(of);
  result.devices = static_cast<int>(rented.devices.size());
  result.used = static_cast<int>(World(plan).devices.size());
  result.nodes = rented.num_nodes();
  result.global_batch = graph.global_batch;
  result.strategy = StrategyText(*of.index, cluster, plan);
  const Evaluator evaluator(graph, cluster, options.profile, options.training,
                            Evaluator::kUnlimited, of.whole.get());
  result.evaluation =
      options.fast ? evaluator.Evaluate(plan) : evaluator.Explain(plan);
  result.band = StepTimeBand(cluster, result.evaluation.sources);
  const double step = result.evaluation.step_time.seconds();
  result.tokens_per_s =
      static_cast<double>(graph.global_batch * graph.seq_len) / step;
  result.unit = UnitOf(graph);
  result.mfu = UtilizationOf(ModelFlops(graph), cluster, plan, graph.dtype,
                             result.evaluation.step_time);
  const FullestDevice fullest = FullestOf(cluster, plan, result.evaluation);
  result.memory = fullest.use.total;
  result.memory_use = fullest.use;
  result.capacity = fullest.capacity;
  if (options.sensitivity && result.priced()) {
    result.sensitivity = SensitivityOf(graph, cluster, plan, evaluator,
                                       options.profile, options.training);
  }
  NameBottleneck(result);
  FillUpkeep(of, plan, options, result);
  return result;
}

}  // namespace tessera
