#include "profiler/profiler.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "profiler/case_order.h"
#include "profiler/prepared_exchange.h"
#include "profiler/rank_sums.h"
#include "profiler/stopwatch.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSaveInterval = 2;  // seconds

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Adds a row that was just measured, and what it says of others. On the host a
// message's row holds what the sender is priced with; the receiver is priced as
// a copy (costmodel/price.h). What was timed is two messages with both. On
// other devices the sender's time is all.
void AddRow(const ProfileKey& key, Measurement row, bool on_host,
            ProfileDb& profile) {
  if (key.name == NameOf(CommKind::kSendRecv)) {
    const double message = row.median_s / 2;
    const Measurement* copied =
        on_host ? profile.Find(CopyOfMessage(key)) : nullptr;
    row.median_s = std::max(
        message - (copied == nullptr ? 0 : copied->median_s), message / 4);
  }
  // The runtime redistributes by the same call as it exchanges all to all.
  if (key.name == NameOf(CommKind::kAllToAll)) {
    ProfileKey same = key;
    same.name = NameOf(CommKind::kRedistribute);
    profile.rows.insert_or_assign(std::move(same), row);
  }
  profile.rows.insert_or_assign(key, row);
}

Result<void> CheckKernels(const ProfileCases& cases, const RankDevice& device) {
  for (const auto& [key, kernel] : cases.kernels) {
    if (HasKernel(device, kernel)) continue;
    return device.FindKernel(kernel.kernel).error();
  }
  return {};
}

// What is measured, in this order: rank 0 says it, by places in all cases, from
// 1.
Result<std::vector<TimedCase>> AgreedOrder(const ProfileCases& cases,
                                           const ProfilerOptions& options,
                                           bool first_rank, RankSums& sums) {
  const std::vector<TimedCase> all = AllCases(cases);
  std::vector<double> said(all.size());
  if (first_rank) {
    const ProfileDb none;
    const std::vector<size_t> places =
        InOrder(all, options.again ? none : options.known);
    for (size_t i = 0; i < places.size(); ++i) {
      said[i] = static_cast<double>(places[i]) + 1;
    }
  }
  TESSERA_RETURN_IF_ERROR(sums.Sum(said));
  std::vector<TimedCase> order;
  for (const double place : said) {
    if (place > 0) order.push_back(all[static_cast<size_t>(place) - 1]);
  }
  return order;
}

// Whether a further case is begun, on all ranks alike.
struct Remaining {
  double seconds = 0;  // by rank 0's clock
  bool interrupted = false;
};

Result<Remaining> AgreedRemaining(double elapsed,
                                  const ProfilerOptions& options,
                                  bool first_rank, RankSums& sums) {
  std::array<double, 2> ranks = {
      first_rank ? options.time_limit_s - elapsed : 0.0,
      options.stop != nullptr && *options.stop ? 1.0 : 0.0};
  TESSERA_RETURN_IF_ERROR(sums.Sum(ranks));
  return Remaining{ranks[0], ranks[1] > 0};
}

// Nothing where it does not fit into the memory of a rank.
Result<std::optional<Measurement>> TimeCase(const TimedCase& timed,
                                            RankDevice& device,
                                            CommWorld& world, RankSums& sums,
                                            Stopwatch& stopwatch,
                                            double left_s) {
  const int all = world.world_size();
  if (timed.kernel == nullptr) {
    const int ranks = timed.key->ranks;
    const auto exchange =
        PreparedExchange::Make(*timed.key, device, world, stopwatch.rotated());
    TESSERA_TRY(const double without, sums.Sum(exchange ? 0.0 : 1.0));
    if (without > 0) return std::optional<Measurement>();
    TESSERA_RETURN_IF_ERROR((*exchange)->Open());
    TESSERA_TRY(Measurement row,
                stopwatch.Time({.run = [&] { return (*exchange)->Run(); },
                                .takes_part = (*exchange)->takes_part(),
                                .ranks = all / ranks * ranks},
                               left_s));
    return std::optional(row);
  }
  auto kernel =
      PreparedKernel::Make(*timed.kernel, device, stopwatch.rotated());
  TESSERA_TRY(const double without, sums.Sum(kernel ? 0.0 : 1.0));
  if (without > 0) return std::optional<Measurement>();
  TESSERA_TRY(Measurement row, stopwatch.Time({.run = [&]() -> Result<void> {
                                                 (*kernel)->Run();
                                                 return {};
                                               },
                                               .lone = true,
                                               .ranks = all},
                                              left_s));
  return std::optional(row);
}

}  // namespace

Result<ProfilerResult> Profile(const ProfileCases& cases, RankDevice& device,
                               CommWorld& world,
                               const ProfilerOptions& options) {
  const auto start = Clock::now();
  TESSERA_RETURN_IF_ERROR(CheckKernels(cases, device));
  std::vector<int> ranks(static_cast<size_t>(world.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  TESSERA_TRY(Communicator* const all, world.Group(ranks));
  TESSERA_TRY(const auto sums, RankSums::Make(device, *all));
  const bool first = world.world_rank() == 0;
  TESSERA_TRY(const std::vector<TimedCase> order,
              AgreedOrder(cases, options, first, *sums));
  TESSERA_TRY(const auto stopwatch,
              Stopwatch::Make(device, *all, *sums, options, order.size()));

  ProfilerResult result;
  result.profile = options.known;
  result.profile.origin.ranks_at_once = world.world_size();
  double saved = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const double elapsed = SecondsSince(start);
    TESSERA_TRY(const Remaining remaining,
                AgreedRemaining(elapsed, options, first, *sums));
    if (remaining.seconds <= 0 || remaining.interrupted) {
      result.left_out += order.size() - i;
      result.interrupted = remaining.interrupted;
      break;
    }
    // Smaller ones tell more than one for which all of the time goes.
    if (stopwatch->SecondsOf(order[i].run_s) > remaining.seconds) {
      ++result.left_out;
      continue;
    }
    if (first && options.save && elapsed - saved >= kSaveInterval) {
      TESSERA_RETURN_IF_ERROR(options.save(result.profile));
      saved = elapsed;
    }
    const ProfileKey& key = *order[i].key;
    world.SetCurrentTask("profile " + key.name);
    TESSERA_TRY(const std::optional<Measurement> row,
                TimeCase(order[i], device, world, *sums, *stopwatch,
                         remaining.seconds));
    if (row) {
      AddRow(key, *row, /*on_host=*/device.queues() == nullptr, result.profile);
    }
    ++(row ? result.measured : result.too_large);
    if (options.progress) options.progress(i + 1, order.size());
  }
  TESSERA_RETURN_IF_ERROR(world.Flush());
  if (first && options.save && result.interrupted) {
    TESSERA_RETURN_IF_ERROR(options.save(result.profile));
  }
  return result;
}

}  // namespace tessera
