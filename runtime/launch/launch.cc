#include "runtime/launch/launch.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <random>

#include "planner/base/check.h"
#include "planner/base/fnv1a.h"
#include "planner/base/whole_number.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

extern char** environ;

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGraceAfterFailure = std::chrono::seconds(5);
constexpr const char* kErrorFd = "TESSERA_ERROR_FD";
constexpr const char* kStoreFd = "TESSERA_STORE_FD";
constexpr const char* kJobId = "TESSERA_JOB_ID";

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

// What a variable says of this host's ranks, and which one it is.
struct LocalSize {
  std::string variable;
  int ranks = 0;
};

// `ranks`: of the job, which are all here where no variable tells.
Result<LocalSize> LocalSizeOf(const Launcher& launcher, int ranks,
                              const GetEnv& get_env) {
  if (*launcher.local_size != '\0') {
    LocalSize local{launcher.local_size};
    TESSERA_TRY(local.ranks, Number(get_env, launcher.local_size, ranks));
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

Result<RankEnvironment> Detect(const Launcher& launcher,
                               const GetEnv& get_env) {
  RankEnvironment found;
  found.launcher = launcher.name;
  TESSERA_TRY(found.rank, Number(get_env, launcher.rank));
  TESSERA_TRY(found.size, Number(get_env, launcher.size));
  if (found.size < 1 || found.rank >= found.size) {
    return InvalidInput(Text("rank ", found.rank, " of ", found.size, " (",
                             launcher.rank, " and ", launcher.size, ")"),
                        "environment");
  }
  TESSERA_TRY(const LocalSize local,
              LocalSizeOf(launcher, found.size, get_env));
  found.local_size = local.ranks;
  if (local.ranks < 1 || local.ranks > found.size) {
    return InvalidInput(
        Text("expected 1 to ", found.size, " ranks (", launcher.size,
             ") on this host, got ", local.ranks),
        Text("environment variable ", local.variable));
  }
  TESSERA_TRY(found.local_rank,
              Number(get_env, launcher.local_rank, found.rank % local.ranks));
  if (found.local_rank >= local.ranks) {
    return InvalidInput(Text("expected a rank below the ", local.ranks,
                             " of this host, got ", found.local_rank),
                        Text("environment variable ", launcher.local_rank));
  }

  const bool slurm = found.launcher == "srun";
  found.job_id = Get(get_env, kJobId);
  if (found.job_id.empty()) found.job_id = Get(get_env, launcher.job_id);
  if (slurm) found.job_id += "." + Get(get_env, "SLURM_STEP_ID");
  // Of an identifier as long as Open MPI's the store takes 256 bytes.
  if (found.job_id.size() > 200) found.job_id.resize(200);

  found.master_host = Get(get_env, "MASTER_ADDR");
  if (found.master_host.empty() && slurm) {
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
  const bool has_address =
      !found.master_host.empty() && !Get(get_env, "MASTER_PORT").empty();
  if (found.launcher == "torchrun" && found.size > 1 && !has_address) {
    return InvalidInput(
        Text("RANK and WORLD_SIZE are set (rank ", found.rank, " of ",
             found.size, "), but not MASTER_ADDR and MASTER_PORT"),
        "environment");
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
                     PortOf(Text(launcher.name, found.job_id))));
  // There torchrun itself listens on MASTER_PORT.
  if (Get(get_env, "TORCHELASTIC_USE_AGENT_STORE") == "True") {
    ++found.master_port;
  }
  if (found.master_port < 1 || found.master_port > 65535) {
    return InvalidInput(Text("no port: ", found.master_port),
                        "environment variable MASTER_PORT");
  }
  if (!Get(get_env, kStoreFd).empty()) {
    found.launcher = "tessera";
    if (found.rank == 0) {
      TESSERA_TRY(found.listen_fd, Number(get_env, kStoreFd));
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
  return std::optional<RankEnvironment>();
}

Result<std::optional<RankEnvironment>> DetectRankEnvironment() {
  return DetectRankEnvironment(
      [](const char* name) { return std::getenv(name); });
}

StoreOptions StoreOptionsOf(const RankEnvironment& environment) {
  StoreOptions options;
  options.host = environment.master_host;
  options.port = environment.master_port;
  options.job_id = environment.job_id;
  options.rank = environment.rank;
  options.size = environment.size;
  options.listen_fd = environment.listen_fd;
  return options;
}

// ---- Slurm's lists of hosts
// ---------------------------------------------------

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

// ---- The launcher
// -------------------------------------------------------------

namespace {

// What ranks write to the launcher: one record per write, so that records stay
// whole.
struct Report {
  int32_t rank;
  int32_t about;           // whose failure it tells: its own or another rank's
  char task_of_dead[128];  // of a rank that died, as TaskText says it
  char text[2000];
};
static_assert(sizeof(Report) <= 4096, "PIPE_BUF on Linux");

struct RankProcess {
  pid_t pid = -1;
  bool running = false;
  int status = 0;  // as waitpid gives it
};

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return Text("was killed by signal ", number, " (", strsignal(number), ")");
  }
  return Text("exited with code ", WEXITSTATUS(status));
}

bool Failed(int status) {
  return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

// The variables of a rank in addition to the launcher's own.
std::vector<std::string> RankVariables(int rank, int nproc, int port,
                                       int store_fd, int error_fd,
                                       const std::string& job_id) {
  return {Text("RANK=", rank),          Text("LOCAL_RANK=", rank),
          Text("WORLD_SIZE=", nproc),   Text("LOCAL_WORLD_SIZE=", nproc),
          "MASTER_ADDR=127.0.0.1",      Text("MASTER_PORT=", port),
          Text(kJobId, "=", job_id),    Text(kStoreFd, "=", store_fd),
          Text(kErrorFd, "=", error_fd)};
}

std::string NameOfVariable(std::string_view setting) {
  return std::string(setting.substr(0, setting.find('=')));
}

// The environment for execve; the strings outlive the result.
std::vector<char*> Environment(const std::vector<std::string>& variables) {
  std::vector<char*> result;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string name = NameOfVariable(*e);
    const bool replaced =
        name == "TORCHELASTIC_USE_AGENT_STORE" ||
        std::any_of(variables.begin(), variables.end(),
                    [&](const auto& v) { return NameOfVariable(v) == name; });
    if (!replaced) result.push_back(*e);
  }
  for (const std::string& v : variables) {
    result.push_back(const_cast<char*>(v.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

// In the child: becomes the rank. Only calls that are safe after fork.
[[noreturn]] void BecomeRank(int rank, pid_t launcher, pid_t group,
                             int store_fd, const sigset_t& signals,
                             char* const* arguments, char* const* variables) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);  // it died before the line above
  setpgid(0, group);
  if (rank != 0) close(store_fd);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) {
    dup2(null, STDIN_FILENO);
    close(null);
  }
  // A shell's job in the background ignores it; ranks get it forwarded.
  signal(SIGINT, SIG_DFL);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  execve("/proc/self/exe", arguments, variables);
  _exit(127);
}

// Blocks the signals that the launcher waits for, for as long as it lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&waited_);
    // Nothing comes of SIGPIPE: who reads our words may end before the ranks.
    for (const int s : {SIGCHLD, SIGINT, SIGTERM, SIGPIPE}) {
      sigaddset(&waited_, s);
    }
    sigemptyset(&ending_);
    for (const int s : {SIGINT, SIGTERM}) sigaddset(&ending_, s);
    // Under nohup a terminal that goes away is to be ignored; and Ctrl-Z where
    // no shell would wake us.
    for (const int s : {SIGHUP, SIGTSTP}) {
      struct sigaction action = {};
      sigaction(s, nullptr, &action);
      if (action.sa_handler == SIG_IGN) continue;
      sigaddset(&waited_, s);
      if (s == SIGHUP) sigaddset(&ending_, s);
    }
    sigprocmask(SIG_BLOCK, &waited_, &before_);
  }
  ~BlockedSignals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  const sigset_t& before() const { return before_; }
  // The next signal, or 0 after a tenth of a second.
  int Next() {
    const timespec limit = {0, 100'000'000};
    const int number = sigtimedwait(&waited_, nullptr, &limit);
    return number > 0 ? number : 0;
  }
  // Whether this process has been told to end.
  bool Ending() {
    const timespec at_once = {0, 0};
    return sigtimedwait(&ending_, nullptr, &at_once) > 0;
  }

 private:
  sigset_t waited_;
  sigset_t ending_;  // of these
  sigset_t before_;
};

class Job {
 public:
  explicit Job(int error_fd) : error_fd_(error_fd) {}
  ~Job() {
    KillAll();
    for (RankProcess& rank : ranks_) {
      if (rank.running) waitpid(rank.pid, nullptr, 0);
    }
    close(error_fd_);
  }

  void Add(pid_t pid) { ranks_.push_back({pid, true, 0}); }
  pid_t group() const { return ranks_.empty() ? 0 : ranks_[0].pid; }

  void Forward(int signal) {
    for (const RankProcess& rank : ranks_) {
      if (rank.running) kill(rank.pid, signal);
    }
  }

  // With whatever processes the ranks have started.
  void KillAll() {
    killed_ = true;
    if (AnyRunning()) kill(-group(), SIGKILL);
    Forward(SIGKILL);  // a rank that has not joined the group yet
  }

  // Waits until all ranks have ended and returns the exit code.
  int Run(BlockedSignals& signals) {
    std::optional<Clock::time_point> deadline;
    Clock::time_point interrupted_at;
    for (;;) {
      const int signal = signals.Next();
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
        // Ranks end the step and save, however long that takes; who cannot wait
        // asks again.
        const auto now = Clock::now();
        if (interrupt_ == 0) {
          std::cerr << "tessera: ending what is under way; again: at once"
                    << std::endl;
          interrupt_ = signal;
          interrupted_at = now;
          Forward(signal);
          Forward(SIGCONT);  // a rank that is stopped could not end its step
        } else if (now - interrupted_at >= kOneInterrupt) {
          deadline = now;
        }
      }
      if (signal == SIGTSTP) Pause();
      ReadReports();
      Reap();
      if (first_failed_ && !deadline) {
        deadline = Clock::now() + kGraceAfterFailure;
      }
      if (deadline && Clock::now() >= *deadline) KillAll();
      if (!AnyRunning()) break;
    }
    ReadReports();
    // Whoever read our output has seen enough, as `head`.
    if (first_failed_ && WIFSIGNALED(ranks_[*first_failed_].status) &&
        WTERMSIG(ranks_[*first_failed_].status) == SIGPIPE) {
      return 128 + SIGPIPE;
    }
    if (!first_failed_ || FailedForInterrupt()) {
      const bool interrupted =
          interrupt_ != 0 || std::ranges::any_of(ranks_, [&](const auto& rank) {
            return IsInterrupted(rank.status);
          });
      return interrupted ? kInterruptedExitCode : 0;
    }
    std::cerr << "tessera: " << Cause() << std::endl;
    return ExitCode();
  }

 private:
  // Ctrl-Z: the terminal stops this process alone, as ranks have a group of
  // their own.
  void Pause() {
    Forward(SIGSTOP);
    raise(SIGSTOP);
    Forward(SIGCONT);
  }

  bool AnyRunning() const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const auto& rank) { return rank.running; });
  }

  // Whether a rank ended as it was told to.
  bool IsInterrupted(int status) const {
    if (WIFSIGNALED(status)) {
      return interrupt_ != 0 && WTERMSIG(status) == interrupt_;
    }
    // Also a rank that was told alone: all ranks then end alike.
    return WEXITSTATUS(status) == kInterruptedExitCode;
  }

  void Reap() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      RankProcess& rank = ranks_[r];
      if (!rank.running ||
          waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) {
        continue;
      }
      rank.running = false;
      if (killed_ || !Failed(rank.status) || IsInterrupted(rank.status)) {
        continue;
      }
      // Ranks that fail because a peer was killed may be reaped before it.
      const bool signalled = WIFSIGNALED(rank.status);
      if (!first_failed_ ||
          (signalled && !WIFSIGNALED(ranks_[*first_failed_].status))) {
        first_failed_ = r;
      }
    }
  }

  void ReadReports() {
    Report report;
    while (read(error_fd_, &report, sizeof(report)) == sizeof(report)) {
      reports_.push_back(report);
    }
  }

  // One line. A rank that was killed could not speak, but its peers saw in
  // which task; of ranks that failed the first to speak is the cause, unless
  // it only tells of another.
  std::string Cause() const {
    const RankProcess& rank = ranks_[*first_failed_];
    const std::string name =
        Text("rank ", *first_failed_, " (pid ", rank.pid, ")");
    if (WIFSIGNALED(rank.status)) {
      return Text(name, " ", HowItEnded(rank.status), TaskOfFirstFailed());
    }
    const Report* cause = nullptr;
    for (const Report& report : reports_) {
      if (cause == nullptr) cause = &report;
      if (!TellsOfAnother(report)) {
        cause = &report;
        break;
      }
    }
    if (cause == nullptr) {
      return Text(name, " ", HowItEnded(rank.status), " without saying why");
    }
    const std::string_view text = cause->text;
    const std::string prefix = Text("rank ", cause->rank);
    // "rank 1" begins "rank 12" too.
    const bool named =
        text.starts_with(prefix) &&
        text.find_first_of("0123456789", prefix.size()) != prefix.size();
    return named ? std::string(text) : Text(prefix, ": ", text);
  }

  // " in task 'T'" if a peer reported so.
  std::string TaskOfFirstFailed() const {
    for (const Report& report : reports_) {
      if (report.about == static_cast<int>(*first_failed_) &&
          report.task_of_dead[0] != '\0') {
        return Text(" ", report.task_of_dead);
      }
    }
    return "";
  }

  static bool TellsOfAnother(const Report& report) {
    return report.about != report.rank;
  }

  // Whether a rank failed since it learnt of another.
  bool WasTold(size_t r) const {
    return std::ranges::any_of(reports_, [&](const Report& report) {
      return report.rank == static_cast<int>(r) && TellsOfAnother(report);
    });
  }

  // Whether ranks failed only since others ended as they were told to.
  bool FailedForInterrupt() const {
    if (interrupt_ == 0) return false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const int status = ranks_[r].status;
      if (!Failed(status) || IsInterrupted(status)) continue;
      if (!WasTold(r)) return false;
    }
    return std::ranges::any_of(
        ranks_, [&](const auto& rank) { return IsInterrupted(rank.status); });
  }

  // That of the failure, whatever became of its peers.
  int ExitCode() const {
    bool bad_input = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const int status = ranks_[r].status;
      if (!Failed(status) || (interrupt_ != 0 && IsInterrupted(status))) {
        continue;
      }
      const bool is_2 = WIFEXITED(status) && WEXITSTATUS(status) == 2;
      const bool killed_for_it =
          killed_ && r != *first_failed_ && WIFSIGNALED(status);
      if (!is_2 && !killed_for_it && !WasTold(r)) return 1;
      bad_input = bad_input || is_2;
    }
    return bad_input ? 2 : 1;
  }

  const int error_fd_;
  std::vector<RankProcess> ranks_;
  std::vector<Report> reports_;
  std::optional<size_t> first_failed_;
  bool killed_ = false;
  int interrupt_ = 0;  // the first signal
};

}  // namespace

Result<int> LaunchRanks(int nproc, std::span<const std::string> arguments) {
  if (nproc < 1) return InvalidInput(Text("cannot run ", nproc, " ranks"));
  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0) {
    return Unavailable(Text("cannot make a pipe: ", std::strerror(errno)));
  }
  fcntl(error_pipe[0], F_SETFL, O_NONBLOCK);
  fcntl(error_pipe[1], F_SETFD, 0);  // the ranks inherit this end
  BlockedSignals signals;
  Job job(error_pipe[0]);
  auto socket = ListenOnLoopback();
  if (!socket) {
    close(error_pipe[1]);
    return socket.error();
  }
  std::random_device random;
  const std::string job_id = Text("tessera-", random(), "-", random());

  std::vector<std::string> words = {"tessera"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  const pid_t launcher = getpid();
  std::cout.flush();  // or the ranks would write it once more
  std::optional<Error> failure;
  bool interrupted = false;
  for (int rank = 0; rank < nproc && !failure; ++rank) {
    interrupted = signals.Ending();
    if (interrupted) break;
    const std::vector<std::string> variables = RankVariables(
        rank, nproc, socket->port, socket->fd, error_pipe[1], job_id);
    std::vector<char*> envp = Environment(variables);
    const pid_t pid = fork();
    if (pid == 0) {
      BecomeRank(rank, launcher, job.group(), socket->fd, signals.before(),
                 argv.data(), envp.data());
    }
    if (pid < 0) {
      failure = Unavailable(
          Text("cannot start rank ", rank, ": ", std::strerror(errno)));
    } else {
      setpgid(pid, rank == 0 ? pid : job.group());
      job.Add(pid);
    }
  }
  close(error_pipe[1]);
  close(socket->fd);
  if (failure) return *failure;
  if (interrupted) {
    std::cerr << "tessera: interrupted before all ranks were started"
              << std::endl;
    return kInterruptedExitCode;
  }
  return job.Run(signals);
}

namespace {

std::optional<int> NumberIn(const char* variable) {
  const char* text = std::getenv(variable);
  return ParseWhole<int>(text == nullptr ? "" : text);
}

}  // namespace

bool TellLauncher(const Error& error) {
  const std::optional<int> fd = NumberIn(kErrorFd);
  if (!fd) return false;
  Report report = {};
  report.rank = NumberIn("RANK").value_or(0);
  report.about = RankToldOf(error).value_or(report.rank);
  TaskOfDead(error).copy(report.task_of_dead, sizeof(report.task_of_dead) - 1);
  error.ToString().copy(report.text, sizeof(report.text) - 1);
  return write(*fd, &report, sizeof(report)) == sizeof(report);
}

void ReportRankError(const Error& error) {
  if (TellLauncher(error)) return;
  std::string line = error.ToString();
  if (const auto rank = NumberIn("RANK"))
    line = Text("rank ", *rank, ": ", line);
  std::cerr << "tessera: " << line << std::endl;
}

}  // namespace tessera
