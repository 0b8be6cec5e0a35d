#include "planner/lower/comm_kind.h"

namespace tessera {

std::string_view NameOf(CommKind kind) {
  switch (kind) {
    case CommKind::kAllReduce:
      return "all-reduce";
    case CommKind::kAllGather:
      return "all-gather";
    case CommKind::kReduceScatter:
      return "reduce-scatter";
    case CommKind::kAllToAll:
      return "all-to-all";
    case CommKind::kRedistribute:
      return "redistribute";
    case CommKind::kSendRecv:
      return "send-recv";
    case CommKind::kShift:
      return "shift";
    case CommKind::kScatter:
      return "scatter";
    case CommKind::kBroadcast:
      return "broadcast";
    case CommKind::kGather:
      return "gather";
    case CommKind::kReduce:
      return "reduce";
  }
  return "";
}

}  // namespace tessera
