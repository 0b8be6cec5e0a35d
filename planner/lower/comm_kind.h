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
};
std::string_view NameOf(CommKind kind);

}  // namespace tessera
