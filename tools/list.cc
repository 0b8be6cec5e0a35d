#include <iostream>

#include "costmodel/collective/algorithms.h"
#include "costmodel/source/cost_source.h"
#include "costmodel/whatif/scenario.h"
#include "costmodel/whatif/sensitivity.h"
#include "planner/base/table.h"
#include "planner/io/cluster_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/io/losses.h"
#include "planner/io/onnx.h"
#include "planner/io/zoo.h"
#include "planner/ir/op.h"
#include "planner/plan/recompute.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/constraints.h"
#include "planner/search/move.h"
#include "planner/search/textbook.h"
#include "planner/topology/networks.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "runtime/kernels/kernel.h"
#include "runtime/launch/backend.h"
#include "runtime/learning_rate.h"
#include "tools/json.h"
#include "tools/text.h"
#include "tools/trainers.h"
#include "tools/verb.h"

namespace tessera {
namespace {

struct Entry {
  std::string name;
  std::string summary;
};

template <typename Row>
std::vector<Entry> Entries(std::span<const Row> table) {
  std::vector<Entry> entries;
  for (const Row& row : table) {
    entries.push_back({std::string(row.name), std::string(row.summary)});
  }
  return entries;
}

// Kernels have the summary of the operator that they compute.
std::vector<Entry> KernelEntries() {
  std::vector<Entry> entries;
  for (const Kernel& kernel : CpuKernels()) {
    const OpDef* op = OperatorOf(kernel.name);
    entries.push_back({std::string(kernel.name),
                       std::string(op ? op->summary : "optimizer")});
  }
  return entries;
}

// With what the number behind a network's name is, as in "fat-tree:2".
std::vector<Entry> NetworkEntries() {
  std::vector<Entry> entries;
  for (const Network& network : Networks()) {
    entries.push_back(
        {std::string(network.name),
         std::string(network.summary) + "; " + std::string(network.name) +
             ":N says " + std::string(network.parameter) + ", 1 to " +
             std::to_string(network.most) +
             " (default: " + std::to_string(network.default_parameter) + ")"});
  }
  return entries;
}

std::vector<Entry> CollectiveEntries() {
  std::vector<Entry> entries;
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    entries.push_back(
        {std::string(algorithm.name),
         std::string(algorithm.summary) +
             (algorithm.automatic ? "" : " (by name only, --collective)")});
  }
  return entries;
}

std::vector<Entry> DTypeEntries() {
  return {{"fp64", "64-bit floating point, for proofs on the CPU"},
          {"fp32", "32-bit floating point"},
          {"bf16", "bfloat16, with fp32 master weights"},
          {"fp16", "IEEE half precision, with fp32 master weights"}};
}

// The rows with a meaning of their own, then the fields of a cluster file.
std::vector<Entry> PathEntries() {
  std::vector<Entry> entries = Entries(Paths());
  for (std::string& path : ClusterFieldPaths()) {
    entries.push_back({std::move(path), "a field of a cluster file"});
  }
  return entries;
}

std::vector<Entry> ResourceEntries() {
  std::vector<Entry> entries;
  for (const Resource& resource : Resources()) {
    entries.push_back({std::string(resource.name), std::string(resource.part)});
  }
  return entries;
}

std::vector<Entry> StackEntries() {
  std::vector<Entry> entries;
  for (const Stack& stack : Stacks()) {
    entries.push_back({stack.name, stack.source});
  }
  return entries;
}

// "8030261248" as "8,030,261,248".
std::string Grouped(int64_t count) {
  std::string text = std::to_string(count);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

// With their family and their parameters.
std::vector<Entry> ZooEntries() {
  std::vector<Entry> entries;
  for (const ZooModel& model : Zoo()) {
    const std::string name(model.name);
    const auto config = ReadModelConfig("zoo:" + name);
    ImportOptions options;
    options.global_batch = 1;
    options.seq_len = 2;  // recurrent networks have as many steps at least
    const auto graph = ImportModel("zoo:" + name, options);
    TESSERA_CHECK(config && graph) << name;
    entries.push_back({name, config->Field("model_type").text + ", " +
                                 Grouped(ParameterCount(*graph)) +
                                 " parameters"});
  }
  return entries;
}

struct Kind {
  std::string_view name;
  std::string_view summary;
  std::vector<Entry> (*entries)();
};

std::span<const Kind> Kinds();

std::vector<Entry> KindEntries() {
  return Entries(Kinds());
}

std::span<const Kind> Kinds() {
  static constexpr Kind kTable[] = {
      {"operators", "what a model's graph is made of",
       [] { return Entries(Ops()); }},
      {"kernels", "what the runtime computes operators with, on CPUs and GPUs",
       KernelEntries},
      {"topologies", "clusters by name, for --cluster",
       [] { return Entries(Topologies()); }},
      {"networks", "networks between nodes, for --cluster NAME:NODES@NETWORK",
       NetworkEntries},
      {"stacks", "training software, for --stack", StackEntries},
      {"schedules", "pipeline schedules, for --strategy schedule=",
       [] { return Entries(Schedules()); }},
      {"recompute", "what backward computes again, for --strategy recompute=",
       [] { return Entries(RecomputeLevels()); }},
      {"collectives", "collective algorithms of the cost model",
       CollectiveEntries},
      {"sources", "where the time of a task comes from",
       [] { return Entries(CostSources()); }},
      {"moves", "how the search changes a plan",
       [] { return Entries(Moves()); }},
      {"forbidden", "what --forbid keeps plans from, beside schedules",
       [] { return Entries(Forbidden()); }},
      {"fixes", "keys of --fix PATTERN=KEY:VALUE",
       [] { return Entries(FixKeys()); }},
      {"spaces", "parts of the space, for --space",
       [] { return Entries(Subspaces()); }},
      {"approaches", "the textbook's strategies, by 'tessera explain'",
       [] { return Entries(Approaches()); }},
      {"trainers", "programs whose settings 'tessera explain --as' prints",
       [] { return Entries(Trainers()); }},
      {"importers", "files that --model reads",
       [] { return Entries(Importers()); }},
      {"onnx", "operators of ONNX files, and what becomes of them",
       [] { return Entries<OnnxOperator>(OnnxOperators()); }},
      {"models", "the zoo, for --model zoo:NAME", ZooEntries},
      {"families", "what a Hugging Face config.json may have as model_type",
       [] { return Entries(ModelFamilies()); }},
      {"losses", "what is minimised, for --set model.loss=",
       [] { return Entries(Losses()); }},
      {"optimizers", "what updates weights, for --optimizer",
       [] { return Entries(Optimizers()); }},
      {"decays", "how the learning rate falls, for --decay",
       [] { return Entries(Decays()); }},
      {"dtypes", "element types, for --dtype", DTypeEntries},
      {"backends", "what ranks compute on, for --backend",
       [] { return Entries(Backends()); }},
      {"paths", "fields that 'tessera whatif' sets and varies", PathEntries},
      {"resources", "what 'tessera whatif --sensitivity' improves",
       ResourceEntries},
      {"kinds", "this list", KindEntries},
  };
  return kTable;
}

}  // namespace

Result<int> RunList(const Options& options) {
  const std::string name =
      options.positional.empty() ? "kinds" : options.positional[0];
  const auto kind = Find("kind", Kinds(), name);
  if (!kind) return kind.error().At("list");
  const std::vector<Entry> entries = (*kind)->entries();
  if (options.json) {
    const Json rows = Json::ArrayOf(entries, [](const Entry& entry) {
      return Json::Object({{"name", entry.name}, {"summary", entry.summary}});
    });
    std::cout << Json::Object({{"kind", name}, {"rows", rows}}).ToString()
              << "\n";
    return 0;
  }
  size_t width = 0;
  for (const Entry& entry : entries) {
    width = std::max(width, entry.name.size());
  }
  for (const Entry& entry : entries) {
    std::cout << entry.name << std::string(width + 2 - entry.name.size(), ' ')
              << Wrap(entry.summary, width + 2) << "\n";
  }
  return 0;
}

}  // namespace tessera
