#include "runtime/rank_view.h"

#include <algorithm>
#include <utility>

#include "planner/base/check.h"

namespace tessera {

LocalTensor BlockOf(const Value& value, const Placement& here) {
  LocalTensor block;
  block.dtype = value.dtype;
  for (const Range& range : here.block) {
    block.shape.push_back(range.size());
    block.offset.push_back(range.begin);
  }
  block.global_shape = value.shape;
  return block;
}

RankView::RankView(const TaskGraph& tasks, const Graph& graph, int rank)
    : tasks_(tasks), graph_(graph) {
  for (const DeviceGroup& group : tasks.groups) {
    const auto it = std::ranges::find(group.devices, DeviceId(rank));
    group_positions_.push_back(
        it == group.devices.end()
            ? -1
            : static_cast<int>(it - group.devices.begin()));
  }
  for (const Task& task : tasks.tasks) {
    const bool exchanges =
        task.kind == TaskKind::kComm || task.stream == StreamRole::kComm;
    if (!exchanges || position(task.group) < 0) continue;
    const auto [it, is_new] = subgroups_.try_emplace({task.group, task.axes});
    if (!is_new) continue;
    const DeviceGroup& group = tasks.group(task.group);
    const AxisSet others = group.all_axes() & ~task.axes;
    auto all = Subgroups(group, task.axes);
    it->second = std::move(all[static_cast<size_t>(
        group.Coordinate(position(task.group), others))]);
  }
}

const std::vector<int>& RankView::Subgroup(const Task& task) const {
  return subgroups_.at({task.group, task.axes});
}

std::vector<int> RankView::RanksOfSubgroup(const Task& task) const {
  const DeviceGroup& group = tasks_.group(task.group);
  std::vector<int> ranks;
  for (int i : Subgroup(task)) {
    ranks.push_back(group.devices[static_cast<size_t>(i)].value);
  }
  return ranks;
}

Placement RankView::placement(ValueId id) const {
  const Value& value = tasks_.value(id);
  return PlacementAt(value.layout, tasks_.group(value.group), value.shape,
                     position(value.group));
}

std::vector<Placement> RankView::Placements(
    ValueId id, std::span<const int> positions) const {
  const Value& value = tasks_.value(id);
  std::vector<Placement> placements;
  for (int position : positions) {
    placements.push_back(PlacementAt(value.layout, tasks_.group(value.group),
                                     value.shape, position));
  }
  return placements;
}

Bytes RankView::BytesOf(ValueId id) const {
  const Value& value = tasks_.value(id);
  return {ElementsAt(value.layout, tasks_.group(value.group), value.shape,
                     position(value.group)) *
          SizeOf(value.dtype)};
}

LocalTensor RankView::local(ValueId id) const {
  const Value& value = tasks_.value(id);
  const Placement here = placement(id);
  LocalTensor tensor = BlockOf(value, here);
  if (value.layout.flat != 0) {
    tensor.shape = {here.elements()};
    tensor.offset = {0};
    tensor.global_shape = tensor.shape;
    return tensor;
  }
  // A microbatch is a range of samples of the tensor, or of what states, which
  // have no tensor, have of them.
  if (value.sample_dim >= 0) {
    const auto samples = static_cast<size_t>(value.sample_dim);
    tensor.offset[samples] += value.sample_offset;
    tensor.global_shape[samples] =
        value.tensor.valid() ? graph_.tensor(value.tensor).shape[samples]
                             : value.shape[samples] * tasks_.microbatches;
  }
  return tensor;
}

LocalTensor RankView::InWeight(ValueId id, std::optional<Range>& run) const {
  const Value& value = tasks_.value(id);
  const Placement here = placement(id);
  if (value.layout.flat != 0) run = here.run;
  return BlockOf(value, here);
}

LocalTensor RankView::Regrouped(ValueId id,
                                std::span<const size_t> groups) const {
  const Value& value = tasks_.value(id);
  const Box block = placement(id).block;
  Layout all = value.layout;
  all.tile = {};
  const Box kept = BlockAt(all, tasks_.group(value.group), value.shape,
                           position(value.group));
  LocalTensor tensor;
  tensor.dtype = value.dtype;
  size_t d = 0;
  for (const size_t dims : groups) {
    int64_t extent = 1;
    int64_t offset = 0;
    int64_t whole = 1;
    for (const size_t end = d + dims; d < end; ++d) {
      // Together they are a run of indices.
      TESSERA_CHECK(extent == 1 || block[d].size() == kept[d].size())
          << "an inner dimension in tiles";
      offset = offset * kept[d].size() + block[d].begin - kept[d].begin;
      extent *= block[d].size();
      whole *= value.shape[d];
    }
    tensor.shape.push_back(extent);
    tensor.offset.push_back(offset);
    tensor.global_shape.push_back(whole);
  }
  TESSERA_CHECK(d == value.shape.size()) << value.what;
  return tensor;
}

bool RankView::IsAbsent(ValueId id) const {
  const Value& value = tasks_.value(id);
  return IsAbsentAt(value.layout, tasks_.group(value.group),
                    position(value.group));
}

bool RankView::IsAlone(ValueId id) const {
  const Value& value = tasks_.value(id);
  const DeviceGroup& group = tasks_.group(value.group);
  return group.Size(value.layout.replicated(group)) == 1;
}

bool RankView::IsIdle(const Task& task) const {
  switch (task.kind) {
    case TaskKind::kLoad:
    case TaskKind::kCompute:
    case TaskKind::kSlice:
    case TaskKind::kCopy:
      return !task.writes.empty() &&
             std::all_of(task.writes.begin(), task.writes.end(),
                         [&](ValueId id) { return IsAbsent(id); });
    case TaskKind::kComm: {
      // None of the subgroup has anything before or after.
      const DeviceGroup& group = tasks_.group(task.group);
      for (int i : Subgroup(task)) {
        for (const auto* list : {&task.reads, &task.writes}) {
          for (ValueId id : *list) {
            if (!IsAbsentAt(tasks_.value(id).layout, group, i)) return false;
          }
        }
      }
      return true;
    }
    case TaskKind::kSend:
    case TaskKind::kRecv:
      return false;
  }
  return false;
}

}  // namespace tessera
