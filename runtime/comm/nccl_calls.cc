#include "runtime/comm/nccl_calls.h"

#include <string>
#include <utility>

#include "planner/base/check.h"
#include "runtime/comm/text.h"

namespace tessera {

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kInt32:
      return ncclInt32;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
  }
  TESSERA_CHECK(false) << static_cast<int>(dtype);
  return ncclUint8;
}

Result<void> CudaOk(cudaError_t code, std::string_view call) {
  if (code == cudaSuccess) return {};
  return Unavailable(Text(call, ": ", cudaGetErrorName(code), " (",
                          cudaGetErrorString(code), ")"));
}

Result<void> NcclOk(ncclResult_t code, ncclComm_t comm, std::string_view call) {
  if (code == ncclSuccess || code == ncclInProgress) return {};
  std::string text = Text(call, ": NCCL: ", ncclGetErrorString(code));
  const char* const last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += Text(" (", last, ")");
  return Unavailable(std::move(text));
}

Result<bool> IsBusy(ncclComm_t comm, std::string_view call) {
  ncclResult_t state = ncclSuccess;
  TESSERA_RETURN_IF_ERROR(
      NcclOk(ncclCommGetAsyncError(comm, &state), comm, call));
  TESSERA_RETURN_IF_ERROR(NcclOk(state, comm, call));
  return state == ncclInProgress;
}

}  // namespace tessera
