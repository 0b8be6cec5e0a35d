#include "costmodel/memory/peak_memory.h"

#include "planner/plan/stages.h"

namespace tessera {
namespace {

// The bytes of one device at a moment of the walk, and the most so far.
struct Account {
  MemoryUse now;
  MemoryUse peak;

  void Add(MemoryCategory category, Bytes bytes) {
    now.parts[static_cast<size_t>(category)] += bytes;
    now.total += bytes;
  }
  void Remove(MemoryCategory category, Bytes bytes) {
    auto& part = now.parts[static_cast<size_t>(category)];
    part = part - bytes;
    now.total = now.total - bytes;
  }
  void Note() {
    if (now.total > peak.total) peak = now;
  }
};

}  // namespace

std::vector<MemoryUse> PeakMemory(const TaskGraph& tasks) {
  const std::vector<DeviceSet> sets = DeviceSets(tasks.plan_groups());
  std::vector<Account> accounts(sets.size());
  std::vector<std::vector<Account*>> of_group(tasks.world.index());
  for (size_t s = 0; s < sets.size(); ++s) {
    for (GroupId group : sets[s].groups) {
      of_group[group.index()].push_back(&accounts[s]);
    }
  }
  std::vector<Bytes> bytes(tasks.values.size());
  std::vector<bool> held(tasks.values.size(), false);
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (value.alias_of.valid()) continue;
    bytes[v] = LargestBytes(tasks, ValueId(static_cast<int64_t>(v)));
    if (!value.persistent) continue;
    held[v] = true;
    if (value.group == tasks.world) {
      for (Account& account : accounts) account.Add(value.category, bytes[v]);
    } else {
      for (Account* account : of_group[value.group.index()]) {
        account->Add(value.category, bytes[v]);
      }
    }
  }
  for (Account& account : accounts) account.Note();

  const auto frees = LastUses(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.group == tasks.world) continue;
    const auto& here = of_group[task.group.index()];
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        if (held[root]) continue;
        held[root] = true;
        for (Account* account : here) {
          account->Add(tasks.values[root].category, bytes[root]);
        }
      }
    }
    for (Account* account : here) {
      account->Note();
      for (ValueId id : frees[t]) {
        account->Remove(tasks.value(id).category, bytes[id.index()]);
      }
    }
  }
  std::vector<MemoryUse> peaks;
  for (const Account& account : accounts) peaks.push_back(account.peak);
  return peaks;
}

}  // namespace tessera
