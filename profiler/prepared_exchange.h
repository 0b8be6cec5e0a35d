#pragma once
// What the profiler can time of the exchanges of ranks: collectives, and
// messages there and back.

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/base/units.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

// Besides messages. The exchanges with a root are priced analytically.
inline constexpr std::array kTimedCollectives = {
    CommKind::kAllReduce, CommKind::kAllGather, CommKind::kReduceScatter,
    CommKind::kAllToAll, CommKind::kShift};

// Whether each rank has a share of the payload, which has to be an element at
// least: one of no bytes is no exchange.
bool SharesPayload(CommKind kind);

// One exchange of a profile row, among this rank's subgroup of neighbours; its
// runs take turns over sets of buffers, as those of a kernel.
class PreparedExchange {
 public:
  // Both outlive it. All ranks of `world` call it, those that are left over,
  // too. An error of one alone is that it has no memory.
  static Result<std::unique_ptr<PreparedExchange>> Make(const ProfileKey& key,
                                                        RankDevice& device,
                                                        CommWorld& world,
                                                        Bytes rotated);
  ~PreparedExchange();
  PreparedExchange(const PreparedExchange&) = delete;
  PreparedExchange& operator=(const PreparedExchange&) = delete;

  // False of a rank that is left over.
  bool takes_part() const { return group_ != nullptr; }

  // Before the first Run, by all that take part.
  Result<void> Open();
  Result<void> Run();

 private:
  explicit PreparedExchange(RankDevice& device) : device_(device) {}

  static CommKind KindOf(std::string_view name);

  static constexpr ChannelEnd kThere = {.channel = 0, .from = 0, .to = 1};
  static constexpr ChannelEnd kBack = {.channel = 0, .from = 1, .to = 0};

  RankDevice& device_;
  CommKind kind_ = CommKind::kAllReduce;
  Communicator* group_ = nullptr;
  int64_t count_ = 0;
  std::vector<int64_t> counts_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> shift_send_;
  std::vector<int64_t> shift_receive_;
  void* memory_ = nullptr;    // of all sets: what is sent and what is received
  int64_t buffer_bytes_ = 0;  // of each of these
  int64_t sets_ = 0;
  int64_t next_ = 0;
};

}  // namespace tessera
