#include "costmodel/memory/peak_memory.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "planner/lower/file_layout.h"
#include "planner/lower/staging.h"
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

std::string SizeText(Bytes bytes) {
  const auto size = static_cast<double>(bytes.value);
  char text[32];
  if (size >= 1e9) {
    std::snprintf(text, sizeof(text), "%.1f GB", size * 1e-9);
  } else if (size >= 1e6) {
    std::snprintf(text, sizeof(text), "%.1f MB", size * 1e-6);
  } else if (size >= 1e3) {
    std::snprintf(text, sizeof(text), "%.1f kB", size * 1e-3);
  } else {
    std::snprintf(text, sizeof(text), "%.0f B", size);
  }
  return text;
}

// The bytes of a value on the ranks of a set of devices.
Bytes BytesOn(const TaskGraph& tasks, const DeviceSet& devices, ValueId id) {
  const Value& value = tasks.value(id);
  const bool here = Holds(devices, value.group) || value.group == tasks.world;
  return here ? LargestBytes(tasks, id) : Bytes{};
}

// The length of the file of each.
std::vector<MemoryUse> FileUse(const TaskGraph& tasks,
                               const std::vector<DeviceSet>& sets) {
  std::vector<MemoryUse> uses;
  for (const DeviceSet& set : sets) {
    std::vector<Bytes> bytes(tasks.values.size());
    MemoryUse& use = uses.emplace_back();
    for (size_t v = 0; v < tasks.values.size(); ++v) {
      const Value& value = tasks.values[v];
      if (value.tier != MemoryTier::kFile || value.alias_of.valid()) continue;
      bytes[v] = BytesOn(tasks, set, ValueId(v));
      if (!value.persistent) continue;
      use.parts[static_cast<size_t>(value.category)] +=
          WholeFileBlocks(bytes[v]);
    }
    const FileLayout layout = LayOutFile(tasks, bytes);
    use.total = layout.length;
    use.parts[static_cast<size_t>(MemoryCategory::kActivation)] +=
        layout.length - layout.persistent;
  }
  return uses;
}

}  // namespace

std::vector<MemoryUse> PeakMemory(const TaskGraph& tasks, MemoryTier tier) {
  const std::vector<DeviceSet> sets = DeviceSets(tasks.plan_groups());
  if (tier == MemoryTier::kFile) return FileUse(tasks, sets);
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
    if (value.alias_of.valid() || value.tier != tier) continue;
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
        if (held[root] || tasks.values[root].tier != tier) continue;
        held[root] = true;
        for (Account* account : here) {
          account->Add(tasks.values[root].category, bytes[root]);
        }
      }
    }
    const Value* const peer =
        task.peer.valid() ? &tasks.value(task.peer) : nullptr;
    const Bytes staging =
        tier != MemoryTier::kDevice
            ? Bytes{}
            : StagingBytes(
                  task, tasks.values, tasks.group(task.group), peer,
                  peer == nullptr ? nullptr : &tasks.group(peer->group));
    for (Account* account : here) {
      account->Add(MemoryCategory::kCommunication, staging);
      account->Note();
      account->Remove(MemoryCategory::kCommunication, staging);
      for (ValueId id : frees[t]) {
        account->Remove(tasks.value(id).category, bytes[id.index()]);
      }
    }
  }
  std::vector<MemoryUse> peaks;
  for (const Account& account : accounts) peaks.push_back(account.peak);
  return peaks;
}

std::vector<ValueId> LargestAtPeak(const TaskGraph& tasks,
                                   const DeviceSet& devices, size_t most,
                                   MemoryTier tier) {
  // Each buffer's first and last task on the devices.
  const size_t count = tasks.tasks.size();
  std::vector<size_t> first(tasks.values.size(), count);
  std::vector<size_t> last(tasks.values.size(), 0);
  for (size_t t = 0; t < count; ++t) {
    const Task& task = tasks.tasks[t];
    if (!Holds(devices, task.group)) continue;
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        first[root] = std::min(first[root], t);
        last[root] = t;
      }
    }
  }
  std::vector<ValueId> buffers;
  std::vector<Bytes> change(count + 1);  // of what is held, before each task
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    const ValueId id(static_cast<int64_t>(v));
    if (value.alias_of.valid() || value.tier != tier) continue;
    if (value.persistent) {
      if (!Holds(devices, value.group) && value.group != tasks.world) continue;
      first[v] = 0;
      last[v] = count;
    }
    if (first[v] == count) continue;
    buffers.push_back(id);
    if (value.persistent) continue;
    const Bytes bytes = LargestBytes(tasks, id);
    change[first[v]] += bytes;
    change[last[v] + 1] = change[last[v] + 1] - bytes;
  }
  size_t peak = 0;
  Bytes held;
  Bytes highest;
  for (size_t t = 0; t < count; ++t) {
    held += change[t];
    if (held <= highest) continue;
    highest = held;
    peak = t;
  }
  std::erase_if(buffers, [&](ValueId id) {
    return first[id.index()] > peak || last[id.index()] < peak;
  });
  std::stable_sort(buffers.begin(), buffers.end(), [&](ValueId a, ValueId b) {
    return LargestBytes(tasks, a) > LargestBytes(tasks, b);
  });
  buffers.resize(std::min(buffers.size(), most));
  return buffers;
}

std::string LargestAtPeakText(const TaskGraph& tasks, const Graph& graph,
                              const DeviceSet& devices, MemoryTier tier,
                              size_t most) {
  std::string text;
  for (ValueId id : LargestAtPeak(tasks, devices, most, tier)) {
    const Value& value = tasks.value(id);
    if (!text.empty()) text += ", ";
    text += SizeText(LargestBytes(tasks, id)) + " ";
    text += value.what.empty() ? NameOf(value.category) : value.what;
    if (value.tensor.valid()) text += " " + graph.tensor(value.tensor).name;
    if (value.category != MemoryCategory::kParameter &&
        value.category != MemoryCategory::kGradient) {
      text += " (" + std::string(NameOf(value.category)) + ")";
    }
  }
  return text;
}

}  // namespace tessera
