#include "planner/lower/fingerprint.h"

#include <span>
#include <string_view>
#include <vector>

#include "planner/base/fnv1a.h"

namespace tessera {
namespace {

// Structs are taken apart whole: one with a new field does not compile until
// the field has been looked at here. Lists have their lengths before them, so
// that nothing moves from one to the next unseen.

uint64_t Word(int64_t number) {
  return static_cast<uint64_t>(number);
}
template <typename Tag>
uint64_t Word(Id<Tag> id) {
  return Word(int64_t{id.value});
}
// Two of 32 bits.
uint64_t Word(uint32_t high, uint32_t low) {
  return uint64_t{high} << 32 | low;
}
template <typename Tag, typename OtherTag>
uint64_t Word(Id<Tag> high, Id<OtherTag> low) {
  return Word(static_cast<uint32_t>(high.value),
              static_cast<uint32_t>(low.value));
}

void AddText(std::string_view text, Fnv1a& hash) {
  hash.Add(uint64_t{text.size()}).Add(text);
}

template <typename T>
void AddList(const std::vector<T>& list, Fnv1a& hash) {
  hash.Add(uint64_t{list.size()});
  for (const T& entry : list) hash.Add(Word(entry));
}

void Add(const DeviceGroup& group, Fnv1a& hash) {
  const auto& [name, devices, axes] = group;
  AddList(devices, hash);
  hash.Add(uint64_t{axes.size()});
  for (const auto& [axis_name, size, shares, counted] : axes) {
    hash.Add(Word(size));
    AddList(shares, hash);
  }
}

void Add(const Layout& layout, Fnv1a& hash) {
  const auto& [dims, partial, flat, rooted, tile, ring, turn, even, halos] =
      layout;
  for (size_t d = 0; d < dims.size(); d += 2) {
    hash.Add(Word(dims[d], d + 1 < dims.size() ? dims[d + 1] : 0));
  }
  hash.Add(Word(partial, flat)).Add(Word(rooted, even));
  hash.Add(Word(ring, static_cast<uint32_t>(turn)));
  const auto& [dim, index, count] = tile;
  hash.Add(Word(dim)).Add(Word(index)).Add(Word(count));
  for (const auto& [halo_dim, before, after] : halos) {
    hash.Add(Word(halo_dim)).Add(Word(before)).Add(Word(after));
  }
}

void Add(const Value& value, Fnv1a& hash) {
  const auto& [what, tensor, group, shape, sample_offset, sample_dim, dtype,
               element_bytes, layout, category, tier, persistent, alias_of] =
      value;
  AddText(what, hash);
  hash.Add(Word(tensor, group)).Add(Word(alias_of));
  AddList(shape, hash);
  hash.Add(Word(sample_offset)).Add(Word(sample_dim));
  hash.Add(static_cast<uint64_t>(dtype) | static_cast<uint64_t>(category) << 8 |
           static_cast<uint64_t>(tier) << 16 | uint64_t{persistent} << 24);
  Add(layout, hash);
}

void Add(const Task& task, Fnv1a& hash) {
  const auto& [kind, stream, comm, pass, accumulate, adds_microbatches,
               optimizer, after_compute, group, axes, microbatch, node, kernel,
               reads, writes, masks, peer, scratch_of, scratch_bytes, deps,
               like] = task;
  hash.Add(static_cast<uint64_t>(kind) | static_cast<uint64_t>(stream) << 8 |
           static_cast<uint64_t>(comm) << 16 |
           static_cast<uint64_t>(pass) << 24 | uint64_t{accumulate} << 32 |
           uint64_t{adds_microbatches} << 33 | uint64_t{optimizer} << 34 |
           uint64_t{after_compute} << 35);
  hash.Add(Word(group, node)).Add(Word(peer)).Add(uint64_t{axes});
  hash.Add(Word(microbatch));
  AddText(kernel, hash);
  AddList(reads, hash);
  AddList(writes, hash);
  AddList(masks, hash);
  AddList(deps, hash);
}

}  // namespace

uint64_t Fingerprint(const TaskGraph& graph) {
  const auto& [groups, world, values, tasks, loss, microbatches, zigzag] =
      graph;
  Fnv1a hash;
  hash.Add(uint64_t{groups.size()});
  for (const DeviceGroup& group : groups) Add(group, hash);
  hash.Add(uint64_t{values.size()});
  for (const Value& value : values) Add(value, hash);
  hash.Add(uint64_t{tasks.size()});
  for (const Task& task : tasks) Add(task, hash);
  hash.Add(Word(world, loss)).Add(Word(microbatches)).Add(Word(zigzag));
  return hash.value();
}

}  // namespace tessera
