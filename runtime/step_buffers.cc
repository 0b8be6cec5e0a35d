#include "runtime/step_buffers.h"

#include <algorithm>
#include <map>

#include "planner/base/check.h"
#include "planner/base/divide.h"
#include "runtime/device/staging.h"

namespace tessera {

StepBuffers::StepBuffers(const RankView& view, RankDevice& device,
                         const StepBuffers* lender)
    : view_(view),
      tasks_(view.tasks()),
      device_(device),
      queue_device_(device.queues()),
      lender_(lender),
      roots_(tasks_.values.size()),
      offsets_(tasks_.values.size()),
      sizes_(tasks_.values.size()),
      buffers_(tasks_.values.size()) {
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    roots_[v] = tasks_.Root(ValueId(v));
    if (view_.position(tasks_.values[v].group) < 0) continue;
    Bytes& size = sizes_[roots_[v].index()];
    size = Max(size, view_.BytesOf(ValueId(v)));
  }
}

// The lender's buffers and arenas stay; what is placed, or lies behind others,
// goes with what it lies in.
StepBuffers::~StepBuffers() {
  for (void* data : pinned_) queue_device_->Unpin(data);
  for (const std::vector<ValueId>& values : together_) {
    for (ValueId id : values) {
      if (id != values[0]) buffers_[id.index()] = nullptr;
    }
  }
  for (size_t v = 0; v < buffers_.size(); ++v) {
    const bool persistent = tasks_.values[v].persistent;
    const bool borrowed = lender_ != nullptr && persistent;
    const bool placed = queue_device_ != nullptr && !persistent;
    if (!borrowed && !placed) Free(ValueId(v));
  }
  for (size_t tier = 0; tier < arenas_.size(); ++tier) {
    const bool borrowed =
        lender_ != nullptr && arenas_[tier].data == lender_->arenas_[tier].data;
    if (arenas_[tier].data == nullptr || borrowed) continue;
    DeviceOf(static_cast<MemoryTier>(tier)).Free(arenas_[tier].data);
  }
  for (const auto& [device, one] : ones_) device->Free(one);
}

// ---- Which buffers there are ------------------------------------------------

void StepBuffers::Join(ValueId part, ValueId whole, Bytes offset) {
  roots_[part.index()] = whole;
  offsets_[part.index()] = offset;
  sizes_[part.index()] = {};
}

bool StepBuffers::LayTogether(const std::vector<ValueId>& values) {
  if (lender_ != nullptr) return false;  // these lie somewhere
  if (std::ranges::count(together_, values) > 0) return true;
  for (ValueId id : values) {
    const bool is_other =
        std::ranges::any_of(together_, [&](const std::vector<ValueId>& other) {
          return std::ranges::count(other, id) > 0;
        });
    if (is_other || std::ranges::count(values, id) > 1 || root(id) != id ||
        !tasks_.value(id).persistent ||
        tasks_.value(id).category != tasks_.value(values[0]).category ||
        size(id) != view_.BytesOf(id) ||
        size(id).value % RankDevice::kAlignment != 0) {
      return false;
    }
  }
  together_.push_back(values);
  return true;
}

// ---- What persists ----------------------------------------------------------

// The host's buffers are such as the file reads and writes directly, and such
// as are pinned: in pages of their own.
Result<void> StepBuffers::OpenTiers(const FileTierOptions& options) {
  if (lender_ != nullptr) {
    host_ = lender_->host_;
    file_ = lender_->file_;
    layout_ = lender_->layout_;
    return {};
  }
  bool host = false;
  bool file = false;
  for (const Value& value : tasks_.values) {
    if (view_.position(value.group) < 0) continue;
    host = host || value.tier == MemoryTier::kHost;
    file = file || value.tier == MemoryTier::kFile;
  }
  if (host || file) {
    host_ = file || queue_device_ != nullptr
                ? std::make_shared<CpuDevice>(1, true, kFileBlockBytes)
                : std::make_shared<CpuDevice>();
  }
  if (file) {
    layout_ = LayOutFile(tasks_, sizes_);
    TESSERA_TRY(file_, FileTier::Open(options, layout_.length));
  }
  return {};
}

Result<void> StepBuffers::AllocatePersistent() {
  if (lender_ == nullptr) ExpectPersistent();
  for (const std::vector<ValueId>& values : together_) {
    Bytes all;
    for (ValueId id : values) all += size(id);
    TESSERA_TRY(void* const data,
                device_.Allocate(all, tasks_.value(values[0]).category));
    auto* next = static_cast<std::byte*>(data);
    for (ValueId id : values) {
      buffers_[id.index()] = next;
      next += size(id).value;
    }
  }
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    if (!tasks_.values[v].persistent || sizes_[v] == Bytes{}) continue;
    if (lender_ != nullptr) {
      buffers_[v] = lender_->buffers_[v];
    } else if (buffers_[v] == nullptr) {
      TESSERA_RETURN_IF_ERROR(Allocate(ValueId(v)));
    }
  }
  return {};
}

// What lives as long as this does, by category.
void StepBuffers::ExpectPersistent() {
  std::map<MemoryCategory, int64_t> bytes;
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    const Value& value = tasks_.values[v];
    if (!value.persistent || value.tier != MemoryTier::kDevice) continue;
    constexpr int64_t kUnit = RankDevice::kAlignment;
    bytes[value.category] += RoundUp(sizes_[v].value, kUnit);
  }
  for (const auto& [category, sum] : bytes) device_.Expect({sum}, category);
}

// ---- What a step needs besides ----------------------------------------------

Result<void> StepBuffers::Allocate(ValueId root) {
  if (InFile(root)) return {};  // it has its place
  const Value& value = tasks_.value(root);
  TESSERA_TRY(buffers_[root.index()],
              DeviceOf(value.tier).Allocate(size(root), value.category));
  return {};
}

void StepBuffers::Free(ValueId root) {
  void* const data = std::exchange(buffers_[root.index()], nullptr);
  if (data != nullptr) DeviceOf(tasks_.value(root).tier).Free(data);
}

HeldBytes StepBuffers::MemoryOf(ValueId root) const {
  switch (tasks_.value(root).tier) {
    case MemoryTier::kDevice:
      return {size(root), {}};
    case MemoryTier::kHost:
      return {{}, size(root)};
    case MemoryTier::kFile:
      break;
  }
  return {};
}

Result<std::byte*> StepBuffers::MakeArena(MemoryTier tier, Bytes size) {
  Arena& arena = arenas_[static_cast<size_t>(tier)];
  if (size == Bytes{}) return arena.data;
  if (lender_ != nullptr) {
    const Arena& other = lender_->arenas_[static_cast<size_t>(tier)];
    if (other.size >= size) {
      arena = other;
      return arena.data;
    }
  }
  TESSERA_TRY(void* const data,
              DeviceOf(tier).Allocate(size, MemoryCategory::kActivation));
  arena = {static_cast<std::byte*>(data), size};
  if (tier == MemoryTier::kHost) TESSERA_RETURN_IF_ERROR(Pin(data, size));
  return arena.data;
}

Result<void> StepBuffers::PinPersistent() {
  if (lender_ != nullptr) return {};  // these are
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    const Value& value = tasks_.values[v];
    if (!value.persistent || value.tier != MemoryTier::kHost ||
        buffers_[v] == nullptr) {
      continue;
    }
    TESSERA_RETURN_IF_ERROR(Pin(buffers_[v], sizes_[v]));
  }
  return {};
}

Result<void> StepBuffers::Pin(void* data, Bytes size) {
  TESSERA_RETURN_IF_ERROR(queue_device_->Pin(data, size));
  pinned_.push_back(data);
  return {};
}

Result<void*> StepBuffers::One(RankDevice& device, DType dtype) {
  for (const auto& [other, data] : ones_) {
    if (other == &device) return data;
  }
  const Bytes size{SizeOf(dtype)};
  TESSERA_TRY(void* const data,
              device.Allocate(size, MemoryCategory::kWorkspace));
  ones_.emplace_back(&device, data);
  if (dtype == DType::kFloat64) {
    const double one = 1;
    device.Write(data, &one, size);
  } else {
    const float one = 1;
    device.Write(data, &one, size);
  }
  return data;
}

// ---- What is there ----------------------------------------------------------

void* StepBuffers::data(ValueId id) const {
  auto* const buffer = static_cast<std::byte*>(buffers_[root(id).index()]);
  return buffer == nullptr ? nullptr : buffer + offsets_[id.index()].value;
}

bool StepBuffers::InFile(ValueId id) const {
  return tasks_.value(id).tier == MemoryTier::kFile;
}

int64_t StepBuffers::file_offset(ValueId id) const {
  return layout_.offsets[root(id).index()];
}

bool StepBuffers::Holds(ValueId id) const {
  return buffers_[root(id).index()] != nullptr ||
         (InFile(root(id)) && size(root(id)) > Bytes{});
}

Result<void> StepBuffers::Read(ValueId id, void* to, Bytes offset,
                               Bytes size) const {
  if (!InFile(id)) {
    DeviceOf(tasks_.value(id).tier)
        .Read(to, static_cast<const std::byte*>(data(id)) + offset.value, size);
    return {};
  }
  const Bytes before{offset.value % kFileBlockBytes};
  TESSERA_TRY(const Staging staging, Staging::Allocate(*host_, before + size));
  const FileTier::Transfer transfer{
      file_offset(id) + offset.value - before.value, staging.data(),
      before.value + size.value};
  TESSERA_RETURN_IF_ERROR(file_->Read({&transfer, 1}));
  host_->Read(to, static_cast<const std::byte*>(staging.data()) + before.value,
              size);
  return {};
}

Result<void> StepBuffers::Write(ValueId id, const void* from, Bytes offset,
                                Bytes size) const {
  if (!InFile(id)) {
    DeviceOf(tasks_.value(id).tier)
        .Write(static_cast<std::byte*>(data(id)) + offset.value, from, size);
    return {};
  }
  TESSERA_TRY(const Staging staging, Staging::Allocate(*host_, size));
  host_->Write(staging.data(), from, size);
  const FileTier::Transfer transfer{file_offset(id) + offset.value,
                                    staging.data(), size.value};
  return file_->Write({&transfer, 1});
}

RankDevice& StepBuffers::DeviceOf(MemoryTier tier) const {
  return tier == MemoryTier::kHost ? *host_ : device_;
}

}  // namespace tessera
