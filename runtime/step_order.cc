#include "runtime/step_order.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "planner/base/check.h"
#include "planner/base/free_list.h"

namespace tessera {

std::vector<std::vector<int>> WaitsOf(const std::vector<EnqueuedJob>& jobs) {
  int streams = 0;
  for (const EnqueuedJob& job : jobs)
    streams = std::max(streams, job.stream + 1);
  const auto count = static_cast<size_t>(streams);
  // By job and stream: the last job of the stream that has ended when the job
  // starts, or -1 (a vector clock).
  std::vector<int> clocks(jobs.size() * count, -1);
  std::vector<int> last(count, -1);  // by stream
  std::vector<std::vector<int>> waits(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    int* const clock = &clocks[i * count];
    const auto join = [&](int job) {
      const auto j = static_cast<size_t>(job);
      for (size_t s = 0; s < count; ++s) {
        clock[s] = std::max(clock[s], clocks[j * count + s]);
      }
      const auto stream = static_cast<size_t>(jobs[j].stream);
      clock[stream] = std::max(clock[stream], job);
    };
    const auto own = static_cast<size_t>(jobs[i].stream);
    if (last[own] >= 0) join(last[own]);
    // A later job may imply an earlier one, never the other way round.
    std::vector<int> deps = jobs[i].deps;
    std::sort(deps.rbegin(), deps.rend());
    for (int dep : deps) {
      TESSERA_CHECK(dep >= 0 && dep < static_cast<int>(i)) << dep;
      const auto stream =
          static_cast<size_t>(jobs[static_cast<size_t>(dep)].stream);
      if (clock[stream] >= dep) continue;
      join(dep);
      waits[i].push_back(dep);
    }
    last[own] = static_cast<int>(i);
  }
  return waits;
}

namespace {

// Which jobs used a range of bytes last, the last of each stream.
class LastUsers {
 public:
  // Takes away what is known of the range, and says who used any of it.
  std::set<int> Take(int64_t begin, int64_t end) {
    std::set<int> users;
    auto range = ranges_.lower_bound(begin);
    if (range != ranges_.begin() && std::prev(range)->second.end > begin) {
      --range;
    }
    while (range != ranges_.end() && range->first < end) {
      const auto [from, used] = *range;
      users.insert(used.users.begin(), used.users.end());
      range = ranges_.erase(range);
      if (from < begin) ranges_[from] = {begin, used.users};
      if (used.end > end) ranges_[end] = {used.end, used.users};
    }
    return users;
  }
  void Set(int64_t begin, int64_t end, std::vector<int> users) {
    ranges_[begin] = {end, std::move(users)};
  }

 private:
  struct Used {
    int64_t end = 0;
    std::vector<int> users;
  };
  std::map<int64_t, Used> ranges_;  // disjoint, by where they begin
};

// The last job of each stream among `users`.
std::vector<int> LastOfStreams(const std::vector<int>& users,
                               const std::vector<EnqueuedJob>& jobs) {
  std::map<int, int> last;
  for (int job : users) last[jobs[static_cast<size_t>(job)].stream] = job;
  std::vector<int> result;
  for (const auto& [stream, job] : last) result.push_back(job);
  return result;
}

}  // namespace

BufferPlaces PlaceBuffers(const std::vector<BufferUse>& buffers,
                          int64_t alignment, std::vector<EnqueuedJob>& jobs) {
  // One room for each stream's own buffers, and one (-1) for those of several.
  std::map<int, std::vector<size_t>> rooms;
  for (size_t b = 0; b < buffers.size(); ++b) {
    const auto stream_of = [&](int job) {
      return jobs[static_cast<size_t>(job)].stream;
    };
    const int stream = stream_of(buffers[b].jobs.front());
    const bool alone =
        std::all_of(buffers[b].jobs.begin(), buffers[b].jobs.end(),
                    [&](int job) { return stream_of(job) == stream; });
    rooms[alone ? stream : -1].push_back(b);
  }
  BufferPlaces places;
  places.offsets.resize(buffers.size());
  for (const auto& [stream, members] : rooms) {
    std::vector<std::vector<size_t>> begins(jobs.size());
    std::vector<std::vector<size_t>> ends(jobs.size());
    for (size_t b : members) {
      begins[static_cast<size_t>(buffers[b].jobs.front())].push_back(b);
      ends[static_cast<size_t>(buffers[b].jobs.back())].push_back(b);
    }
    FreeList room(alignment);
    LastUsers last_users;
    for (size_t j = 0; j < jobs.size(); ++j) {
      for (size_t b : begins[j]) {
        const int64_t bytes = buffers[b].bytes.value;
        const int64_t offset = room.Take(bytes);
        for (int user : last_users.Take(offset, offset + bytes)) {
          jobs[j].deps.push_back(user);
        }
        places.offsets[b] = places.arena.value + offset;
      }
      for (size_t b : ends[j]) {
        const int64_t bytes = buffers[b].bytes.value;
        const int64_t offset = places.offsets[b] - places.arena.value;
        room.Give(offset, bytes);
        last_users.Set(offset, offset + bytes,
                       LastOfStreams(buffers[b].jobs, jobs));
      }
    }
    places.arena.value += room.end();
  }
  return places;
}

std::vector<int> LaunchSizes(std::span<const ListedCall> calls) {
  std::vector<int> sizes;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i > 0 && calls[i].kernel->run_list != nullptr &&
        calls[i] == calls[i - 1]) {
      ++sizes.back();
    } else {
      sizes.push_back(1);
    }
  }
  return sizes;
}

bool IsCapturable(const Task& task, std::span<const Value> values) {
  switch (task.kind) {
    case TaskKind::kCompute:
      return !OnHost(task, values);
    case TaskKind::kLoad:
    case TaskKind::kSlice:
      return true;
    case TaskKind::kCopy: {
      const auto in_file = [&](ValueId id) {
        return values[id.index()].tier == MemoryTier::kFile;
      };
      return std::ranges::none_of(task.reads, in_file) &&
             std::ranges::none_of(task.writes, in_file);
    }
    case TaskKind::kComm:
    case TaskKind::kSend:
    case TaskKind::kRecv:
      break;
  }
  return false;
}

StepParts PartsOf(const std::vector<EnqueuedJob>& jobs,
                  const std::vector<bool>& capturable) {
  StepParts step;
  const auto count = static_cast<int>(jobs.size());
  for (int begin = 0; begin < count;) {
    int end = begin;
    while (end < count && capturable[static_cast<size_t>(end)]) ++end;
    const bool captured = end - begin >= 2;
    if (!captured) end = begin + 1;
    StepPart part;
    part.begin = begin;
    part.end = end;
    part.captured = captured;
    part.stream = jobs[static_cast<size_t>(begin)].stream;
    step.parts.push_back(std::move(part));
    begin = end;
  }
  // Parts as jobs; and by stream the last part that has a job of it.
  std::vector<EnqueuedJob> outside;
  std::map<int, int> last;
  std::vector<int> part_of(jobs.size());
  for (size_t p = 0; p < step.parts.size(); ++p) {
    const StepPart& part = step.parts[p];
    const auto index = static_cast<int>(p);
    EnqueuedJob& whole = outside.emplace_back();
    whole.stream = part.stream;
    std::vector<EnqueuedJob> inside;
    for (int j = part.begin; j < part.end; ++j) {
      const EnqueuedJob& job = jobs[static_cast<size_t>(j)];
      part_of[static_cast<size_t>(j)] = index;
      EnqueuedJob& own = inside.emplace_back();
      own.stream = job.stream;
      for (int dep : job.deps) {
        const int of = part_of[static_cast<size_t>(dep)];
        if (of == index) {
          own.deps.push_back(dep - part.begin);
        } else {
          whole.deps.push_back(of);
        }
      }
      if (const auto it = last.find(job.stream);
          it != last.end() && it->second != index) {
        whole.deps.push_back(it->second);
      }
      last[job.stream] = index;
    }
    for (std::vector<int>& waits : WaitsOf(inside)) {
      for (int& job : waits) job += part.begin;
      step.waits_inside.push_back(std::move(waits));
    }
  }
  const auto waits = WaitsOf(outside);
  for (size_t p = 0; p < waits.size(); ++p) step.parts[p].waits = waits[p];
  return step;
}

}  // namespace tessera
