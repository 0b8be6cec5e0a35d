#pragma once
// Calls of NCCL and of CUDA's runtime, as Results.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string_view>

#include "planner/base/result.h"
#include "planner/ir/dtype.h"

namespace tessera {

ncclDataType_t NcclType(DType dtype);

Result<void> CudaOk(cudaError_t code, std::string_view call);

// ncclInProgress is well: communicators do not block, and are looked at until
// they are done (IsBusy).
Result<void> NcclOk(ncclResult_t code, ncclComm_t comm, std::string_view call);

// Whether NCCL still connects the communicator or enqueues what it was given.
Result<bool> IsBusy(ncclComm_t comm, std::string_view call);

// The first failure of a row of calls; ncclInProgress is none.
template <typename Call>
ncclResult_t ForEachRank(int size, Call call) {
  for (int rank = 0; rank < size; ++rank) {
    const ncclResult_t result = call(rank, static_cast<size_t>(rank));
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

}  // namespace tessera
