#include "costmodel/evaluate/step_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "costmodel/fusion.h"
#include "costmodel/source/cost_source.h"
#include "planner/base/element_count.h"
#include "planner/ir/host_size.h"
#include "planner/ir/running_average.h"
#include "planner/plan/whole_extents.h"

namespace tessera {
namespace {

// A product so large that nothing but its operations counts, to 1e-5.
constexpr double kLarge = 1 << 20;
// Below what is left of the rest.
constexpr double kSafe = 1 - 1e-4;

// The first floating-point type, as prices go by.
DType KernelType(const std::vector<DType>& operands,
                 const std::vector<DType>& results) {
  for (const auto* dtypes : {&operands, &results}) {
    const auto found = std::ranges::find_if(*dtypes, IsFloat);
    if (found != dtypes->end()) return *found;
  }
  return DType::kFloat32;
}

// The time of one operation of a product of unlimited size.
double SecondsPerFlop(const DeviceType& device, const Stack& stack,
                      const CostQuery& of) {
  CostQuery query;
  query.key.dtype = of.key.dtype;
  query.device = &device;
  query.op_class = of.op_class;
  query.flops = {2 * kLarge * kLarge * kLarge};
  if (of.matmul) {
    query.matmul = MatmulShape{1, kLarge, kLarge, kLarge, 1, 1};
    query.products = stack.products;
  }
  return kSafe * PriceOf(query, nullptr).seconds / query.flops.value;
}

// The same of a pair of a query and a key, in an attention of its widths.
double SecondsPerPair(const DeviceType& device, const CostQuery& of) {
  CostQuery query = of;
  query.device = &device;
  AttentionShape& shape = *query.attention;
  shape.batch = kLarge;
  shape.heads = shape.kv_heads = 1;
  shape.queries = shape.keys = kLarge;
  shape.pairs = kLarge * kLarge;
  query.bytes = {};
  return kSafe * PriceOf(query, nullptr).seconds / (shape.batch * shape.pairs);
}

// What a node takes at least on devices of the type, all shards together.
double LeastSeconds(const DeviceType& device, const Stack& stack,
                    const CostQuery& query) {
  if (query.op_class == OpClass::kMemory) {
    return SecondsFor(query.bytes,
                      device.memory_bandwidth * device.memory_efficiency);
  }
  if (!HasKernelTimes(device) || !(device.Peak(query.key.dtype).value > 0)) {
    CostQuery plain = query;
    plain.matmul.reset();
    return query.flops.value * SecondsPerFlop(device, stack, plain);
  }
  if (query.attention) {
    const AttentionShape& shape = *query.attention;
    if (query.score_passes == 0) {
      return shape.batch * shape.heads * shape.pairs *
             SecondsPerPair(device, query);
    }
    // Two products forward and four backward, of all pairs.
    CostQuery product = query;
    product.matmul = MatmulShape();
    return (query.backward ? 4 : 2) * shape.batch * shape.heads *
           shape.queries * shape.keys * (shape.qk_width + shape.v_width) *
           SecondsPerFlop(device, {}, product);
  }
  if (!query.matmul) {
    return query.flops.value * SecondsPerFlop(device, stack, query);
  }
  const MatmulShape& shape = *query.matmul;
  return 2 * shape.batch * shape.m * shape.n * shape.k *
         SecondsPerFlop(device, stack, query) / stack.sustained;
}

// What the optimizer's step takes at least.
struct LeastUpdate {
  double seconds = 0;  // on one device alone
  double hosts = 0;    // as many devices make it as fast as all hosts do
};
LeastUpdate LeastUpdateOf(const Graph& graph, const Cluster& cluster,
                          const TrainingOptions& options) {
  const OptimizerRow& optimizer = OptimizerNamed(options.optimizer);
  const std::vector<double> momenta = RunningMomenta(graph);
  double updates = 0;  // bytes of the optimizer's own kernel
  double beside = 0;   // and of others
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    const Tensor& weight = graph.tensors[t];
    if (weight.kind != TensorKind::kWeight || momenta[t] >= 0) continue;
    const double elements = LargeElementCount(weight.shape);
    const auto width = static_cast<double>(SizeOf(weight.dtype));
    const double state = std::max(4.0, width);
    // A factored optimizer keeps vectors.
    const int moments = optimizer.factored ? 0 : optimizer.moments;
    // The gradient is read; the parameter, or its master, and the moments are
    // read and written.
    updates += elements * (width + 2 * state * (1 + moments));
    // The master becomes a parameter; the norm reads the gradient.
    if (width < state) beside += elements * (state + width);
    if (options.clip > 0) beside += elements * width;
  }
  double rate = 0;  // of the fastest device
  double host_rate = 0;
  for (const DeviceType& device : cluster.device_types) {
    const BytesPerSecond reached =
        device.memory_bandwidth * device.memory_efficiency;
    rate = std::max(rate, reached.value / device.slowness);
  }
  bool has_hosts = false;
  for (const Device& device : cluster.devices) {
    const DeviceType& type =
        cluster.device_types[static_cast<size_t>(device.type)];
    if (type.shared_memory) {
      // The host's kernels are as fast, beside its own.
      host_rate += rate;
    } else {
      has_hosts = true;
    }
  }
  if (has_hosts && !cluster.hosts.empty()) {
    host_rate +=
        cluster.num_nodes() * FastestHost(cluster).memory_bandwidth.value;
  }
  // A stack may make more passes over some optimizers' values.
  const double on_device =
      std::min(1.0, cluster.stack.optimizer_traffic) * updates + beside;
  const double on_hosts = updates + beside;
  LeastUpdate least;
  if (on_hosts == 0) return least;
  least.seconds = on_device / rate;
  least.hosts = host_rate / rate * (on_device / on_hosts);
  return least;
}

// What an operator takes at least on a device of each type, all shards
// together.
struct LeastWork {
  std::vector<double> seconds;  // by device type
  bool is_product = false;      // or attention
};

std::vector<LeastWork> LeastWorkOf(const Graph& graph, const Cluster& cluster) {
  const Stack& stack = cluster.stack;
  const std::vector<Fusion> fusion = FusionOf(graph, stack);
  std::vector<LeastWork> work;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    // Gradient sums follow the plan's layouts.
    if (node.op == nullptr || node.op->name == "sum") continue;
    if (fusion[i].traffic == 0) continue;
    const auto extents = WholeExtents(graph, node);
    std::vector<DType> operands;
    std::vector<DType> results;
    for (TensorId t : node.operands) operands.push_back(graph.tensor(t).dtype);
    for (TensorId t : node.results) results.push_back(graph.tensor(t).dtype);
    const OpCall call = {
        .rule = &node.rule,
        .extents = std::span(extents).first(node.rule.factors.size()),
        .operand_dtypes = operands,
        .result_dtypes = results,
        .attributes = node.attributes};
    CostQuery query;
    query.key.dtype = KernelType(operands, results);
    query.op_class = node.op->op_class;
    SetWork(*node.op, &node, call, stack, query);
    query.bytes = {static_cast<int64_t>(
        stack.kernel_traffic * fusion[i].traffic *
        static_cast<double>(CallBytes(*node.op, call).value))};
    LeastWork& least = work.emplace_back();
    for (const DeviceType& device : cluster.device_types) {
      least.seconds.push_back(device.slowness *
                              LeastSeconds(device, stack, query));
    }
    least.is_product = query.op_class != OpClass::kMemory;
  }
  return work;
}

// Seconds of all operators, each where it takes least, a second on a device of
// a type counted as `worth` of it.
struct Passes {
  double products = 0;
  double others = 0;
};
Passes PassesOf(const std::vector<LeastWork>& work,
                const std::vector<double>& worth) {
  Passes passes;
  for (const LeastWork& of : work) {
    double least = std::numeric_limits<double>::infinity();
    for (size_t t = 0; t < worth.size(); ++t) {
      least = std::min(least, worth[t] * of.seconds[t]);
    }
    (of.is_product ? passes.products : passes.others) += least;
  }
  return passes;
}

// By device type what a second there is worth: as much as the type is fast, by
// the time of all operators, and 1 for the mean device.
std::vector<double> WorthBySpeed(const Cluster& cluster,
                                 const std::vector<LeastWork>& work) {
  std::vector<double> worth(cluster.device_types.size(), 0);
  for (const LeastWork& of : work) {
    for (size_t t = 0; t < worth.size(); ++t) worth[t] += of.seconds[t];
  }
  double all = 0;
  for (double& of : worth) of = 1 / of;
  for (const Device& device : cluster.devices) {
    all += worth[static_cast<size_t>(device.type)];
  }
  for (double& of : worth) {
    of *= static_cast<double>(cluster.devices.size()) / all;
  }
  return worth;
}

}  // namespace

StepBound LowerBound(const Graph& graph, const Cluster& cluster,
                     const TrainingOptions& options) {
  const std::vector<LeastWork> work = LeastWorkOf(graph, cluster);
  const auto devices = static_cast<double>(cluster.devices.size());
  const LeastUpdate update = LeastUpdateOf(graph, cluster, options);
  const Passes alike =
      PassesOf(work, std::vector<double>(cluster.device_types.size(), 1));
  const double with_update = (alike.products + alike.others + update.seconds) /
                             (devices + update.hosts);
  StepBound bound;
  double seconds = 0;
  const auto at_least = [&](double least, const Passes& passes) {
    if (!(least > seconds) || !std::isfinite(least)) return;
    seconds = least;
    bound.products = passes.products / (seconds * devices);
  };
  at_least((alike.products + alike.others) / devices, alike);
  at_least(with_update, alike);
  const Passes by_speed = PassesOf(work, WorthBySpeed(cluster, work));
  at_least((by_speed.products + by_speed.others) / devices, by_speed);
  bound.step_time = {static_cast<int64_t>(seconds * 1e12 * (1 - 1e-9))};
  // Parameters in the graph's type; moments are in fp32, and the parameters too
  // where they are narrower. (Of a factored moment nothing is counted: parts of
  // it are on several devices.)
  const int64_t width = SizeOf(graph.dtype);
  const int64_t state = 4 * *MomentsOf(options.optimizer) +
                        (width < SizeOf(DType::kFloat32) ? 4 : 0);
  bound.memory = {static_cast<int64_t>(
      static_cast<double>(ParameterCount(graph) * (width + state)) / devices)};
  return bound;
}

}  // namespace tessera
