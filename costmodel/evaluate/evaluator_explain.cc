// Evaluator: what Explain adds of a simulation of the whole step.

#include <algorithm>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/memory_check.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/lower/lower.h"

namespace tessera {
namespace {

// Of what is explained, how many times as much is simulated as of one plan
// among many.
constexpr int64_t kMoreExplained = 2;

// How many times less is simulated for each plan that a walk goes to: what
// takes up to a tenth of a second.
constexpr int64_t kLessQuick = 20;

// Of every device what was found for its set.
void ListDevices(const Plan& plan, Evaluation& result) {
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    DeviceMemory& alike = result.devices.emplace_back();
    alike.group = sets[s].name;
    alike.devices = sets[s].devices;
    alike.memory = result.memory[s];
    if (result.host_memory.empty()) continue;
    alike.host = result.host_memory[s];
    alike.file = result.file_memory[s];
  }
}

}  // namespace

bool Evaluator::IsTooLargeToExplain(const Plan& plan) const {
  return OperatorsOf(plan) / kMoreExplained > most_simulated_;
}

bool Evaluator::IsQuickToExplain(const Plan& plan) const {
  return OperatorsOf(plan) * kLessQuick <= most_simulated_;
}

std::optional<Duration> Evaluator::QuickSharedStepTime(const Plan& plan) const {
  if (!IsQuickToExplain(plan)) return std::nullopt;
  const TaskGraph tasks = Lower(facts_, plan);
  return Simulate(pricer_, tasks).step_time;
}

Evaluation Evaluator::ExplainUnsimulated(const Plan& plan) const {
  Evaluation result = Evaluate(plan);
  ListDevices(plan, result);
  return result;
}

Evaluation Evaluator::Explain(const Plan& plan, bool share_links) const {
  Evaluation result = Evaluate(plan);
  if (IsTooLargeToExplain(plan) || result.step_time == Duration{}) {
    ListDevices(plan, result);
    return result;
  }
  const TaskGraph tasks = Lower(facts_, plan);
  AddStep(plan, tasks, Simulate(pricer_, tasks, {.share_links = share_links}),
          result);
  return result;
}

Evaluation Evaluator::Explain(const Plan& plan, const TaskGraph& tasks,
                              const Timeline& timeline) const {
  Evaluation result = Evaluate(plan);
  if (IsTooLargeToExplain(plan) || result.step_time == Duration{}) {
    ListDevices(plan, result);
    return result;
  }
  AddStep(plan, tasks, timeline, result);
  return result;
}

void Evaluator::AddStep(const Plan& plan, const TaskGraph& tasks,
                        const Timeline& timeline, Evaluation& result) const {
  result.step_time = timeline.step_time;
  result.breakdown = BreakdownOf(tasks, timeline);
  result.moved = MovedBytes(pricer_, tasks);
  std::vector<DeviceId> devices;  // one of each kind
  const std::vector<DeviceSet> kinds = DeviceKinds(cluster_, tasks);
  for (const DeviceSet& alike : kinds) {
    devices.push_back(alike.devices[0]);
    result.devices.push_back({alike.name, alike.devices, {}, {}, {}});
  }
  auto memory = PeakMemoryOf(tasks, devices);
  AddOverheads(facts_, index_.get(), plan, kinds, memory);
  const auto host = PeakMemoryOf(tasks, devices, MemoryTier::kHost);
  const auto file = PeakMemoryOf(tasks, devices, MemoryTier::kFile);
  for (size_t i = 0; i < devices.size(); ++i) {
    result.devices[i].memory = memory[i];
    result.devices[i].host = host[i];
    result.devices[i].file = file[i];
  }
  if (result.overflow > Bytes{}) {
    const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
    const auto list = [&](size_t set, MemoryTier tier,
                          const std::string& where) {
      result.violations.push_back(
          "group " + sets[set].name + " holds " + where + "at its peak " +
          LargestAtPeakText(tasks, graph_, sets[set], tier));
    };
    // The devices that lack most; where none does, a host lacks it, which may
    // be their memory.
    Bytes most;
    size_t lacking = sets.size();
    for (size_t s = 0; s < sets.size(); ++s) {
      for (const DeviceId device : sets[s].devices) {
        const DeviceType& type = cluster_.TypeOf(device);
        const Bytes has = type.shared_memory ? Bytes{} : type.memory;
        const Bytes lack = result.memory[s].total - has;
        if (lack <= most) continue;
        most = lack;
        lacking = s;
      }
    }
    if (lacking < sets.size()) list(lacking, MemoryTier::kDevice, "");
    // Of the host that lacks most.
    const auto list_fullest = [&](const std::vector<MemoryUse>& memory,
                                  MemoryTier tier, const std::string& where) {
      const auto lack = LackingHost(cluster_, plan, result, tier);
      if (!lack || memory.empty()) return;
      size_t fullest = sets.size();
      for (size_t s = 0; s < sets.size(); ++s) {
        const bool is_there =
            std::ranges::any_of(sets[s].devices, [&](DeviceId device) {
              return cluster_.devices[device.index()].node == lack->node;
            });
        if (!is_there || memory[s].total == Bytes{}) continue;
        if (fullest == sets.size() || memory[fullest].total < memory[s].total) {
          fullest = s;
        }
      }
      if (fullest < sets.size()) list(fullest, tier, where);
    };
    list_fullest(result.host_memory, MemoryTier::kHost, "on the host ");
    list_fullest(result.file_memory, MemoryTier::kFile, "in files ");
  }
}

}  // namespace tessera
