// GPUs by NVIDIA's management library, which comes with the driver. It is
// opened when it is asked for, so that nothing of NVIDIA's is needed to build
// or run elsewhere. What is declared here is its binary interface (NVML API
// Reference Guide).

#include <dlfcn.h>

#include <algorithm>
#include <memory>

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

constexpr int kSuccess = 0;         // NVML_SUCCESS
constexpr int kNotSupported = 3;    // NVML_ERROR_NOT_SUPPORTED
constexpr unsigned kMaxLinks = 64;  // beyond any NVML_NVLINK_MAX_LINKS
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

// The last two are absent from old drivers' libraries; NVLinks then stay
// unknown.
bool FindAll(void* library, Nvml& nvml) {
  Find(library, "nvmlDeviceGetNvLinkRemoteDeviceType", nvml.remote_type);
  Find(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2", nvml.remote_pci);
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

Result<void> ReadGpus(const Nvml& nvml, const std::string& root,
                      Machine& machine) {
  char text[96] = {};
  TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.driver_version(text, sizeof(text)),
                                     "nvmlSystemGetDriverVersion"));
  machine.driver = text;
  unsigned count = 0;
  TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.count(&count), "nvmlDeviceGetCount"));
  std::vector<Handle> handles(count);
  std::vector<PciInfo> places(count);
  for (unsigned i = 0; i < count; ++i) {
    FoundGpu gpu;
    Memory memory = {};
    TESSERA_RETURN_IF_ERROR(
        nvml.Check(nvml.handle(i, &handles[i]), "nvmlDeviceGetHandleByIndex"));
    TESSERA_RETURN_IF_ERROR(nvml.Check(
        nvml.name(handles[i], text, sizeof(text)), "nvmlDeviceGetName"));
    const int sized = nvml.memory(handles[i], &memory);
    if (sized != kNotSupported) {
      TESSERA_RETURN_IF_ERROR(nvml.Check(sized, "nvmlDeviceGetMemoryInfo"));
    }
    TESSERA_RETURN_IF_ERROR(nvml.Check(nvml.pci_info(handles[i], &places[i]),
                                       "nvmlDeviceGetPciInfo"));
    gpu.name = text;
    // One that is part of the processor has no memory but the host's.
    gpu.memory = sized == kNotSupported
                     ? machine.memory
                     : Bytes{static_cast<int64_t>(memory.total)};
    gpu.place = FindPciPlace(root, places[i].bus_id);
    machine.gpus.push_back(std::move(gpu));
  }
  for (unsigned i = 0; i < count; ++i) {
    CountLinks(nvml, handles[i], places, machine.gpus[i]);
  }
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
