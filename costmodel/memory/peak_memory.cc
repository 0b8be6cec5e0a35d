#include "costmodel/memory/peak_memory.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "planner/base/format.h"
#include "planner/lower/file_layout.h"
#include "planner/lower/staging.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

constexpr int kLargest = -1;

// The bytes of one device at a moment of the walk, and the most so far.
struct Account {
  // By group its position in it, or kLargest for one with the largest shards;
  // nothing where it is not in the group.
  std::vector<std::optional<int>> positions;
  MemoryUse now;
  MemoryUse peak;
  // While which task, with what beside the values; before any where none.
  std::optional<size_t> peak_task;
  Bytes staged_at_peak;
  Bytes scratch_at_peak;

  void Add(MemoryCategory category, Bytes bytes) {
    now.parts[static_cast<size_t>(category)] += bytes;
    now.total += bytes;
  }
  void Remove(MemoryCategory category, Bytes bytes) {
    auto& part = now.parts[static_cast<size_t>(category)];
    part = part - bytes;
    now.total = now.total - bytes;
  }
  // While a task runs.
  void Note(size_t task, Bytes staged, Bytes scratch) {
    if (now.total + staged + scratch <= peak.total) return;
    peak = now;
    peak.parts[static_cast<size_t>(MemoryCategory::kCommunication)] += staged;
    peak.parts[static_cast<size_t>(MemoryCategory::kWorkspace)] += scratch;
    peak.total += staged + scratch;
    peak_task = task;
    staged_at_peak = staged;
    scratch_at_peak = scratch;
  }
};

// What the account's device keeps of a value on any tier.
Bytes BytesFor(const TaskGraph& tasks, const Account& account, ValueId id) {
  const Value& value = tasks.value(id);
  // The world's are scalars, whole everywhere.
  if (value.group == tasks.world) return LargestBytes(tasks, id);
  const std::optional<int> position = account.positions[value.group.index()];
  if (!position) return {};
  if (*position == kLargest) return LargestBytes(tasks, id);
  return {ElementsAt(value.layout, tasks.group(value.group), value.shape,
                     *position) *
          value.ElementBytes()};
}

// The file of each account is as long as its layout.
void LayOutFiles(const TaskGraph& tasks, std::vector<Account>& accounts) {
  for (Account& account : accounts) {
    std::vector<Bytes> bytes(tasks.values.size());
    MemoryUse& use = account.peak;
    for (size_t v = 0; v < tasks.values.size(); ++v) {
      const Value& value = tasks.values[v];
      if (value.tier != MemoryTier::kFile || value.alias_of.valid()) continue;
      bytes[v] = BytesFor(tasks, account, ValueId(v));
      if (!value.persistent) continue;
      use.parts[static_cast<size_t>(value.category)] +=
          WholeFileBlocks(bytes[v]);
    }
    const FileLayout layout = LayOutFile(tasks, bytes);
    use.total = layout.length;
    use.parts[static_cast<size_t>(MemoryCategory::kActivation)] +=
        layout.length - layout.persistent;
  }
}

// StagingBytes, worked out once for all tasks alike.
class Staging {
 public:
  explicit Staging(const TaskGraph& tasks) : tasks_(tasks) {}

  Bytes Of(const Task& task, int position) {
    const Value* const peer =
        task.peer.valid() ? &tasks_.value(task.peer) : nullptr;
    key_ = {position, task.group.value,
            peer == nullptr ? -1 : peer->group.value};
    AppendStagingKey(task, tasks_.values, peer, key_);
    const auto [it, is_new] = known_.try_emplace(key_);
    if (is_new) {
      it->second = StagingBytes(
          task, tasks_.values, tasks_.group(task.group), peer,
          peer == nullptr ? nullptr : &tasks_.group(peer->group),
          position == kLargest ? std::nullopt : std::optional(position));
    }
    return it->second;
  }

 private:
  const TaskGraph& tasks_;
  std::vector<int64_t> key_;
  std::map<std::vector<int64_t>, Bytes> known_;
};

// Walks the tasks once for all accounts.
void WalkTasks(const TaskGraph& tasks, std::vector<Account>& accounts,
               MemoryTier tier) {
  std::vector<std::vector<Account*>> of_group(tasks.world.index());
  for (Account& account : accounts) {
    for (size_t g = 0; g < of_group.size(); ++g) {
      if (account.positions[g]) of_group[g].push_back(&account);
    }
  }
  std::vector<Account*> everywhere;
  for (Account& account : accounts) everywhere.push_back(&account);
  const auto accounts_of = [&](GroupId group) -> const std::vector<Account*>& {
    return group == tasks.world ? everywhere : of_group[group.index()];
  };
  // What a value takes in each of its group's accounts, from first[v] on.
  std::vector<Bytes> bytes;
  std::vector<size_t> first(tasks.values.size());
  std::vector<bool> held(tasks.values.size(), false);
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (value.alias_of.valid() || value.tier != tier) continue;
    TESSERA_CHECK(value.persistent || value.group != tasks.world) << v;
    first[v] = bytes.size();
    for (Account* account : accounts_of(value.group)) {
      bytes.push_back(BytesFor(tasks, *account, ValueId(v)));
      if (value.persistent) account->Add(value.category, bytes.back());
    }
    held[v] = value.persistent;
  }
  for (Account& account : accounts) account.peak = account.now;

  // The last task that uses a buffer, by the root of its values.
  std::vector<size_t> root(tasks.values.size());
  for (size_t v = 0; v < root.size(); ++v) {
    root[v] = tasks.Root(ValueId(v)).index();
  }
  std::vector<size_t> last(tasks.values.size(), 0);
  const auto each = [](const Task& task, auto&& see) {
    for (ValueId id : task.reads) see(id);
    for (ValueId id : task.writes) see(id);
  };
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    each(tasks.tasks[t], [&](ValueId id) { last[root[id.index()]] = t; });
  }

  Staging staging(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.group == tasks.world) continue;
    const auto& here = of_group[task.group.index()];
    each(task, [&](ValueId id) {
      const size_t r = root[id.index()];
      if (held[r] || tasks.values[r].tier != tier) return;
      held[r] = true;
      for (size_t a = 0; a < here.size(); ++a) {
        here[a]->Add(tasks.values[r].category, bytes[first[r] + a]);
      }
    });
    const bool stages = tier == MemoryTier::kDevice &&
                        (task.kind == TaskKind::kComm || task.peer.valid());
    for (Account* account : here) {
      const std::optional<int> position =
          account->positions[task.group.index()];
      const Bytes staged = stages ? staging.Of(task, *position) : Bytes{};
      const Bytes scratch =
          tier == MemoryTier::kDevice
              ? ScratchBytes(task, tasks.values, tasks.group(task.group),
                             position == kLargest ? std::nullopt : position)
              : Bytes{};
      account->Note(t, staged, scratch);
    }
    // What is used twice by its last task ends once.
    each(task, [&](ValueId id) {
      const size_t r = root[id.index()];
      const Value& value = tasks.values[r];
      if (last[r] != t || !held[r] || value.persistent || value.tier != tier) {
        return;
      }
      held[r] = false;
      for (size_t a = 0; a < here.size(); ++a) {
        here[a]->Remove(value.category, bytes[first[r] + a]);
      }
    });
  }
}

std::vector<MemoryUse> Peaks(const TaskGraph& tasks,
                             std::vector<Account> accounts, MemoryTier tier) {
  const bool used = std::ranges::any_of(
      tasks.values, [&](const Value& value) { return value.tier == tier; });
  if (used && tier == MemoryTier::kFile) {
    LayOutFiles(tasks, accounts);
  } else if (used) {
    WalkTasks(tasks, accounts, tier);
  }
  std::vector<MemoryUse> peaks;
  for (const Account& account : accounts) peaks.push_back(account.peak);
  return peaks;
}

// By group, the positions of its devices.
using Positions = std::unordered_map<DeviceId, int>;
std::vector<Positions> PositionsIn(std::span<const DeviceGroup> groups) {
  std::vector<Positions> positions(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const DeviceId device : groups[g].devices) {
      positions[g].emplace(device, static_cast<int>(positions[g].size()));
    }
  }
  return positions;
}

// With the largest shards.
Account AccountOf(const TaskGraph& tasks, const DeviceSet& devices) {
  Account account;
  account.positions.resize(tasks.world.index());
  for (const GroupId group : devices.groups) {
    account.positions[group.index()] = kLargest;
  }
  return account;
}

}  // namespace

std::vector<MemoryUse> PeakMemory(const TaskGraph& tasks, MemoryTier tier) {
  std::vector<Account> accounts;
  for (const DeviceSet& set : DeviceSets(tasks.plan_groups())) {
    accounts.push_back(AccountOf(tasks, set));
  }
  return Peaks(tasks, std::move(accounts), tier);
}

std::vector<MemoryUse> PeakMemoryOf(const TaskGraph& tasks,
                                    std::span<const DeviceId> devices,
                                    MemoryTier tier) {
  const std::vector<Positions> positions = PositionsIn(tasks.plan_groups());
  std::vector<Account> accounts;
  for (DeviceId device : devices) {
    Account& account = accounts.emplace_back();
    for (const Positions& of_group : positions) {
      const auto found = of_group.find(device);
      account.positions.push_back(found == of_group.end()
                                      ? std::nullopt
                                      : std::optional(found->second));
    }
  }
  return Peaks(tasks, std::move(accounts), tier);
}

std::vector<DeviceSet> AlikeDevices(const TaskGraph& tasks) {
  // What tells sizes apart, each once, by group.
  std::vector<std::set<std::pair<Layout, Shape>>> cuts(tasks.world.index());
  for (const Value& value : tasks.values) {
    if (value.group == tasks.world || value.alias_of.valid()) continue;
    cuts[value.group.index()].emplace(value.layout, value.shape);
  }
  const std::vector<Positions> positions = PositionsIn(tasks.plan_groups());
  std::vector<DeviceSet> classes;
  for (const DeviceSet& set : DeviceSets(tasks.plan_groups())) {
    std::map<std::vector<int64_t>, size_t> known;
    for (DeviceId device : set.devices) {
      std::vector<int64_t> sizes;
      for (GroupId id : set.groups) {
        const DeviceGroup& group = tasks.group(id);
        const int position = positions[id.index()].at(device);
        for (const auto& [layout, shape] : cuts[id.index()]) {
          sizes.push_back(ElementsAt(layout, group, shape, position));
        }
      }
      const auto [found, is_new] =
          known.try_emplace(std::move(sizes), classes.size());
      if (is_new) classes.push_back({set.name, set.groups, {}});
      classes[found->second].devices.push_back(device);
    }
  }
  return classes;
}

std::vector<HeldBuffer> LargestAtPeak(const TaskGraph& tasks,
                                      const DeviceSet& devices, size_t most,
                                      MemoryTier tier) {
  std::vector<Account> accounts = {AccountOf(tasks, devices)};
  WalkTasks(tasks, accounts, tier);
  const Account& account = accounts[0];
  // Each buffer's first and last task on the devices.
  std::vector<std::optional<size_t>> first(tasks.values.size());
  std::vector<size_t> last(tasks.values.size());
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (!Holds(devices, task.group)) continue;
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        if (!first[root]) first[root] = t;
        last[root] = t;
      }
    }
  }
  std::vector<HeldBuffer> buffers;
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    const ValueId id(static_cast<int64_t>(v));
    if (value.alias_of.valid() || value.tier != tier) continue;
    const bool held = value.persistent ? Holds(devices, value.group) ||
                                             value.group == tasks.world
                                       : account.peak_task && first[v] &&
                                             *first[v] <= *account.peak_task &&
                                             last[v] >= *account.peak_task;
    if (held) buffers.push_back({LargestBytes(tasks, id), value.category, id});
  }
  const auto add = [&](Bytes bytes, MemoryCategory category) {
    if (bytes > Bytes{}) buffers.push_back({bytes, category, {}});
  };
  add(account.staged_at_peak, MemoryCategory::kCommunication);
  add(account.scratch_at_peak, MemoryCategory::kWorkspace);
  std::ranges::stable_sort(buffers, std::greater(), &HeldBuffer::bytes);
  buffers.resize(std::min(buffers.size(), most));
  return buffers;
}

std::string LargestAtPeakText(const TaskGraph& tasks, const Graph& graph,
                              const DeviceSet& devices, MemoryTier tier,
                              size_t most) {
  std::string text;
  for (const HeldBuffer& buffer : LargestAtPeak(tasks, devices, most, tier)) {
    if (!text.empty()) text += ", ";
    text += FormatBytes(buffer.bytes) + " ";
    if (!buffer.value.valid()) {
      const bool staged = buffer.category == MemoryCategory::kCommunication;
      text += staged ? "of messages" : "of a kernel";
    } else {
      const Value& value = tasks.value(buffer.value);
      text += value.what.empty() ? NameOf(value.category) : value.what;
      if (value.tensor.valid()) text += " " + graph.tensor(value.tensor).name;
    }
    if (buffer.category != MemoryCategory::kParameter &&
        buffer.category != MemoryCategory::kGradient) {
      text += " (" + std::string(NameOf(buffer.category)) + ")";
    }
  }
  return text;
}

}  // namespace tessera
