#include "tools/verify.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/table.h"
#include "planner/io/json_value.h"
#include "planner/io/plan_io.h"
#include "tools/flags.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/job_ranks.h"
#include "tools/verb.h"

namespace tessera {
namespace {

constexpr const char* kSteps = "6";

// What of a search's command line says what is trained.
constexpr std::array<std::string_view, 11> kOfTraining = {
    "--model",      "--set",
    "--data",       "--global-batch",
    "--seq-len",    "--optimizer",
    "--lr",         "--weight-decay",
    "--clip",       "--stochastic-rounding",
    "--end-of-text"};

// A folder of its own, removed with what is in it.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> Make() {
    std::error_code error;
    std::string path = std::filesystem::temp_directory_path(error);
    path += "/tessera-verify-XXXXXX";
    if (error || mkdtemp(path.data()) == nullptr) {
      return Error{ErrorCode::kUnavailable,
                   std::string("cannot make a folder: ") + std::strerror(errno),
                   path};
    }
    return TemporaryFolder(std::move(path));
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept
      : path_(std::exchange(other.path_, "")) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

  std::string File(std::string_view name) const {
    return path_ + "/" + std::string(name);
  }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Runs this very program with its output in two files. An interrupt is passed
// on. Returns the exit code, or -1 where a signal ended it.
Result<int> RunSelf(const std::vector<std::string>& arguments,
                    const std::string& output, const std::string& errors) {
  std::vector<std::string> words = {"tessera"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const auto& interrupted = CatchInterrupts();
  std::cout.flush();
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) {
    return Error{ErrorCode::kUnavailable,
                 std::string("cannot start: ") + std::strerror(errno),
                 "tessera run"};
  }
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    const auto write_to = [](const std::string& path, int descriptor) {
      const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      if (file < 0 || dup2(file, descriptor) < 0) _exit(127);
      close(file);
    };
    write_to(output, STDOUT_FILENO);
    write_to(errors, STDERR_FILENO);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  int status = 0;
  bool told = false;
  for (;;) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) break;
    if (ended < 0 && errno != EINTR) {
      return Error{ErrorCode::kUnavailable,
                   std::string("cannot wait for it: ") + std::strerror(errno),
                   "tessera run"};
    }
    if (interrupted && !told) {
      kill(child, SIGTERM);
      told = true;
    }
    usleep(20'000);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string LastLine(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  if (end == std::string::npos) return "";
  const size_t begin = text.find_last_of('\n', end);
  return text.substr(begin + 1, end - begin);  // npos + 1 is 0
}

// Of `run`, on devices like the cluster's.
std::string BackendFor(const Cluster& cluster) {
  return cluster.TypeOf(DeviceId(0)).shared_memory ? "cpu" : "cuda";
}

}  // namespace

std::vector<std::string> TrainingArguments(
    const std::vector<std::string>& arguments) {
  std::vector<std::string> kept;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string name = arguments[i].substr(0, arguments[i].find('='));
    if (!name.starts_with("-")) continue;
    const bool keeps =
        std::ranges::find(kOfTraining, name) != kOfTraining.end();
    const bool value_follows =
        name == arguments[i] && !FlagNamed(name).value.empty();
    if (keeps) kept.push_back(arguments[i]);
    if (value_follows && ++i < arguments.size() && keeps) {
      kept.push_back(arguments[i]);
    }
  }
  return kept;
}

Result<void> CheckMeasurable(const Options& options, const Graph& graph,
                             const Cluster& cluster) {
  const auto check = [&]() -> Result<void> {
    TESSERA_TRY(const Backend* const backend,
                Find("backend", Backends(), BackendFor(cluster)));
    const auto ranks = static_cast<int>(cluster.devices.size());
    TESSERA_TRY([[maybe_unused]] const auto share,
                GpuShareOf(*backend, LastRank(ranks)));
    if (options.data.empty()) {
      return UnitOf(graph) == "tokens" ? InvalidInput("needs --data FILE")
                                       : Result<void>();
    }
    return CheckReadable(options.data);
  }();
  return check ? check : check.error().At("--verify");
}

Result<Duration> MeasureStep(const Options& options, const Graph& graph,
                             const Cluster& cluster, const Plan& plan) {
  TESSERA_TRY(const TemporaryFolder folder, TemporaryFolder::Make());
  const std::string plan_file = folder.File("plan.json");
  TESSERA_RETURN_IF_ERROR(WritePlan(plan_file, graph, plan));
  std::vector<std::string> arguments = {"run",
                                        "--plan",
                                        plan_file,
                                        "--dtype",
                                        std::string(NameOf(graph.dtype)),
                                        "--backend",
                                        BackendFor(cluster),
                                        "--steps",
                                        kSteps,
                                        "--json"};
  for (std::string& word : TrainingArguments(options.arguments)) {
    arguments.push_back(std::move(word));
  }
  const std::string output = folder.File("output");
  const std::string errors = folder.File("errors");
  TESSERA_TRY(const int code, RunSelf(arguments, output, errors));
  if (CatchInterrupts()) {
    return Error{ErrorCode::kInterrupted, "interrupted", "--verify"};
  }
  if (code != 0) {
    const auto said = ReadFile(errors);
    std::string why = said ? LastLine(*said) : "";
    constexpr std::string_view kPrefix = "tessera: ";
    if (why.starts_with(kPrefix)) why.erase(0, kPrefix.size());
    return Error{code == ExitCodeOf(ErrorCode::kInvalidInput)
                     ? ErrorCode::kInvalidInput
                     : ErrorCode::kUnavailable,
                 why.empty() ? "ended with code " + std::to_string(code) : why,
                 "tessera run"};
  }
  TESSERA_TRY(const JsonValue result, ReadJson(output));
  return Duration::FromSeconds(result.Field("step_time_s").number);
}

}  // namespace tessera
