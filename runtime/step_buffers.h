#pragma once
// StepBuffers: where the values of a task graph lie on one rank: on the device,
// in the host's memory, or in a file. Values that share a buffer have one root,
// which it is known by.
//
// First it is settled which buffers there are and how large (Drop to
// LayTogether), then OpenTiers and AllocatePersistent make what lives as long
// as this does. What a step needs besides is allocated and freed within it
// (Allocate, Free), or has a place in an arena for good (MakeArena, Place).
//
// Thread safety: none, but that several threads may ask at once.

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/file_layout.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/memory_tier.h"
#include "runtime/device/cpu_device.h"
#include "runtime/device/device.h"
#include "runtime/rank_view.h"
#include "runtime/storage/file_tier.h"
#include "runtime/streams.h"

namespace tessera {

class StepBuffers {
 public:
  // With `lender`, of a task graph with the same values, what persists is that
  // one's, as are the host's memory and the file; and its arenas where they are
  // large enough: the two are not in use at the same time. All outlive this.
  StepBuffers(const RankView& view, RankDevice& device,
              const StepBuffers* lender = nullptr);
  StepBuffers(const StepBuffers&) = delete;
  StepBuffers& operator=(const StepBuffers&) = delete;
  ~StepBuffers();

  // The value whose buffer this one has a part of; and the buffer's size, by
  // such a root. Nothing on the ranks outside of the value's group.
  ValueId root(ValueId value) const { return roots_[value.index()]; }
  Bytes size(ValueId root) const { return sizes_[root.index()]; }

  // ---- Which buffers there are

  // Nothing uses a value's buffer any more.
  void Drop(ValueId value) { sizes_[root(value).index()] = {}; }
  // `part`, which is a root, lies in the buffer of `whole`, at `offset`.
  void Join(ValueId part, ValueId whole, Bytes offset);
  void Resize(ValueId root, Bytes size) { sizes_[root.index()] = size; }
  // Whether persistent values lie, or from now on will, one behind the other.
  bool LayTogether(const std::vector<ValueId>& values);

  // ---- What persists

  // Makes the host's memory and the file, if any value lies there.
  Result<void> OpenTiers(const FileTierOptions& options);
  // Of unknown contents.
  Result<void> AllocatePersistent();

  // ---- What a step needs besides

  // A root's buffer, from its first use to its last. What lies in a file has
  // its place there.
  Result<void> Allocate(ValueId root);
  void Free(ValueId root);
  // What that takes of its tier; of what lies in a file nothing.
  HeldBytes MemoryOf(ValueId root) const;

  // Instead, on a device with queues: one piece of a tier's memory for all
  // buffers of a step, that of the host pinned; and a root's place in it.
  Result<std::byte*> MakeArena(MemoryTier tier, Bytes size);
  void Place(ValueId root, void* data) { buffers_[root.index()] = data; }
  // Pins what persists in the host's memory. REQUIRES: a device with queues.
  Result<void> PinPersistent();

  // Memory of `device` that holds the scalar 1, in fp32 or fp64: the clip
  // coefficient where none is computed.
  Result<void*> One(RankDevice& device, DType dtype);

  // ---- What is there

  // In the memory of its tier; null where this rank has none now, and for what
  // lies in a file.
  void* data(ValueId value) const;
  bool InFile(ValueId value) const;
  int64_t file_offset(ValueId value) const;
  // Whether this rank has it now, on whatever tier.
  bool Holds(ValueId value) const;

  // Some bytes of a value, from and to memory of the caller; to what lies in a
  // file in whole blocks (kFileBlockBytes) but for the end.
  Result<void> Read(ValueId value, void* to, Bytes offset, Bytes size) const;
  Result<void> Write(ValueId value, const void* from, Bytes offset,
                     Bytes size) const;

  // The device of a tier's memory, which is none in a file.
  RankDevice& DeviceOf(MemoryTier tier) const;
  // Null where no value is there.
  CpuDevice* host() const { return host_.get(); }
  FileTier* file() const { return file_.get(); }

 private:
  void ExpectPersistent();
  Result<void> Pin(void* data, Bytes size);

  const RankView& view_;
  const TaskGraph& tasks_;
  RankDevice& device_;
  QueueDevice* const queue_device_;  // the same, or null
  const StepBuffers* const lender_;
  std::shared_ptr<CpuDevice> host_;
  std::shared_ptr<FileTier> file_;
  FileLayout layout_;  // of the file, if there is one

  std::vector<ValueId> roots_;  // by value
  std::vector<Bytes> offsets_;  // by value, in the root's buffer
  std::vector<Bytes> sizes_;    // by root
  std::vector<void*> buffers_;  // by root
  // Persistent values whose buffers lie one behind the other, as one.
  std::vector<std::vector<ValueId>> together_;
  struct Arena {
    std::byte* data = nullptr;
    Bytes size;
  };
  std::array<Arena, kMemoryTiers> arenas_;
  std::vector<void*> pinned_;
  std::vector<std::pair<RankDevice*, void*>> ones_;
};

}  // namespace tessera
