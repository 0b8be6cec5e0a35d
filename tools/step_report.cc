#include "tools/step_report.h"

#include <algorithm>

#include "costmodel/whatif/predict.h"
#include "planner/base/format.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "tools/text.h"

namespace tessera {
namespace {

std::string Line(std::string_view label, const std::string& text) {
  constexpr size_t kWidth = 14;
  return "  " + std::string(label) + std::string(kWidth - label.size(), ' ') +
         text + "\n";
}

std::string Rate(double per_s, const Graph& graph) {
  return FormatCount(per_s) + " " + std::string(UnitOf(graph)) + "/s";
}

// Devices of a group whose memory is told in the same words.
struct MemoryRow {
  std::string group;
  std::vector<DeviceId> devices;
  std::vector<std::string> cells;
};

// "stage0 (2 devices)", or of a group whose devices differ "stage0: 0, 2".
std::string DevicesText(const std::vector<MemoryRow>& rows,
                        const MemoryRow& alike) {
  const size_t count = alike.devices.size();
  if (std::ranges::count(rows, alike.group, &MemoryRow::group) == 1) {
    return alike.group + " (" + std::to_string(count) +
           (count == 1 ? " device)" : " devices)");
  }
  constexpr size_t kNamed = 4;
  std::string text = alike.group + ": ";
  for (size_t i = 0; i < std::min(count, kNamed); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(alike.devices[i].value);
  }
  if (count > kNamed) {
    text += " and " + std::to_string(count - kNamed) + " more";
  }
  return text;
}

std::string MemoryTable(const Cluster& cluster, const Evaluation& evaluation) {
  // Categories that some device has.
  std::vector<size_t> used;
  for (size_t c = 0; c < kMemoryCategories; ++c) {
    if (std::ranges::any_of(evaluation.devices, [&](const DeviceMemory& d) {
          return d.memory.parts[c].value > 0;
        })) {
      used.push_back(c);
    }
  }
  std::vector<std::vector<std::string>> rows = {{"memory of a device"}};
  for (const size_t c : used) {
    rows[0].emplace_back(NameOf(static_cast<MemoryCategory>(c)));
  }
  rows[0].insert(rows[0].end(), {"total", "of"});
  const bool offloads = !evaluation.host_memory.empty();
  if (offloads) rows[0].insert(rows[0].end(), {"host", "file"});
  std::vector<MemoryRow> told;
  for (const DeviceMemory& alike : evaluation.devices) {
    std::vector<std::string> cells;
    for (const size_t c : used) {
      cells.push_back(FormatBytes(alike.memory.parts[c]));
    }
    cells.push_back(FormatBytes(alike.memory.total));
    cells.push_back(FormatBytes(cluster.TypeOf(alike.devices[0]).memory));
    if (offloads) {
      cells.push_back(FormatBytes(alike.host.total));
      cells.push_back(FormatBytes(alike.file.total));
    }
    const auto same = std::ranges::find_if(told, [&](const MemoryRow& row) {
      return row.group == alike.group && row.cells == cells;
    });
    if (same == told.end()) {
      told.push_back({alike.group, alike.devices, std::move(cells)});
    } else {
      same->devices.insert(same->devices.end(), alike.devices.begin(),
                           alike.devices.end());
      std::ranges::sort(same->devices);
    }
  }
  for (const MemoryRow& row : told) {
    rows.push_back({DevicesText(told, row)});
    rows.back().insert(rows.back().end(), row.cells.begin(), row.cells.end());
  }
  return FormatTable(rows);
}

// A word where hardly anything is left: predictions of memory are off by some
// tenths of a percent (docs/gpu.md), and know of nothing else on the device.
std::string NarrowFitText(const Cluster& cluster,
                          const Evaluation& evaluation) {
  constexpr double kNarrow = 0.01;
  double least = 1;
  Bytes left;
  for (const DeviceMemory& alike : evaluation.devices) {
    const Bytes has = cluster.TypeOf(alike.devices[0]).memory;
    const Bytes free = has - alike.memory.total;
    const double share =
        static_cast<double>(free.value) / static_cast<double>(has.value);
    if (share >= least) continue;
    least = share;
    left = free;
  }
  if (least >= kNarrow || left < Bytes{}) return "";
  return "  " +
         Wrap("the fullest device has " + FormatBytes(left) + " (" +
                  FormatPercent(least) +
                  ") left, for what else uses its memory and for what the "
                  "prediction is off; --set device.memory=SIZE plans with less",
              4) +
         "\n";
}

// Of the matrix products that the backward pass computes again.
double RecomputedFlops(const Graph& graph, const Cluster& cluster,
                       const Plan& plan) {
  const GraphIndex index(graph);
  const LoweringFacts facts(graph, cluster, TrainingOptions());
  const LoweringContext context(facts, plan);
  double flops = 0;
  for (size_t b = 0; b < graph.blocks.size(); ++b) {
    for (NodeId node : context.recomputed_nodes(static_cast<int>(b))) {
      flops += index.node_flops[node.index()];
    }
  }
  return flops;
}

}  // namespace

Throughput ThroughputOf(const Graph& graph, const Cluster& cluster,
                        const Plan& plan, Duration step_time) {
  const double seconds = step_time.seconds();
  const auto devices = static_cast<double>(World(plan).devices.size());
  const auto utilization = [&](double flops) {
    return UtilizationOf({flops}, cluster, plan, graph.dtype, step_time);
  };
  Throughput result;
  result.tokens_per_s =
      static_cast<double>(graph.global_batch * graph.seq_len) / seconds;
  result.tokens_per_s_per_gpu = result.tokens_per_s / devices;
  result.model_flops = ModelFlops(graph).value;
  result.model_tflops_per_gpu = result.model_flops / seconds / devices * 1e-12;
  result.mfu = utilization(result.model_flops);
  result.mfu_causal =
      utilization(ModelFlops(graph, /*halve_causal=*/true).value);
  result.hfu =
      utilization(result.model_flops + RecomputedFlops(graph, cluster, plan));
  return result;
}

std::string FlopsText(const Throughput& rates) {
  const std::string rate =
      FormatRate({rates.model_tflops_per_gpu * 1e12}) + " per device";
  if (rates.model_flops == 0)
    return "not known: its operators do not say theirs";
  if (!rates.mfu) return rate;
  const std::string causal =
      rates.mfu_causal == rates.mfu
          ? ""
          : " (causal attention halved: " + FormatPercent(*rates.mfu_causal) +
                ")";
  return rate + ": MFU " + FormatPercent(*rates.mfu) + causal + ", HFU " +
         FormatPercent(*rates.hfu);
}

std::vector<BreakdownPart> PartsOf(const Breakdown& breakdown) {
  return {{"compute", breakdown.compute},
          {"optimizer", breakdown.optimizer},
          {"all_reduce", breakdown.all_reduce},
          {"all_gather", breakdown.all_gather},
          {"reduce_scatter", breakdown.reduce_scatter},
          {"all_to_all", breakdown.all_to_all},
          {"send_recv", breakdown.send_recv},
          {"copies", breakdown.copies},
          {"bubble", breakdown.idle}};
}

Json BreakdownJson(const Breakdown& breakdown) {
  Json json = Json::Object();
  for (const BreakdownPart& part : PartsOf(breakdown)) {
    json.Set(std::string(part.name), part.time.seconds());
  }
  return json;
}

std::vector<MemoryPart> MemoryParts(const MemoryUse& memory) {
  std::vector<MemoryPart> parts;
  for (size_t i = 0; i < kMemoryCategories; ++i) {
    parts.push_back({NameOf(static_cast<MemoryCategory>(i)), memory.parts[i]});
  }
  return parts;
}

Json MemoryJson(const MemoryUse& memory) {
  Json json = Json::Object({{"total", memory.total.value}});
  for (const MemoryPart& part : MemoryParts(memory)) {
    json.Set(std::string(part.name), part.bytes.value);
  }
  return json;
}

Json StepTimeJson(Duration step_time) {
  return step_time > Duration{} ? Json(step_time.seconds()) : Json();
}

Json StepJson(const Graph& graph, const Cluster& cluster, const Plan& plan,
              const Evaluation& evaluation) {
  const Throughput rates =
      ThroughputOf(graph, cluster, plan, evaluation.step_time);
  // Nothing where a device has no work.
  const DeviceMemory none;
  std::vector<const DeviceMemory*> memory(cluster.devices.size(), &none);
  for (const DeviceMemory& alike : evaluation.devices) {
    for (const DeviceId device : alike.devices) {
      memory[device.index()] = &alike;
    }
  }
  const bool priced = evaluation.step_time > Duration{};
  const auto of_price = [&](Json value) {
    return priced ? std::move(value) : Json();
  };
  Json per_device = Json::Array();
  for (size_t d = 0; d < memory.size() && priced; ++d) {
    const auto vertex = cluster.devices[d].vertex;
    Json device =
        Json::Object({{"device", static_cast<int64_t>(d)},
                      {"name", cluster.vertices[vertex.index()].name}});
    device.Extend(MemoryJson(memory[d]->memory));
    device.Set("host", memory[d]->host.total.value);
    device.Set("file", memory[d]->file.total.value);
    per_device.Append(std::move(device));
  }
  const SourceShares& sources = evaluation.sources;
  return Json::Object(
      {{"model", graph.name},
       {"cluster", cluster.name},
       {"devices", static_cast<int64_t>(cluster.devices.size())},
       {"devices_used", static_cast<int64_t>(World(plan).devices.size())},
       {"dtype", NameOf(graph.dtype)},
       {"parameters", ParameterCount(graph)},
       {"step_time_s", StepTimeJson(evaluation.step_time)},
       {"tokens_per_s", rates.tokens_per_s},
       {"tokens_per_s_per_gpu", rates.tokens_per_s_per_gpu},
       {"model_flops", rates.model_flops},
       {"model_tflops_per_gpu", rates.model_tflops_per_gpu},
       {"mfu", OrNull(rates.mfu)},
       {"mfu_causal", OrNull(rates.mfu_causal)},
       {"hfu", OrNull(rates.hfu)},
       {"memory",
        Json::Object(
            {{"peak_bytes",
              of_price(FullestOf(cluster, plan, evaluation).use.total.value)},
             {"per_device", std::move(per_device)}})},
       {"breakdown", of_price(BreakdownJson(evaluation.breakdown))},
       {"moved_bytes", of_price(evaluation.moved.value)},
       {"feasible", evaluation.feasible()},
       {"violations",
        Json::ArrayOf(evaluation.violations,
                      [](const std::string& text) { return Json(text); })},
       {"sources",
        of_price(Json::Object({{"measured", sources.measured},
                               {"interpolated", sources.interpolated},
                               {"analytical", sources.analytical}}))}});
}

std::string StepText(const Graph& graph, const Cluster& cluster,
                     const Plan& plan, const Evaluation& evaluation) {
  std::string out = Describe(graph, cluster, plan);
  if (!out.ends_with('\n')) out += '\n';
  out += "\n";
  std::string violations;
  for (const std::string& violation : evaluation.violations) {
    violations += "  cannot run: " + violation + "\n";
  }
  if (evaluation.step_time == Duration{}) return out + violations;
  const Throughput rates =
      ThroughputOf(graph, cluster, plan, evaluation.step_time);
  const SourceShares& sources = evaluation.sources;
  out += Line("step time",
              FormatTime(evaluation.step_time) + ", by " +
                  FormatPercent(sources.measured) + " measured, " +
                  FormatPercent(sources.interpolated) + " interpolated, " +
                  FormatPercent(sources.analytical) + " analytical task times");
  out += Line("throughput", Rate(rates.tokens_per_s, graph) + ", " +
                                Rate(rates.tokens_per_s_per_gpu, graph) +
                                " per device");
  out += Line("model FLOPs", FlopsText(rates));
  out += Line("parameters",
              FormatCount(static_cast<double>(ParameterCount(graph))) + " in " +
                  std::string(NameOf(graph.dtype)));
  std::string breakdown;
  for (const BreakdownPart& part : PartsOf(evaluation.breakdown)) {
    if (part.time == Duration{}) continue;
    if (!breakdown.empty()) breakdown += ", ";
    breakdown +=
        std::string(part.name) + " " +
        FormatPercent(part.time.seconds() / evaluation.step_time.seconds());
  }
  if (!breakdown.empty()) out += Line("time goes to", Wrap(breakdown, 16));
  if (evaluation.moved > Bytes{}) {
    out += Line("devices send", FormatBytes(evaluation.moved) + " a step");
  }
  return out + "\n" + MemoryTable(cluster, evaluation) +
         NarrowFitText(cluster, evaluation) + violations;
}

}  // namespace tessera
