#include "runtime/launch/launch.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <optional>
#include <random>
#include <string_view>
#include <vector>

#include "planner/base/file_descriptor.h"
#include "planner/base/whole_number.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/store.h"
#include "runtime/comm/text.h"
#include "runtime/launch/rank_environment.h"

extern char** environ;

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGraceAfterFailure = std::chrono::seconds(5);
constexpr const char* kErrorFd = "TESSERA_ERROR_FD";

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
  return {Text("RANK=", rank),
          Text("LOCAL_RANK=", rank),
          Text("WORLD_SIZE=", nproc),
          Text("LOCAL_WORLD_SIZE=", nproc),
          "MASTER_ADDR=127.0.0.1",
          Text("MASTER_PORT=", port),
          Text(kJobIdVariable, "=", job_id),
          Text(kStoreFdVariable, "=", store_fd),
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

// This program.
constexpr char kSelf[] = "/proc/self/exe";

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
  execve(kSelf, arguments, variables);
  _exit(127);
}

// Blocks the signals that the launcher waits for, for as long as it lives. Who
// started it may ignore SIGCHLD: then nobody would learn how ranks end.
class BlockedSignals {
 public:
  BlockedSignals() {
    struct sigaction children = {};
    children.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &children, &children_before_);
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
    sigorset(&of_ranks_, &before_, &ending_);
  }
  ~BlockedSignals() {
    sigaction(SIGCHLD, &children_before_, nullptr);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  // What ranks have blocked at first.
  const sigset_t& of_ranks() const { return of_ranks_; }
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
  sigset_t of_ranks_;
  struct sigaction children_before_ = {};
};

class Job {
 public:
  explicit Job(FileDescriptor errors) : errors_(std::move(errors)) {}
  ~Job() {
    KillAll();
    for (RankProcess& rank : ranks_) {
      if (rank.running) waitpid(rank.pid, nullptr, 0);
    }
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
    for (;;) {
      const int signal = signals.Next();
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
        // Ranks end the step and save, however long that takes; who cannot wait
        // asks again.
        const auto now = Clock::now();
        if (interrupt_ == 0) {
          std::cerr << "tessera: ending what is under way; again: at once"
                    << std::endl;
          Interrupt(signal);
        } else if (now - interrupted_at_ >= kOneInterrupt) {
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
  void Interrupt(int signal) {
    interrupt_ = signal;
    interrupted_at_ = Clock::now();
    Forward(signal);
    Forward(SIGCONT);  // a rank that is stopped could not end its step
  }

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
      // Others would wait for one that was told alone before it met them, and
      // says so. Those that have met end together.
      ReadReports();
      if (interrupt_ == 0 && IsInterrupted(rank.status) && HasSpoken(r)) {
        Interrupt(SIGTERM);
      }
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
    while (read(errors_.get(), &report, sizeof(report)) == sizeof(report)) {
      reports_.push_back(report);
    }
  }

  bool HasSpoken(size_t r) const {
    return std::ranges::any_of(reports_, [&](const Report& report) {
      return report.rank == static_cast<int>(r);
    });
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

  const FileDescriptor errors_;  // what ranks report
  std::vector<RankProcess> ranks_;
  std::vector<Report> reports_;
  std::optional<size_t> first_failed_;
  bool killed_ = false;
  int interrupt_ = 0;  // the first signal
  Clock::time_point interrupted_at_;
};

}  // namespace

Result<int> LaunchRanks(int nproc, std::span<const std::string> arguments,
                        const std::atomic<bool>* stop) {
  if (nproc < 1) return InvalidInput(Text("cannot run ", nproc, " ranks"));
  if (access(kSelf, X_OK) != 0) {
    return Unavailable(Text("cannot start ranks: ", kSelf, ": ",
                            std::strerror(errno),
                            errno == ENOENT ? "; is /proc mounted?" : ""));
  }
  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0) {
    return Unavailable(Text("cannot make a pipe: ", std::strerror(errno)));
  }
  FileDescriptor errors(error_pipe[0]);
  FileDescriptor errors_of_ranks(error_pipe[1]);
  fcntl(errors.get(), F_SETFL, O_NONBLOCK);
  fcntl(errors_of_ranks.get(), F_SETFD, 0);  // the ranks inherit this end
  TESSERA_TRY(const ListeningSocket socket, ListenOnLoopback());
  FileDescriptor listener(socket.fd);
  BlockedSignals signals;
  Job job(std::move(errors));
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
    interrupted = (stop != nullptr && stop->load()) || signals.Ending();
    if (interrupted) break;
    const std::vector<std::string> variables = RankVariables(
        rank, nproc, socket.port, socket.fd, errors_of_ranks.get(), job_id);
    std::vector<char*> envp = Environment(variables);
    const pid_t pid = fork();
    if (pid == 0) {
      BecomeRank(rank, launcher, job.group(), socket.fd, signals.of_ranks(),
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
  // From here on the ranks alone have them.
  errors_of_ranks = FileDescriptor();
  listener = FileDescriptor();
  if (failure) return *failure;
  if (interrupted) {
    return Error{ErrorCode::kInterrupted,
                 "interrupted before all ranks were started", ""};
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
