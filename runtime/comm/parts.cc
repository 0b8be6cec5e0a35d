#include "runtime/comm/parts.h"

#include "runtime/comm/text.h"

namespace tessera {

Result<void> CheckLengths(std::span<const int64_t> lengths, int size) {
  if (static_cast<int>(lengths.size()) != size) {
    return InvalidInput(
        Text("got ", lengths.size(), " sizes for a group of ", size));
  }
  for (int64_t length : lengths) {
    if (length < 0) return InvalidInput(Text("negative size ", length));
  }
  return {};
}

Result<void> CheckExchange(std::span<const int64_t> send_bytes,
                           std::span<const int64_t> recv_bytes, int rank,
                           int size) {
  TESSERA_RETURN_IF_ERROR(CheckLengths(send_bytes, size));
  TESSERA_RETURN_IF_ERROR(CheckLengths(recv_bytes, size));
  const auto me = static_cast<size_t>(rank);
  if (send_bytes[me] == recv_bytes[me]) return {};
  return InvalidInput(Text("sends ", send_bytes[me],
                           " bytes to itself, but expects ", recv_bytes[me]));
}

std::vector<int64_t> Offsets(std::span<const int64_t> lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

}  // namespace tessera
