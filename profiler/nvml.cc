// GPUs by NVIDIA's management library, which comes with the driver. It is
// opened when it is asked for, so that nothing of NVIDIA's is needed to build
// or run elsewhere. What is declared here is its binary interface (NVML API
// Reference Guide).

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "planner/base/split.h"
#include "planner/base/whole_number.h"
#include "profiler/machine.h"

namespace tessera {
namespace {

using Handle = void*;  // nvmlDevice_t

struct Memory {  // nvmlMemory_t
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct PciInfo {  // nvmlPciInfo_t
  char legacy_bus_id[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned pci_device_id;
  unsigned pci_subsystem_id;
  char bus_id[32];
};

struct FabricInfo {  // nvmlGpuFabricInfo_v2_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

constexpr int kSuccess = 0;         // NVML_SUCCESS
constexpr int kNotSupported = 3;    // NVML_ERROR_NOT_SUPPORTED
constexpr unsigned kMaxLinks = 64;  // beyond any NVML_NVLINK_MAX_LINKS
// nvmlGpuFabricState_t; until it is completed, or where its status is an error,
// a GPU does not know its domain.
constexpr int kFabricNotSupported = 0;
constexpr int kFabricCompleted = 3;
constexpr int kRemoteIsGpu = 0;     // NVML_NVLINK_DEVICE_TYPE_GPU
constexpr int kRemoteIsSwitch = 2;  // NVML_NVLINK_DEVICE_TYPE_SWITCH

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};

struct Nvml {
  int (*init)();
  int (*shutdown)();
  const char* (*error_string)(int code);
  int (*driver_version)(char* version, unsigned length);
  int (*count)(unsigned* count);
  int (*handle)(unsigned index, Handle* device);
  int (*name)(Handle device, char* name, unsigned length);
  int (*memory)(Handle device, Memory* memory);
  int (*pci_info)(Handle device, PciInfo* info);
  int (*link_state)(Handle device, unsigned link, unsigned* active);
  int (*remote_type)(Handle device, unsigned link, int* type);
  int (*remote_pci)(Handle device, unsigned link, PciInfo* info);
  int (*fabric_info)(Handle device, FabricInfo* info);

  Result<void> Check(int code, const char* call) const {
    if (code == kSuccess) return {};
    return Error{ErrorCode::kUnavailable,
                 std::string(call) + ": " + error_string(code), "NVML"};
  }
};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The first three are absent from old drivers' libraries; NVLinks, or the hosts
// that they join, then stay unknown.
bool FindAll(void* library, Nvml& nvml) {
  Find(library, "nvmlDeviceGetNvLinkRemoteDeviceType", nvml.remote_type);
  Find(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2", nvml.remote_pci);
  Find(library, "nvmlDeviceGetGpuFabricInfoV", nvml.fabric_info);
  return Find(library, "nvmlInit_v2", nvml.init) &&
         Find(library, "nvmlShutdown", nvml.shutdown) &&
         Find(library, "nvmlErrorString", nvml.error_string) &&
         Find(library, "nvmlSystemGetDriverVersion", nvml.driver_version) &&
         Find(library, "nvmlDeviceGetCount_v2", nvml.count) &&
         Find(library, "nvmlDeviceGetHandleByIndex_v2", nvml.handle) &&
         Find(library, "nvmlDeviceGetName", nvml.name) &&
         Find(library, "nvmlDeviceGetMemoryInfo", nvml.memory) &&
         Find(library, "nvmlDeviceGetPciInfo_v3", nvml.pci_info) &&
         Find(library, "nvmlDeviceGetNvLinkState", nvml.link_state);
}

// Counts the active links of GPU `index`. A link that NVML does not know ends
// the list.
void CountLinks(const Nvml& nvml, Handle device,
                const std::vector<PciInfo>& all, FoundGpu& gpu) {
  gpu.peer_links.assign(all.size(), 0);
  if (nvml.remote_type == nullptr || nvml.remote_pci == nullptr) return;
  for (unsigned link = 0; link < kMaxLinks; ++link) {
    unsigned active = 0;
    if (nvml.link_state(device, link, &active) != kSuccess) break;
    int type = -1;
    if (active == 0 || nvml.remote_type(device, link, &type) != kSuccess) {
      continue;
    }
    if (type == kRemoteIsSwitch) ++gpu.switch_links;
    PciInfo remote = {};
    if (type != kRemoteIsGpu ||
        nvml.remote_pci(device, link, &remote) != kSuccess) {
      continue;
    }
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (all[peer].domain == remote.domain && all[peer].bus == remote.bus &&
          all[peer].device == remote.device) {
        ++gpu.peer_links[peer];
      }
    }
  }
}

// "" where there is none, or this driver does not say; nothing where the GPU is
// not part of its fabric, or not yet.
std::optional<std::string> NvLinkDomain(const Nvml& nvml, Handle device) {
  FabricInfo info = {};
  info.version = sizeof(info) | (2u << 24);
  if (nvml.fabric_info == nullptr ||
      nvml.fabric_info(device, &info) != kSuccess ||
      info.state == kFabricNotSupported) {
    return "";
  }
  if (info.state != kFabricCompleted || info.status != kSuccess) {
    return std::nullopt;
  }
  if (std::ranges::all_of(info.cluster, [](auto byte) { return byte == 0; })) {
    return "";
  }
  std::string text;
  for (const unsigned char byte : info.cluster) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  return text + "/" + std::to_string(info.clique);
}

// All but what NVLinks join.
Result<FoundGpu> ReadGpu(const Nvml& nvml, const std::string& root,
                         const Machine& machine, unsigned index, Handle& handle,
                         PciInfo& place) {
  FoundGpu gpu;
  char text[96] = {};
  Memory memory = {};
  TESSERA_RETURN_IF_ERROR(
      nvml.Check(nvml.handle(index, &handle), "nvmlDeviceGetHandleByIndex"));
  TESSERA_RETURN_IF_ERROR(
      nvml.Check(nvml.name(handle, text, sizeof(text)), "nvmlDeviceGetName"));
  const int sized = nvml.memory(handle, &memory);
  if (sized != kNotSupported) {
    TESSERA_RETURN_IF_ERROR(nvml.Check(sized, "nvmlDeviceGetMemoryInfo"));
  }
  TESSERA_RETURN_IF_ERROR(
      nvml.Check(nvml.pci_info(handle, &place), "nvmlDeviceGetPciInfo"));
  gpu.name = text;
  // One that is part of the processor has no memory but the host's.
  gpu.memory = sized == kNotSupported
                   ? machine.memory
                   : Bytes{static_cast<int64_t>(memory.total)};
  gpu.place = FindPciPlace(root, place.bus_id);
  return gpu;
}

// How many of `count` GPUs CUDA_VISIBLE_DEVICES names: those in front of the
// first that there cannot be, as "-1" (CUDA C++ Programming Guide 13.0, "CUDA
// Environment Variables").
size_t NamedGpus(std::string_view visible, unsigned count) {
  size_t named = 0;
  for (const std::string_view gpu : Split(visible, ',')) {
    const auto index = ParseWhole<int64_t>(gpu);  // Others have UUIDs.
    if (gpu.empty() || (index && (*index < 0 || *index >= count))) break;
    ++named;
  }
  return named;
}

// `count`: those of the driver, with those that are left out.
void WarnOfHidden(Machine& machine, unsigned count) {
  const char* const set = std::getenv("CUDA_VISIBLE_DEVICES");
  if (set == nullptr) return;
  const size_t named = NamedGpus(set, count);
  const size_t all = machine.gpus.size();
  if (named >= all) return;
  machine.warnings.push_back("CUDA_VISIBLE_DEVICES is '" + std::string(set) +
                             "': a program here has " + std::to_string(named) +
                             " of the " + std::to_string(all) +
                             " GPUs that are described");
}

Result<void> ReadGpus(const Nvml& nvml, const std::string& root,
                      Machine& machine) {
  char text[96] = {};
  TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.driver_version(text, sizeof(text)),
                                     "nvmlSystemGetDriverVersion"));
  machine.driver = text;
  unsigned count = 0;
  TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.count(&count), "nvmlDeviceGetCount"));
  std::vector<Handle> handles;
  std::vector<PciInfo> places;
  std::optional<Error> lost;
  for (unsigned i = 0; i < count; ++i) {
    Handle handle = nullptr;
    PciInfo place = {};
    auto gpu = ReadGpu(nvml, root, machine, i, handle, place);
    if (!gpu) {
      machine.warnings.push_back("GPU " + std::to_string(i) +
                                 " is left out: " + gpu.error().message);
      lost = gpu.error();
      continue;
    }
    machine.gpus.push_back(*std::move(gpu));
    handles.push_back(handle);
    places.push_back(place);
  }
  if (lost && machine.gpus.empty()) return *lost;
  int apart = 0;
  for (size_t g = 0; g < handles.size(); ++g) {
    CountLinks(nvml, handles[g], places, machine.gpus[g]);
    const auto domain = NvLinkDomain(nvml, handles[g]);
    machine.gpus[g].nvlink_domain = domain.value_or("");
    if (!domain && machine.gpus[g].switch_links > 0) ++apart;
  }
  if (apart > 0) {
    machine.warnings.push_back(
        "NVLink's fabric is not ready (" + std::to_string(apart) + " of " +
        std::to_string(handles.size()) +
        " GPUs are not part of it): hosts that it joins are not known");
  }
  WarnOfHidden(machine, count);
  return {};
}

}  // namespace

Result<void> AddGpus(Machine& machine, const std::string& root,
                     const std::string& library) {
  const std::unique_ptr<void, CloseLibrary> open(
      dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (open == nullptr) return {};
  Nvml nvml = {};
  if (!FindAll(open.get(), nvml)) {
    return Error{ErrorCode::kUnavailable,
                 "the driver's management library is too old", library};
  }
  TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.init(), "nvmlInit"));
  const Result<void> read = ReadGpus(nvml, root, machine);
  nvml.shutdown();
  return read;
}

}  // namespace tessera
