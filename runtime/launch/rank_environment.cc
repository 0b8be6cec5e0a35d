#include "runtime/launch/rank_environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "planner/base/fnv1a.h"
#include "planner/base/whole_number.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/socket.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

std::string Get(const GetEnv& get_env, const char* name) {
  const char* value = get_env(name);
  return value == nullptr ? "" : value;
}

// The number in the variable, or `fallback` where that is not set. Without
// fallback the variable must be set.
Result<int> Number(const GetEnv& get_env, const char* name,
                   std::optional<int> fallback = std::nullopt) {
  const std::string text = Get(get_env, name);
  if (text.empty() && fallback) return *fallback;
  const std::optional<int> value = ParseWhole<int>(text);
  if (!value || *value < 0) {
    return InvalidInput(Text("expected a number, got '", text, "'"),
                        Text("environment variable ", name));
  }
  return *value;
}

// The number of the node in "4(x2),3", which is how Slurm counts tasks per
// node.
std::optional<int> TasksOnNode(std::string_view counts, int node) {
  while (true) {
    const size_t comma = counts.find(',');
    std::string_view entry = counts.substr(0, comma);
    int nodes = 1;
    if (const size_t times = entry.find("(x");
        times != std::string_view::npos && entry.ends_with(')')) {
      nodes = ParseWhole<int>(entry.substr(times + 2, entry.size() - times - 3))
                  .value_or(0);
      entry = entry.substr(0, times);
    }
    const std::optional<int> tasks = ParseWhole<int>(entry);
    if (!tasks || nodes < 1) return std::nullopt;
    if (node < nodes) return tasks;
    node -= nodes;
    if (comma == std::string_view::npos) return std::nullopt;
    counts.remove_prefix(comma + 1);
  }
}

// A port between 20000 and 29999, which is below the range that Linux gives to
// outgoing connections (32768 and up); the same for all who know `id`.
int PortOf(std::string_view id) {
  return 20000 + static_cast<int>(Fnv1a().Add(id).value() % 10000);
}

// The variables of a launcher, which is known by `rank` and `mark`.
struct Launcher {
  const char* name;
  const char* mark;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job_id;
};

// In order of precedence. A lone RANK is somebody else's variable. srun has
// PMI's variables too (--mpi=pmi2), but not those of Hydra, which may have
// srun start a process on each host that starts its ranks there. Sources:
// PyTorch's torchrun documentation, Open MPI's mpirun(1), MPICH's Hydra,
// Slurm's srun(1) and mpi/pmi2, Cray's PALS (PMI_LOCAL_SIZE).
constexpr Launcher kLaunchers[] = {
    {"torchrun", "WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK",
     "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"pmi", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS", "PMI_JOBID"},
    {"srun", "SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
     "", "SLURM_JOB_ID"},
    {"pmi", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK",
     "PMI_LOCAL_SIZE", "PMI_JOBID"},
};

// What a variable says of this host's ranks, and which one it is; empty where
// none does.
struct LocalSize {
  std::string variable;
  int ranks = 0;
};

// Whose variables tell of this host: those of `launcher`, or, where a script
// has set RANK and WORLD_SIZE alone, of who started that, if it counts the same
// ranks.
const Launcher& WhoTellsOfHost(const Launcher& launcher, int rank, int size,
                               const GetEnv& get_env) {
  const auto tells = [&](const Launcher& one) {
    return *one.local_size == '\0' || !Get(get_env, one.local_size).empty();
  };
  if (tells(launcher)) return launcher;
  for (const Launcher& other : kLaunchers) {
    if (tells(other) && ParseWhole<int>(Get(get_env, other.rank)) == rank &&
        ParseWhole<int>(Get(get_env, other.size)) == size) {
      return other;
    }
  }
  return launcher;
}

// `ranks`: of the job, which are all here where no variable tells.
Result<LocalSize> LocalSizeOf(const Launcher& launcher, int ranks,
                              const GetEnv& get_env) {
  if (*launcher.local_size != '\0') {
    if (Get(get_env, launcher.local_size).empty()) return LocalSize{"", ranks};
    LocalSize local{launcher.local_size};
    TESSERA_TRY(local.ranks, Number(get_env, launcher.local_size));
    return local;
  }
  for (const char* name :
       {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const std::string counts = Get(get_env, name);
    if (counts.empty()) continue;
    TESSERA_TRY(const int node, Number(get_env, "SLURM_NODEID", 0));
    if (const auto tasks = TasksOnNode(counts, node)) {
      return LocalSize{name, *tasks};
    }
    return InvalidInput(Text("expected the tasks on each node, as in '4(x2),3'"
                             ", with node ",
                             node, ", got '", counts, "'"),
                        Text("environment variable ", name));
  }
  return LocalSize{"", ranks};
}

// Where rank 0's store listens, of a rank of which all else is known.
Result<void> FindMaster(const GetEnv& get_env, RankEnvironment& found) {
  found.master_host = Get(get_env, "MASTER_ADDR");
  if (found.master_host.empty() && found.launcher == "srun") {
    std::string nodes = Get(get_env, "SLURM_STEP_NODELIST");
    if (nodes.empty()) nodes = Get(get_env, "SLURM_NODELIST");
    if (nodes.empty()) nodes = Get(get_env, "SLURM_JOB_NODELIST");
    if (!nodes.empty()) {
      auto hosts = ExpandNodeList(nodes);
      if (!hosts) return hosts.error().At("environment: SLURM_NODELIST");
      found.master_host = hosts->front();
      if (hosts->size() == 1) found.master_host = "127.0.0.1";
    }
  }
  if (found.launcher == "torchrun" && found.size > 1) {
    std::string missing;
    for (const char* const name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (!Get(get_env, name).empty()) continue;
      missing += Text(missing.empty() ? "" : " and ", name);
    }
    if (!missing.empty()) {
      return InvalidInput(Text("RANK and WORLD_SIZE are set (rank ", found.rank,
                               " of ", found.size, "), but not ", missing),
                          "environment");
    }
  }
  if (found.master_host.empty()) {
    if (found.local_size < found.size) {
      return InvalidInput(
          Text("the ", found.size, " ranks are on several hosts (",
               found.local_size,
               " on this one), and MASTER_ADDR, the host of "
               "rank 0, is not set"),
          "environment");
    }
    found.master_host = "127.0.0.1";
  }
  TESSERA_TRY(found.master_port,
              Number(get_env, "MASTER_PORT",
                     PortOf(Text(found.launcher, found.job_id))));
  // There torchrun itself listens on MASTER_PORT.
  if (Get(get_env, "TORCHELASTIC_USE_AGENT_STORE") == "True") {
    ++found.master_port;
  }
  if (found.master_port < 1 || found.master_port > 65535) {
    return InvalidInput(Text("no port: ", found.master_port),
                        "environment variable MASTER_PORT");
  }
  return {};
}

Result<RankEnvironment> Detect(const Launcher& launcher,
                               const GetEnv& get_env) {
  RankEnvironment found;
  found.launcher = launcher.name;
  TESSERA_TRY(found.rank, Number(get_env, launcher.rank));
  TESSERA_TRY(found.size, Number(get_env, launcher.size));
  if (found.size < 1) {
    return InvalidInput("expected at least 1 rank, got 0",
                        Text("environment variable ", launcher.size));
  }
  if (found.rank >= found.size) {
    return InvalidInput(Text("expected a rank below the ", found.size, " of ",
                             launcher.size, ", got ", found.rank),
                        Text("environment variable ", launcher.rank));
  }
  const Launcher& host =
      WhoTellsOfHost(launcher, found.rank, found.size, get_env);
  TESSERA_TRY(const LocalSize local, LocalSizeOf(host, found.size, get_env));
  found.local_size = local.ranks;
  if (local.ranks < 1 || local.ranks > found.size) {
    return InvalidInput(
        Text("expected 1 to ", found.size, " ranks (", launcher.size,
             ") on this host, got ", local.ranks),
        Text("environment variable ", local.variable));
  }
  found.may_be_bound = &host != &kLaunchers[0];  // torchrun and our own
  const char* const local_rank = Get(get_env, launcher.local_rank).empty()
                                     ? host.local_rank
                                     : launcher.local_rank;
  TESSERA_TRY(found.local_rank,
              Number(get_env, local_rank, found.rank % local.ranks));
  if (found.local_rank >= local.ranks) {
    return InvalidInput(Text("expected a rank below the ", local.ranks,
                             " of this host, got ", found.local_rank),
                        Text("environment variable ", local_rank));
  }

  found.job_id = Get(get_env, kJobIdVariable);
  if (found.job_id.empty()) found.job_id = Get(get_env, launcher.job_id);
  if (found.launcher == "srun")
    found.job_id += "." + Get(get_env, "SLURM_STEP_ID");
  // Of an identifier as long as Open MPI's the store takes 256 bytes.
  if (found.job_id.size() > 200) found.job_id.resize(200);

  TESSERA_RETURN_IF_ERROR(FindMaster(get_env, found));
  // By another name than a loopback address each host of ranks may know it.
  if (local.variable.empty() && *launcher.local_size != '\0' &&
      found.size > 1 && !IsLoopbackName(found.master_host)) {
    return InvalidInput(
        Text("is not set, and rank 0 may be on another host (MASTER_ADDR '",
             found.master_host, "'): expected how many of the ", found.size,
             " ranks are on this one"),
        Text("environment variable ", launcher.local_size));
  }
  TESSERA_TRY(const int start_s,
              Number(get_env, kStartTimeVariable,
                     static_cast<int>(found.start_time.seconds())));
  if (start_s < 1) {
    return InvalidInput("expected seconds, at least 1, got 0",
                        Text("environment variable ", kStartTimeVariable));
  }
  found.start_time = Duration::FromSeconds(start_s);
  if (!Get(get_env, kStoreFdVariable).empty()) {
    found.launcher = "tessera";
    if (found.rank == 0) {
      TESSERA_TRY(found.listen_fd, Number(get_env, kStoreFdVariable));
    }
  }
  return found;
}

// Whether a process with SLURM_PROCID is one of srun's tasks. The script of
// sbatch and the shell that salloc may start on a node have the variable too,
// and SLURM_NTASKS, but are alone: the script outside any step, the shell in
// the interactive step (slurm.h: SLURM_INTERACTIVE_STEP, the lowest of the
// special step numbers). Where PMI counts other ranks than Slurm, a task has
// started them, and they inherit its variables.
bool IsSlurmTask(const GetEnv& get_env) {
  const std::string pmi_size = Get(get_env, "PMI_SIZE");
  if (!pmi_size.empty() && pmi_size != Get(get_env, "SLURM_NTASKS")) {
    return false;
  }
  constexpr uint64_t kInteractiveStep = 0xfffffffa;
  const std::string step = Get(get_env, "SLURM_STEP_ID");
  if (step.empty()) return Get(get_env, "ENVIRONMENT") != "BATCH";
  uint64_t number = 0;
  std::from_chars(step.data(), step.data() + step.size(), number);
  return number < kInteractiveStep;
}

// That no variable of torchrun's says, where RANK or WORLD_SIZE is missing,
// that there are other ranks: each would train alone. Either on its own is
// somebody else's, and with MASTER_ADDR that of the srun to come in a script of
// sbatch.
Result<void> CheckNotOneOfSeveral(const GetEnv& get_env) {
  const std::string rank = Get(get_env, "RANK");
  const std::string size = Get(get_env, "WORLD_SIZE");
  const bool lacks_rank =
      rank.empty() && ParseWhole<int>(size).value_or(0) >= 2;
  const bool lacks_size =
      size.empty() && ParseWhole<int>(rank).value_or(-1) >= 0;
  if (!lacks_rank && !lacks_size) return {};
  for (const char* name : {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    if (get_env(name) == nullptr) continue;
    if (std::string_view(name) != "LOCAL_RANK" &&
        get_env("SLURM_JOB_ID") != nullptr) {
      continue;
    }
    if (lacks_size) {
      return InvalidInput(Text("is not set, but RANK (", rank, ") and ", name,
                               " are: expected how many ranks there are"),
                          "environment variable WORLD_SIZE");
    }
    return InvalidInput(
        Text("is not set, but WORLD_SIZE (", size, ") and ", name,
             " are: expected which of the ", size, " ranks this is"),
        "environment variable RANK");
  }
  return {};
}

}  // namespace

Result<std::optional<RankEnvironment>> DetectRankEnvironment(
    const GetEnv& get_env) {
  for (const Launcher& launcher : kLaunchers) {
    if (get_env(launcher.rank) == nullptr) continue;
    if (get_env(launcher.mark) == nullptr) continue;
    if (launcher.name == std::string_view("srun") && !IsSlurmTask(get_env)) {
      continue;
    }
    TESSERA_TRY(RankEnvironment found, Detect(launcher, get_env));
    return std::optional<RankEnvironment>(std::move(found));
  }
  TESSERA_RETURN_IF_ERROR(CheckNotOneOfSeveral(get_env));
  return std::optional<RankEnvironment>();
}

Result<std::optional<RankEnvironment>> DetectRankEnvironment() {
  return DetectRankEnvironment(
      [](const char* name) { return std::getenv(name); });
}

std::string VariablesOf(const RankEnvironment& environment) {
  const auto* const found =
      std::ranges::find(kLaunchers, environment.launcher, &Launcher::name);
  // Our own has torchrun's.
  const Launcher& launcher =
      found == std::end(kLaunchers) ? kLaunchers[0] : *found;
  return Text(launcher.rank, " and ", launcher.size);
}

StoreOptions StoreOptionsOf(const RankEnvironment& environment) {
  StoreOptions options;
  options.host = environment.master_host;
  options.port = environment.master_port;
  options.job_id = environment.job_id;
  options.rank = environment.rank;
  options.size = environment.size;
  options.listen_fd = environment.listen_fd;
  options.timeout = environment.start_time;
  options.several_hosts = environment.local_size < environment.size;
  return options;
}

// ---- Slurm's lists of hosts -------------------------------------------------

namespace {

// More hosts than any cluster has: a list that names more is a mistake.
constexpr size_t kMaxHosts = 1 << 20;

// "1-3,07": appends each number, as wide as its first one is written, to each
// of `names`.
Result<std::vector<std::string>> AppendRanges(
    const std::vector<std::string>& names, std::string_view ranges) {
  std::vector<std::string> suffixes;
  while (true) {
    const size_t comma = ranges.find(',');
    const std::string_view range = ranges.substr(0, comma);
    const size_t dash = range.find('-');
    const std::string_view low = range.substr(0, dash);
    const std::string_view high =
        dash == std::string_view::npos ? low : range.substr(dash + 1);
    const std::optional<int> first = ParseWhole<int>(low),
                             last = ParseWhole<int>(high);
    if (!first || !last || *first < 0 || *last < *first ||
        static_cast<size_t>(*last - *first) > kMaxHosts) {
      return InvalidInput(Text("bad range '", range, "'"));
    }
    for (int i = *first; i <= *last; ++i) {
      const std::string digits = std::to_string(i);
      const size_t zeros = low.size() - std::min(low.size(), digits.size());
      suffixes.push_back(std::string(zeros, '0') + digits);
    }
    if (comma == std::string_view::npos) break;
    ranges.remove_prefix(comma + 1);
  }
  if (names.size() * suffixes.size() > kMaxHosts) {
    return InvalidInput("too many hosts");
  }
  std::vector<std::string> result;
  for (const std::string& name : names) {
    for (const std::string& suffix : suffixes) result.push_back(name + suffix);
  }
  return result;
}

}  // namespace

Result<std::vector<std::string>> ExpandNodeList(std::string_view list) {
  std::vector<std::string> hosts;
  std::vector<std::string> names = {""};  // of the element being read
  const auto finish = [&]() -> Result<void> {
    for (const std::string& name : names) {
      if (name.empty()) return InvalidInput(Text("empty name in '", list, "'"));
      hosts.push_back(name);
    }
    names = {""};
    return {};
  };
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] == ',') {
      TESSERA_RETURN_IF_ERROR(finish());
    } else if (list[i] == '[') {
      const size_t end = list.find(']', i);
      if (end == std::string_view::npos) {
        return InvalidInput(Text("'[' without ']' in '", list, "'"));
      }
      auto longer = AppendRanges(names, list.substr(i + 1, end - i - 1));
      if (!longer)
        return InvalidInput(Text(longer.error().message, " in '", list, "'"));
      names = *std::move(longer);
      i = end;
    } else {
      for (std::string& name : names) name += list[i];
    }
  }
  TESSERA_RETURN_IF_ERROR(finish());
  return hosts;
}

}  // namespace tessera
