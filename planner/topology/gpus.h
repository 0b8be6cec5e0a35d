#pragma once
// GPUs by the name that NVIDIA's driver gives them.

#include <span>
#include <string_view>

namespace tessera {

struct KnownGpu {
  std::string_view name;
  std::string_view device;  // of DeviceTypes
  // A link of LinkTypes and how many NVLinks it stands for; none where empty.
  // The generation is the GPU's: what the driver says of a link's version is
  // not dependable.
  std::string_view nvlink;
  int nvlinks = 0;
  std::string_view topology;  // the system it is usually in, of Topologies
};

std::span<const KnownGpu> KnownGpus();

// Null for a GPU that the table does not have.
const KnownGpu* FindGpu(std::string_view name);

}  // namespace tessera
