#include "runtime/comm/peer_errors.h"

#include <algorithm>
#include <charconv>

#include "runtime/comm/text.h"

namespace tessera {
namespace {

constexpr std::string_view kRank = "rank ";

// What follows the rank. RankToldOf knows all of them.
constexpr std::string_view kAborted = " aborted: ";
constexpr std::string_view kFailed = " failed: ";
constexpr std::string_view kLeft = " has left the job";
constexpr std::string_view kPid = " (pid ";
constexpr std::string_view kNotCome = " has not come: ";
constexpr std::string_view kWaited = " waited longer than ";
constexpr std::string_view kStore = "'s store at ";
constexpr std::string_view kTales[] = {kAborted, kFailed, kLeft, kPid,
                                       kNotCome, kWaited, kStore};

constexpr std::string_view kDied = ") died ";
constexpr std::string_view kDisagree = "ranks disagree: ";

template <typename... Parts>
Error Tell(int rank, const Parts&... parts) {
  return Unavailable(Text(kRank, rank, parts...));
}

// What a message tells of `rank`, if it is one of these tales.
struct Tale {
  int rank = 0;
  std::string_view text;
};

std::optional<Tale> TaleOf(std::string_view message) {
  if (!message.starts_with(kRank)) return std::nullopt;
  message.remove_prefix(kRank.size());
  Tale tale;
  const auto [end, error] = std::from_chars(
      message.data(), message.data() + message.size(), tale.rank);
  if (error != std::errc()) return std::nullopt;
  tale.text = message.substr(static_cast<size_t>(end - message.data()));
  const bool known = std::ranges::any_of(kTales, [&](std::string_view begin) {
    return tale.text.starts_with(begin);
  });
  return known ? std::optional(tale) : std::nullopt;
}

}  // namespace

Error RankAborted(int rank, std::string_view reason) {
  return Tell(rank, kAborted, reason);
}

Error RankLeft(int rank, int waiting) {
  return Tell(rank, kLeft, ", and rank ", waiting, " waits for it");
}

Error RankDied(int rank, int pid, std::string_view task) {
  return Tell(rank, kPid, pid, kDied, TaskText(task));
}

Error RankHasNotCome(int rank, std::string_view why) {
  return Tell(rank, kNotCome, why);
}

Error RankWaitedTooLong(int rank, Duration limit, std::string_view for_whom) {
  return Tell(rank, kWaited, limit.seconds(), " s for ", for_whom);
}

std::string StallText(int rank, Duration waited, Duration limit,
                      std::string_view for_whom) {
  return Text(kRank, rank, " has waited ", waited.seconds(), " s for ",
              for_whom, "; it gives up after ", limit.seconds(), " s");
}

Error StoreOfRankZero(std::string_view address, std::string_view trouble) {
  return Tell(0, kStore, address, ": ", trouble);
}

Error RankFailed(int rank, const Error& error) {
  if (RankToldOf(error) || error.message.starts_with(kDisagree) ||
      error.code == ErrorCode::kInterrupted) {
    return error;
  }
  return Tell(rank, kFailed, error.ToString());
}

std::optional<int> RankToldOf(const Error& error) {
  const std::optional<Tale> tale = TaleOf(error.message);
  return tale ? std::optional(tale->rank) : std::nullopt;
}

std::string TaskOfDead(const Error& error) {
  const std::optional<Tale> tale = TaleOf(error.message);
  if (!tale || !tale->text.starts_with(kPid)) return "";
  const size_t died = tale->text.find(kDied);
  if (died == std::string_view::npos) return "";
  return std::string(tale->text.substr(died + kDied.size()));
}

std::string TaskText(std::string_view task) {
  return task.empty() ? "before its first task" : Text("in task '", task, "'");
}

// The code, one digit, and the message.
std::string PackError(const Error& error) {
  return Text(static_cast<int>(error.code), error.message);
}

std::optional<Error> UnpackError(std::string_view bytes) {
  if (bytes.empty()) return std::nullopt;
  const int code = bytes[0] - '0';
  if (code < 0 || code > static_cast<int>(ErrorCode::kInterrupted)) {
    return std::nullopt;
  }
  return Error{static_cast<ErrorCode>(code), std::string(bytes.substr(1)), ""};
}

Error Disagreement(std::string_view how) {
  return InvalidInput(Text(kDisagree, how));
}

Error CallsDiffer(int rank, const CollectiveCall& call, int other,
                  const CollectiveCall& other_call,
                  std::span<const int> group) {
  const auto describe = [](const CollectiveCall& one) {
    return Text(one.operation, " of ", one.bytes, " bytes");
  };
  return Disagreement(Text(
      "rank ", rank, " calls ", describe(call), " in group ", GroupText(group),
      ", rank ", other, " ", describe(other_call),
      call == other_call ? " with other counts, element type or root" : ""));
}

Error PartsDiffer(int from, int64_t sent, int to, int64_t expected) {
  return Disagreement(Text("rank ", from, " sends ", sent, " bytes to rank ",
                           to, ", which expects ", expected));
}

Error MessageSizesDiffer(int from, int64_t sent, uint64_t tag,
                         int64_t expected) {
  return InvalidInput(Text("rank ", from, " sent ", sent, " bytes with tag ",
                           tag, ", but ", expected, " are expected"));
}

}  // namespace tessera
