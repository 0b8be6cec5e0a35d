#include "costmodel/memory/peak_memory.h"

#include "planner/lower/staging.h"

namespace tessera {
namespace {

// The bytes of one group at a moment of the walk, and the most so far.
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
  std::vector<Account> accounts(tasks.world.index());
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
      accounts[value.group.index()].Add(value.category, bytes[v]);
    }
  }
  for (Account& account : accounts) account.Note();

  const auto frees = LastUses(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.group == tasks.world) continue;
    Account& account = accounts[task.group.index()];
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        if (held[root]) continue;
        held[root] = true;
        account.Add(tasks.values[root].category, bytes[root]);
      }
    }
    const Value* const peer =
        task.peer.valid() ? &tasks.value(task.peer) : nullptr;
    const Bytes staging =
        StagingBytes(task, tasks.values, tasks.group(task.group), peer,
                     peer == nullptr ? nullptr : &tasks.group(peer->group));
    account.Add(MemoryCategory::kCommunication, staging);
    account.Note();
    account.Remove(MemoryCategory::kCommunication, staging);
    for (ValueId id : frees[t]) {
      account.Remove(tasks.value(id).category, bytes[id.index()]);
    }
  }
  std::vector<MemoryUse> peaks;
  for (const Account& account : accounts) peaks.push_back(account.peak);
  return peaks;
}

}  // namespace tessera
