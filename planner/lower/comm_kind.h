#pragma once
// Kinds of communication between ranks.

#include <cstdint>
#include <string_view>

namespace tessera {

enum class CommKind : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kRedistribute,  // by index ranges
  kSendRecv,
  kShift,  // each rank's buffers to the rank before it, around a ring
  // One rank, the root, on one side: it is the first of its subgroup.
  kScatter,
  kBroadcast,
  kGather,
  kReduce,
};
inline constexpr int kCommKinds = 11;
std::string_view NameOf(CommKind kind);

}  // namespace tessera
