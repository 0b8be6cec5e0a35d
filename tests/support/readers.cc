#include "tests/support/readers.h"

#include "costmodel/profile/profile_io.h"
#include "costmodel/validate/collectives.h"
#include "costmodel/validate/published_run.h"
#include "planner/base/file.h"
#include "planner/io/cluster_io.h"
#include "planner/io/graph_io.h"
#include "planner/io/importer.h"
#include "planner/io/plan_io.h"
#include "planner/plan/strategy.h"
#include "planner/schedule/action_table.h"
#include "planner/search/constraints.h"
#include "runtime/data/tokens.h"
#include "runtime/onnx_tensors.h"
#include "runtime/safetensors.h"
#include "tests/support/small_models.h"

namespace tessera::testing {
namespace {

// Parse, write, parse, write.
template <typename Read, typename Write>
std::string RoundTrip(const std::string& path, const Read& read,
                      const Write& write) {
  const auto first = read(path);
  if (!first) return "";
  const size_t name = path.rfind('/') + 1;
  const std::string once = path.substr(0, name) + "once-" + path.substr(name);
  if (const auto written = write(once, *first); !written) {
    return "cannot write what it read: " + written.error().ToString();
  }
  const auto second = read(once);
  if (!second) {
    return "refuses what it wrote: " + second.error().ToString();
  }
  const auto before = ReadFile(once);
  if (const auto written = write(once, *second); !written) {
    return "cannot write it again: " + written.error().ToString();
  }
  return *before == *ReadFile(once) ? "" : "writes something else again";
}

std::string Clusters(const std::string& path) {
  return RoundTrip(path, ReadCluster, WriteCluster);
}

std::string Import(const std::string& path) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 16;
  (void)ImportModel(path, options);
  return "";
}

std::string Plans(const std::string& path) {
  static const Graph graph = TwoLayerGraph(8, 8, 16);
  return RoundTrip(
      path, [](const std::string& p) { return ReadPlan(p, graph); },
      [](const std::string& p, const Plan& plan) {
        return WritePlan(p, graph, plan);
      });
}

}  // namespace

std::span<const Reader> Readers() {
  static const Reader kReaders[] = {
      {"cluster", "cluster.txtpb", Clusters},
      {"cluster_json", "cluster.json", Clusters},
      {"graph",
       "graph.txtpb",
       [](const std::string& path) {
         return RoundTrip(path, ReadGraph, WriteGraph);
       },
       {"graphs/norm-in-parts.txtpb"}},
      {"plan", "plan.txtpb", Plans},
      {"profile", "profile.txtpb",
       [](const std::string& path) {
         return RoundTrip(path, ReadProfile, WriteProfile);
       }},
      {"config",
       "config.json",
       Import,
       {"models/gpt2-tiny/config.json", "models/t5-tiny/config.json",
        "models/vit-tiny/config.json", "models/deepseek-tiny/config.json"}},
      {"onnx", "model.onnx",
       [](const std::string& path) {
         (void)OnnxTensors::Open(path);
         return Import(path);
       }},
      {"runs", "runs.csv",
       [](const std::string& path) {
         (void)ReadPublishedRuns(path);
         return std::string();
       }},
      {"collectives", "collectives.csv",
       [](const std::string& path) {
         (void)ReadPublishedCollectives(path);
         return std::string();
       }},
      {"strategy", "strategy.txt",
       [](const std::string& path) {
         (void)ParseStrategy(*ReadFile(path));
         return std::string();
       }},
      {"constraints", "constraints.txt",
       [](const std::string& path) {
         ConstraintTexts texts;
         (void)ParseConstraints(*ReadFile(path), path, texts);
         return std::string();
       }},
      {"schedule",
       "schedule.txt",
       [](const std::string& path) {
         (void)ReadActionTable(path);
         return std::string();
       },
       {"schedules/zb-h1-p2-m4.txt"}},
      {"safetensors", "weights.safetensors",
       [](const std::string& path) {
         (void)SafetensorsFile::Open(path);
         return std::string();
       }},
      {"tokens", "tokens.bin",
       [](const std::string& path) {
         (void)OpenTokens(path, 256);
         return std::string();
       }},
  };
  return kReaders;
}

}  // namespace tessera::testing
