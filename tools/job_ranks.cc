#include "tools/job_ranks.h"

#include <algorithm>
#include <iostream>
#include <optional>
#include <string>

#include "planner/base/threads.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/launch.h"
#include "tools/gpu_share.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// Whoever gives --nproc where another launcher has set its variables may have
// meant as many ranks on this host, which it does not start there.
Result<void> CheckNproc(const Options& options,
                        const RankEnvironment& environment) {
  if (options.nproc == 0 || environment.launcher == "tessera") return {};
  const std::string said = VariablesOf(environment) +
                           " say that this is rank " +
                           std::to_string(environment.rank) + " of " +
                           std::to_string(environment.size);
  const std::string advice =
      "; unset them to start " + std::to_string(options.nproc) + " ranks here";
  if (options.nproc != environment.size) {
    return InvalidInput(
        "is " + std::to_string(options.nproc) + ", but " + said + advice,
        "--nproc");
  }
  if (environment.local_rank == 0 && environment.size > 1) {
    std::cerr << "tessera: warning: --nproc is taken as the number of all "
                 "ranks, as "
              << said << advice << std::endl;
  }
  return {};
}

}  // namespace

int CoresOf(int ranks) {
  // Variables that say nonsense are told of when they are read for good.
  const auto environment = DetectRankEnvironment();
  // Ranks that are threads of one process have its cores.
  const bool bound = environment && *environment && (*environment)->size > 1 &&
                     (*environment)->may_be_bound;
  return CoresTogether(ReadHostCpus(), ranks, bound);
}

int ThreadsOf(const Options& options, int ranks) {
  if (options.threads > 0) return options.threads;
  ranks = std::max(1, ranks);
  return std::max(1, CoresOf(ranks) / ranks);
}

RankEnvironment LastRank(int ranks) {
  return {.launcher = "tessera",
          .rank = ranks - 1,
          .size = ranks,
          .local_rank = ranks - 1,
          .local_size = ranks,
          .master_host = {},
          .job_id = {}};
}

void EndBehindRankZero(RankSeat& seat, const Result<int>& code) {
  constexpr char kKey[] = "rank 0 has told";
  // The end of its connection is as good an answer as this.
  const auto longest = Duration::FromSeconds(600);
  seat.store->set_stop(nullptr);
  if (seat.world->world_rank() == 0) {
    (void)seat.store->Set(kKey, "");
  } else if (code && *code != 0) {
    (void)seat.store->Get(kKey, longest, "rank 0's last word");
  }
}

Result<int> RunAsRankOrJob(const Options& options,
                           Result<int> (*as_rank)(const Options&,
                                                  const RankEnvironment&),
                           Result<int> (*as_job)(const Options&)) {
  TESSERA_TRY(const std::optional<RankEnvironment> environment,
              DetectRankEnvironment());
  TESSERA_TRY(const Backend* const backend, BackendOf(options));
  if (backend->threads && environment && environment->size > 1) {
    return InvalidInput("its ranks are threads of one process, but " +
                            environment->launcher + " started " +
                            std::to_string(environment->size),
                        "--backend " + options.backend);
  }
  if (!environment || backend->threads) return as_job(options);
  const Result<void> fits = CheckNproc(options, *environment);
  const Result<int> code =
      fits ? as_rank(options, *environment) : Result<int>(fits.error());
  if (code) return code;
  ReportRankError(code.error());
  return ExitCodeOf(code.error().code);
}

}  // namespace tessera
