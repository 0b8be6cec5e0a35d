// The part of NVIDIA's management library that the profiler calls, with two
// GPUs that do not exist. With TESSERA_FAKE_INTEGRATED they have no memory of
// their own, with TESSERA_FAKE_LOST one of them is lost, or both by "2", and
// with TESSERA_FAKE_FABRIC they are in an NVLink domain of several hosts, by
// "late" not yet.

#include <cstdlib>
#include <cstring>

namespace {

struct Memory {
  unsigned long long total, free, used;
};
struct PciInfo {
  char legacy_bus_id[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};

struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kGpuIsLost = 15;

int gpus[2] = {0, 1};

int IndexOf(const void* device) {
  return *static_cast<const int*>(device);
}

PciInfo PlaceOf(int gpu) {
  PciInfo info = {};
  info.bus = gpu == 0 ? 0x4a : 0x5b;
  std::strcpy(info.bus_id, gpu == 0 ? "00000000:4A:00.0" : "00000000:5B:00.0");
  return info;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  return kSuccess;
}
int nvmlShutdown() {
  return kSuccess;
}
const char* nvmlErrorString(int code) {
  if (code == kGpuIsLost) return "GPU is lost";
  return code == kInvalidArgument ? "Invalid Argument" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::strncpy(version, "580.65.06", length);
  return kSuccess;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= 2) return kInvalidArgument;
  const char* const lost = std::getenv("TESSERA_FAKE_LOST");
  if (lost != nullptr && index < std::strtoul(lost, nullptr, 10)) {
    return kGpuIsLost;
  }
  *device = &gpus[index];
  return kSuccess;
}
int nvmlDeviceGetName(void*, char* name, unsigned length) {
  std::strncpy(name, "NVIDIA H100 80GB HBM3", length);
  return kSuccess;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {};
  if (std::getenv("TESSERA_FAKE_INTEGRATED") != nullptr) return kNotSupported;
  memory->total = 81559ull << 20;
  return kSuccess;
}
int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
  *info = PlaceOf(IndexOf(device));
  return kSuccess;
}
// Four links: two to switches, one to the other GPU, one inactive.
int nvmlDeviceGetNvLinkState(void*, unsigned link, unsigned* active) {
  if (link >= 4) return kInvalidArgument;
  *active = link < 3;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned link, int* type) {
  *type = link < 2 ? 2 : 0;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link,
                                        PciInfo* info) {
  if (link != 2) return kInvalidArgument;
  *info = PlaceOf(1 - IndexOf(device));
  return kSuccess;
}

int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* info) {
  if (info->version != 0x02000024) return kInvalidArgument;
  info->status = kSuccess;
  info->state = 3;
  if (const char* const fabric = std::getenv("TESSERA_FAKE_FABRIC")) {
    info->cluster[0] = 0xab;
    info->clique = 7;
    if (std::strcmp(fabric, "late") == 0) info->state = 2;  // in progress
  }
  return kSuccess;
}

}  // extern "C"
