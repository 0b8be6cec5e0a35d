#include "tools/gpu_share.h"

#include <string>

#include "planner/base/table.h"

namespace tessera {

Result<const Backend*> BackendOf(const Options& options) {
  auto backend = Find("backend", Backends(), options.backend);
  if (!backend) return backend.error().At("--backend");
  return backend;
}

Result<std::optional<GpuShare>> GpuShareOf(const Backend& backend,
                                           const RankEnvironment& environment) {
  if (!backend.gpu) return std::optional<GpuShare>();
  const auto gpus = VisibleGpus();
  if (!gpus) return gpus.error().At("--backend " + std::string(backend.name));
  if (backend.threads) {
    return std::optional(GpuShare{gpus->front(), environment.local_size});
  }
  const HostRanks ranks =
      HostRanksOf(environment, static_cast<int>(gpus->size()));
  const auto gpu = GpuOfRank(ranks);
  if (!gpu) return gpu.error().At("--nproc");
  return std::optional(
      GpuShare{(*gpus)[static_cast<size_t>(*gpu)], RanksPerGpu(ranks)});
}

}  // namespace tessera
